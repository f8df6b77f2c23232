"""The whitened attention by this project's C text, ``cpu_src/nystrom_attention.c``."""

from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cpu_runtime
from ..laplacian_kernel import cpu_impl as kernels
from ..laplacian_kernel.cpu_impl import KERNELS, exponent_pair, slope
from ..newton_schulz import default_iters
from .tiles import empty_tokens

_SOURCE = 'nystrom_attention'


def check(q: Tensor) -> None:
    """Raises where the C text cannot serve queries like these.

    Raises:
        UnsupportedError: Device or dtype is not its own, or it cannot be compiled here.
    """
    kernels.check(q)
    cpu_runtime.library(_SOURCE)


def serves(v: Tensor, landmarks: Tensor, normalize: str) -> bool:
    """Whether the C text has this map and so many landmarks; else its kernels do in the torch
    form."""
    return normalize == 'whiten' and landmarks.shape[2] <= cpu_runtime.constant(
        _SOURCE, 'largest')


def _padded(x: Tensor) -> Tensor:
    """Dense channels up to whole vectors. Equal ones on both sides change no distance."""
    missing = -x.shape[-1] % cpu_runtime.constant(_SOURCE, 'lanes')
    if missing:
        return F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def _cut(x: Tensor, channels: int) -> Tensor:
    """Without the channels that were added, laid out as :func:`empty_tokens` does."""
    if x.shape[-1] == channels:
        return x
    x = x[..., :channels]
    return empty_tokens(x).copy_(x)


def _strides(*tensors: Tensor) -> Sequence[int]:
    """(image, head, token) of each, one after the other."""
    numbers = [stride for x in tensors for stride in x.stride()[:3]]
    return (c_int64 * len(numbers))(*numbers)


def _sizes(q: Tensor, v: Tensor, landmarks: Tensor) -> tuple[c_int64 | c_int, ...]:
    """Groups, heads, n, m, d, d_v, and the threads that these are worth."""
    batch, heads, n, d = q.shape
    m = landmarks.shape[2]
    return (*map(c_int64, (batch * heads, heads, n, m, d, v.shape[-1])),
            c_int(cpu_runtime.threads(q.numel() * m)))


def nystrom_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kernel_scale: float,
                      ridge: float, whiten_eps: float, solver_iters: int | None, kernel: str,
                      normalize: str) -> tuple[Tensor, list[Tensor]]:
    """See :func:`mmlaplacian.ops.nystrom_attention.torch_impl.nystrom_attention`."""
    marks = landmarks.contiguous().flatten(0, 1)[None]
    w = kernels.kernel_matrix(marks, marks, kernel_scale, kernel)[0]
    if solver_iters is None:
        solver_iters = default_iters(w.shape[-1], ridge, w.dtype)
    (groups, m, _), d_v = w.shape, v.shape[-1]
    q, k, v, marks = map(_padded, (q, k, v, marks))
    out = empty_tokens(v)
    p, context, mean, covariance = (
        w.new_empty(groups, *shape) for shape in ((m, m), (m, v.shape[-1]), (1, m), (m, m)))
    cpu_runtime.call_with_scratch(
        _SOURCE, 'nystrom_attention_forward',
        (q, k, v, marks, w, out, _strides(q, k, v, out), p, context, mean, covariance),
        (c_float(ridge), c_int64(solver_iters), c_int(KERNELS[kernel]),
         *exponent_pair(kernel_scale, kernel), c_float(whiten_eps), *_sizes(q, v, landmarks)))
    return _cut(out, d_v), [w, p, context[..., :d_v].contiguous(), mean, covariance]


def nystrom_attention_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor,
                               landmarks: Tensor, kept: list[Tensor], kernel_scale: float,
                               whiten_eps: float, kernel: str,
                               normalize: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`mmlaplacian.ops.nystrom_attention.torch_impl.nystrom_attention_backward`."""
    w, p, context, mean, covariance = kept
    d, d_v = q.shape[-1], v.shape[-1]
    marks = landmarks.contiguous().flatten(0, 1)
    grad_out, q, k, v, context, marks = map(_padded, (grad_out, q, k, v, context, marks))
    grad_q, grad_k, grad_v = map(empty_tokens, (q, k, v))
    grad_marks, grad_w = torch.empty_like(marks), torch.empty_like(w)
    cpu_runtime.call_with_scratch(
        _SOURCE, 'nystrom_attention_backward',
        (q, k, v, marks, p, context, mean, covariance, grad_out, grad_q, grad_k, grad_v,
         _strides(q, k, v, grad_out, grad_q, grad_k, grad_v), grad_marks, grad_w),
        (c_int(KERNELS[kernel]), *exponent_pair(kernel_scale, kernel), slope(kernel_scale),
         c_float(whiten_eps), *_sizes(q, v, landmarks)))
    for gradient in kernels.kernel_matrix_backward(grad_w[None], marks[None], marks[None], w[None],
                                                   kernel_scale, kernel, True, True):
        grad_marks += gradient[0]
    grad_landmarks = grad_marks[..., :d].unflatten(0, landmarks.shape[:2]).contiguous()
    return (_cut(grad_q, d), _cut(grad_k, d), _cut(grad_v, d_v), grad_landmarks)
