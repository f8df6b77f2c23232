"""The solver as operators of torch.library: one schema, whatever implementation serves it.

``torch.ops.mmlaplacian.newton_schulz_inverse``, its backward and residual work under autograd,
autocast, ``torch.compile``, fake tensors and FLOP counters. They trust their arguments: call the
frontend.
"""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from ..backend import choose
from . import cupy_impl, torch_impl
from .schedule import default_iters

_IMPLEMENTATIONS = {'torch': torch_impl, 'cupy': cupy_impl}


def _implementation(w: Tensor) -> ModuleType:
    return choose('newton_schulz_inverse', w, _IMPLEMENTATIONS)


@torch.library.custom_op('mmlaplacian::newton_schulz_inverse', mutates_args=())
def newton_schulz_inverse(w: Tensor, solver_iters: int | None,
                          spd_lower_bound: float | None) -> Tensor:
    """Inverses by the Newton-Schulz iteration.

    Args:
        w: Matrices ``(batch, M, M)``, float32 or float64.
        solver_iters: Steps; None for :func:`default_iters`.
        spd_lower_bound: Positive lower bound of the eigenvalues of symmetric positive definite
            matrices, or None for any nonsingular ones.

    Returns:
        ``(batch, M, M)``, dense.
    """
    if solver_iters is None:
        solver_iters = default_iters(w.shape[-1], spd_lower_bound, w.dtype)
    return _implementation(w).newton_schulz_inverse(w.contiguous(), solver_iters, spd_lower_bound)


@torch.library.custom_op('mmlaplacian::newton_schulz_inverse_backward', mutates_args=())
def newton_schulz_inverse_backward(grad_x: Tensor, x: Tensor) -> Tensor:
    """Gradient of an inverse X, -X^T dX X^T, ``(batch, M, M)``. Valid at convergence."""
    return _implementation(x).newton_schulz_inverse_backward(grad_x.contiguous(), x.contiguous())


@torch.library.custom_op('mmlaplacian::newton_schulz_residual', mutates_args=())
def newton_schulz_residual(w: Tensor, x: Tensor) -> Tensor:
    """max |W X - I| over the entries of each matrix, ``(batch, )``. Gets no gradient."""
    return _implementation(w).newton_schulz_residual(w.contiguous(), x.contiguous())


@newton_schulz_inverse.register_fake
def _(w: Tensor, solver_iters: int | None, spd_lower_bound: float | None) -> Tensor:
    return w.new_empty(w.shape)


@newton_schulz_inverse_backward.register_fake
def _(grad_x: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@newton_schulz_residual.register_fake
def _(w: Tensor, x: Tensor) -> Tensor:
    return w.new_empty(w.shape[0])


def _setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, int | None, float | None],
                   output: Tensor) -> None:
    """Keeps X alone: the backward is implicit, without a graph through the steps."""
    ctx.save_for_backward(output)


def _backward(ctx: FunctionCtx, grad_x: Tensor) -> tuple[Tensor, None, None]:
    return newton_schulz_inverse_backward(grad_x, *ctx.saved_tensors), None, None


newton_schulz_inverse.register_autograd(_backward, setup_context=_setup_context)
for _device_type in ('cpu', 'cuda'):
    newton_schulz_inverse.register_autocast(_device_type, torch.float32)
    newton_schulz_residual.register_autocast(_device_type, torch.float32)


def _product_flops(batch: int, m: int) -> int:
    return 2 * batch * m**3


@register_flop_formula(torch.ops.mmlaplacian.newton_schulz_inverse)
def _flops(w_shape: torch.Size, solver_iters: int | None, spd_lower_bound: float | None,
           out_shape: torch.Size | None = None) -> int:
    """Two products a step; the default count is taken as in float32."""
    batch, m, _ = w_shape
    if solver_iters is None:
        solver_iters = default_iters(m, spd_lower_bound, torch.float32)
    return 2 * solver_iters * _product_flops(batch, m)


@register_flop_formula(torch.ops.mmlaplacian.newton_schulz_inverse_backward)
def _backward_flops(grad_shape: torch.Size, x_shape: torch.Size,
                    out_shape: torch.Size | None = None) -> int:
    """Two products."""
    return 2 * _product_flops(*x_shape[:2])


@register_flop_formula(torch.ops.mmlaplacian.newton_schulz_residual)
def _residual_flops(w_shape: torch.Size, x_shape: torch.Size,
                    out_shape: torch.Size | None = None) -> int:
    """One product."""
    return _product_flops(*w_shape[:2])
