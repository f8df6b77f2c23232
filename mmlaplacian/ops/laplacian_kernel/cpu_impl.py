"""The kernels by this project's C text, ``cpu_src/laplacian_kernel.c``."""

import math
from ctypes import c_float, c_int, c_int64

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cpu_runtime

_SOURCE = 'laplacian_kernel'
KERNELS = {'laplacian': 0, 'gaussian': 1}
"""Their numbers in the C text."""

_LARGEST = torch.finfo(torch.float32).max
_LEAST_CHUNK = 512


def check(q: Tensor) -> None:
    """Raises where the C text cannot serve queries like these.

    Raises:
        UnsupportedError: Device or dtype is not its own, or it cannot be compiled here.
    """
    cpu_runtime.check(q)
    cpu_runtime.library(_SOURCE)


def _float32_pair(value: float) -> tuple[c_float, c_float]:
    """Two float32 numbers whose sum is ``value`` <= 0, the largest finite one for smaller ones.

    Infinity times a distance of 0 would be NaN.
    """
    high = c_float(max(value, -_LARGEST))
    return high, c_float(max(value, -_LARGEST) - high.value)


def exponent_pair(kernel_scale: float, kernel: str) -> tuple[c_float, c_float]:
    """Factor of the distance in the power of two, computed in float64, as two float32 numbers."""
    return _float32_pair(-math.log2(math.e) / (kernel_scale * (2 if kernel == 'gaussian' else 1)))


def slope(kernel_scale: float) -> c_float:
    """Derivative of the exponent by the L1 distance, or by half of the squared L2 distance."""
    return _float32_pair(-1 / kernel_scale)[0]


def _chunk(m: int) -> int:
    """Queries whose part of the key gradient is summed apart: depends on no machine.

    The parts take at most an eighth of the memory of q.
    """
    return max(_LEAST_CHUNK, 8 * m)


def _padded(x: Tensor) -> Tensor:
    """Channels up to whole vectors; equal ones on both sides have no gradient."""
    missing = -x.shape[-1] % cpu_runtime.constant(_SOURCE, 'lanes')
    return F.pad(x, (0, missing)) if missing else x


def _sizes(q: Tensor, k: Tensor) -> tuple[c_int64, ...]:
    """Groups B * h, n, m and d."""
    return tuple(map(c_int64, (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])))


def _threads(q: Tensor, k: Tensor) -> c_int:
    return c_int(cpu_runtime.threads(q.numel() * k.shape[-2]))


def kernel_matrix(q: Tensor, k: Tensor, kernel_scale: float, kernel: str) -> Tensor:
    """See :func:`mmlaplacian.ops.laplacian_kernel.registration.kernel_matrix`."""
    output = q.new_empty(*q.shape[:-1], k.shape[-2])
    if output.numel():
        cpu_runtime.call(_SOURCE, 'laplacian_kernel_forward', (
            q, k, output, c_int(KERNELS[kernel]), *exponent_pair(kernel_scale, kernel),
            *_sizes(q, k), _threads(q, k)))
    return output


def kernel_matrix_backward(grad_output: Tensor, q: Tensor, k: Tensor, output: Tensor,
                           kernel_scale: float, kernel: str, needs_q: bool,
                           needs_k: bool) -> tuple[Tensor, Tensor]:
    """See :func:`mmlaplacian.ops.laplacian_kernel.registration.kernel_matrix_backward`."""
    d = q.shape[-1]
    q, k = _padded(q), _padded(k)
    chunk = _chunk(k.shape[-2])
    grad_q = torch.empty_like(q) if needs_q else None
    grad_k = torch.empty_like(k) if needs_k else None
    partial = q.new_empty(*q.shape[:2], -(-q.shape[2] // chunk), *k.shape[2:]) if needs_k else None
    if needs_q or needs_k:
        cpu_runtime.call(_SOURCE, 'laplacian_kernel_backward', (
            grad_output, q, k, output, grad_q, partial, grad_k, c_int(KERNELS[kernel]),
            slope(kernel_scale), *_sizes(q, k), c_int64(chunk), _threads(q, k)))
    return tuple(x.new_empty(0) if grad is None else grad[..., :d].contiguous()
                 for x, grad in ((q, grad_q), (k, grad_k)))
