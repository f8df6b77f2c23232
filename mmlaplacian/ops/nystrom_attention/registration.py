"""The attention as an operator of torch.library: autograd, ``torch.compile``, FLOP counters.

``torch.ops.mmlaplacian.nystrom_attention`` trusts its arguments: call the frontend.
"""

from math import prod
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from ..backend import choose
from ..newton_schulz import default_iters
from ..precision import autocast_off, compute_dtype
from . import cpu_impl, cupy_impl, torch_impl
from .tiles import empty_tokens


def _implementation(q: Tensor, v: Tensor, landmarks: Tensor, normalize: str) -> ModuleType:
    """The module whose ``nystrom_attention`` serves inputs like these."""
    implementations = {'torch': torch_impl, 'cpu': cpu_impl, 'cupy': cupy_impl}
    chosen = choose('nystrom_attention', q, implementations)
    return chosen if chosen.serves(v, landmarks, normalize) else torch_impl


def _kept_shapes(q: Tensor, v: Tensor, landmarks: Tensor,
                 normalize: str) -> list[tuple[int, int, int]]:
    """Shapes of w, p and the map's state."""
    m = landmarks.shape[2]
    shapes = ((m, m), (m, m), *torch_impl.MAPS[normalize].state_shapes(m, v.shape[-1]))
    return [(q.shape[0] * q.shape[1], *shape) for shape in shapes]


@torch.library.custom_op('mmlaplacian::nystrom_attention', mutates_args=())
def nystrom_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kernel_scale: float,
                      ridge: float, whiten_eps: float, solver_iters: int | None, kernel: str,
                      normalize: str) -> list[Tensor]:
    """Output ``(B, h, N, d_v)`` and what the backward keeps: nothing that grows with N.

    Arguments as of :func:`mmlaplacian.ops.nystrom_attention`, tensors of one dtype.
    """
    if not prod(q.shape[:3]):
        dtype = compute_dtype(q)
        return [empty_tokens(v), *(v.new_zeros(shape, dtype=dtype)
                                        for shape in _kept_shapes(q, v, landmarks, normalize))]
    with autocast_off(q):
        out, kept = _implementation(q, v, landmarks, normalize).nystrom_attention(
            q, k, v, landmarks, kernel_scale, ridge, whiten_eps, solver_iters, kernel, normalize)
    return [out, *kept]


@torch.library.custom_op('mmlaplacian::nystrom_attention_backward', mutates_args=())
def nystrom_attention_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor,
                               landmarks: Tensor, kept: list[Tensor], kernel_scale: float,
                               whiten_eps: float, kernel: str,
                               normalize: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and landmarks."""
    inputs = q, k, v, landmarks
    if not prod(q.shape[:3]):
        return *(empty_tokens(x).zero_() for x in inputs[:3]), landmarks.new_zeros(landmarks.shape)
    with autocast_off(q):
        return _implementation(q, v, landmarks, normalize).nystrom_attention_backward(
            grad_out, *inputs, kept, kernel_scale, whiten_eps, kernel, normalize)


@nystrom_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kernel_scale: float, ridge: float,
      whiten_eps: float, solver_iters: int | None, kernel: str, normalize: str) -> list[Tensor]:
    dtype = compute_dtype(q)
    return [empty_tokens(v), *(v.new_empty(shape, dtype=dtype)
                                    for shape in _kept_shapes(q, v, landmarks, normalize))]


@nystrom_attention_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kept: list[Tensor],
      kernel_scale: float, whiten_eps: float, kernel: str,
      normalize: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *map(empty_tokens, (q, k, v)), landmarks.new_empty(landmarks.shape)


def _setup_context(ctx: FunctionCtx, inputs: tuple, output: list[Tensor]) -> None:
    q, k, v, landmarks, ctx.kernel_scale, _, ctx.whiten_eps, _, ctx.kernel, ctx.normalize = inputs
    ctx.save_for_backward(q, k, v, landmarks, *output[1:])


def _backward(ctx: FunctionCtx, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    q, k, v, landmarks, *kept = ctx.saved_tensors
    gradients = nystrom_attention_backward(grads[0], q, k, v, landmarks, kept, ctx.kernel_scale,
                                           ctx.whiten_eps, ctx.kernel, ctx.normalize)
    return *gradients, *(None, ) * 6


nystrom_attention.register_autograd(_backward, setup_context=_setup_context)


def _products(n: int, m: int, d_v: int, normalize: str) -> tuple[int, int]:
    """Multiply-adds of one group's products with N rows, in the forward and the backward."""
    square, context = n * m * m, n * m * d_v
    if normalize == 'whiten':
        return 3 * square + 2 * context, 6 * square + 4 * context
    return square + 2 * context, 3 * square + (5 if normalize == 'row' else 4) * context


@register_flop_formula(torch.ops.mmlaplacian.nystrom_attention)
def _flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size,
           landmarks_shape: torch.Size, kernel_scale: float, ridge: float, whiten_eps: float,
           solver_iters: int | None, kernel: str, normalize: str,
           out_shape: list[torch.Size] | None = None) -> int:
    """Three distances at two operations an element, the solver, the products with tokens."""
    m, d_v = landmarks_shape[2], v_shape[3]
    if solver_iters is None:
        solver_iters = default_iters(m, ridge, torch.float32)
    distances = (2 * prod(q_shape) + prod(landmarks_shape)) * m
    products, _ = _products(q_shape[2], m, d_v, normalize)
    groups = q_shape[0] * q_shape[1]
    return 2 * (distances + groups * (2 * solver_iters * m**3 + products))


@register_flop_formula(torch.ops.mmlaplacian.nystrom_attention_backward)
def _backward_flops(grad_shape: torch.Size, q_shape: torch.Size, k_shape: torch.Size,
                    v_shape: torch.Size, landmarks_shape: torch.Size, kept: list[torch.Size],
                    kernel_scale: float, whiten_eps: float, kernel: str, normalize: str,
                    out_shape: tuple[torch.Size, ...] | None = None) -> int:
    """Distances again, their gradients on both sides at three operations an element, products."""
    m, d_v = landmarks_shape[2], v_shape[3]
    tokens, marks = 2 * prod(q_shape) * m, prod(landmarks_shape) * m
    _, products = _products(q_shape[2], m, d_v, normalize)
    groups = q_shape[0] * q_shape[1]
    return 2 * tokens + 6 * (tokens + marks) + 2 * groups * (2 * m**3 + products)
