"""The kernels as operators of torch.library: one schema, whatever implementation serves it.

``torch.ops.mmlaplacian.kernel_matrix`` and its backward work under autograd, autocast,
``torch.compile``, fake tensors and FLOP counters. They trust their arguments: call the frontend.
"""

from math import prod
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from ..backend import choose
from . import cpu_impl, cupy_impl, torch_impl

_IMPLEMENTATIONS = {'torch': torch_impl, 'cpu': cpu_impl, 'cupy': cupy_impl}


def implementation(q: Tensor, kernel: str) -> ModuleType:
    """The module whose ``kernel_matrix`` serves queries like these."""
    return choose(f'{kernel}_kernel', q, _IMPLEMENTATIONS)


@torch.library.custom_op('mmlaplacian::kernel_matrix', mutates_args=())
def kernel_matrix(q: Tensor, k: Tensor, kernel_scale: float, kernel: str) -> Tensor:
    """Kernel matrix of every query with every key.

    Args:
        q: Queries ``(B, h, N, d)``.
        k: Keys ``(B, h, M, d)`` of the same dtype.
        kernel_scale: lambda > 0.
        kernel: ``'laplacian'`` or ``'gaussian'``.

    Returns:
        ``(B, h, N, M)``, dense, in the dtype of the inputs.
    """
    return implementation(q, kernel).kernel_matrix(q.contiguous(), k.contiguous(), kernel_scale,
                                                    kernel)


@torch.library.custom_op('mmlaplacian::kernel_matrix_backward', mutates_args=())
def kernel_matrix_backward(grad_output: Tensor, q: Tensor, k: Tensor, output: Tensor,
                           kernel_scale: float, kernel: str, needs_q: bool,
                           needs_k: bool) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`kernel_matrix` for q and k; one that is not needed is empty."""
    if not output.numel():
        return q.new_zeros(q.shape if needs_q else 0), k.new_zeros(k.shape if needs_k else 0)
    # Dense whatever the strides of the incoming gradient (zeros after a sum()).
    tensors = (x.contiguous() for x in (grad_output, q, k, output))
    return implementation(q, kernel).kernel_matrix_backward(*tensors, kernel_scale, kernel,
                                                             needs_q, needs_k)


@kernel_matrix.register_fake
def _(q: Tensor, k: Tensor, kernel_scale: float, kernel: str) -> Tensor:
    return q.new_empty(*q.shape[:-1], k.shape[-2])


@kernel_matrix_backward.register_fake
def _(grad_output: Tensor, q: Tensor, k: Tensor, output: Tensor, kernel_scale: float,
      kernel: str, needs_q: bool, needs_k: bool) -> tuple[Tensor, Tensor]:
    return (q.new_empty(q.shape if needs_q else 0), k.new_empty(k.shape if needs_k else 0))


def _setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, float, str],
                   output: Tensor) -> None:
    """Keeps q, k and K: no distance is stored."""
    q, k, ctx.kernel_scale, ctx.kernel = inputs
    ctx.save_for_backward(q, k, output)


def _backward(ctx: FunctionCtx,
              grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    needs_q, needs_k = ctx.needs_input_grad[:2]
    grad_q, grad_k = kernel_matrix_backward(grad_output, *ctx.saved_tensors, ctx.kernel_scale,
                                            ctx.kernel, needs_q, needs_k)
    return grad_q if needs_q else None, grad_k if needs_k else None, None, None


kernel_matrix.register_autograd(_backward, setup_context=_setup_context)
for _device_type in ('cpu', 'cuda'):
    kernel_matrix.register_autocast(_device_type, torch.float32)


@register_flop_formula(torch.ops.mmlaplacian.kernel_matrix)
def _flops(q_shape: torch.Size, k_shape: torch.Size, kernel_scale: float, kernel: str,
           out_shape: torch.Size | None = None) -> int:
    """Two operations for each (query, key, channel): a difference and its sum."""
    return 2 * prod(q_shape) * k_shape[-2]


@register_flop_formula(torch.ops.mmlaplacian.kernel_matrix_backward)
def _backward_flops(grad_shape: torch.Size, q_shape: torch.Size, k_shape: torch.Size,
                    output_shape: torch.Size, kernel_scale: float, kernel: str, needs_q: bool,
                    needs_k: bool, out_shape: tuple[torch.Size, torch.Size] | None = None) -> int:
    """A sign (or difference) and a multiply-add for each element and each gradient."""
    return 3 * (needs_q + needs_k) * prod(q_shape) * k_shape[-2]
