"""The kernels by this project's CUDA text, ``cuda/laplacian_kernel.cu``."""

import math
from ctypes import c_float, c_longlong

import torch
from torch import Tensor

from .. import cupy_runtime
from ..backend import UnsupportedError
from .tiling import MAX_HEAD_DIM, Tiling, landmark_tile

SCALAR_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
KERNELS = {'laplacian': 0, 'gaussian': 1}


def check(q: Tensor) -> None:
    """Raises where the CUDA kernels cannot serve queries like these.

    Raises:
        UnsupportedError: Device, dtype or head dim is not theirs.
        ImportError: CuPy cannot be imported.
    """
    if not q.is_cuda:
        raise UnsupportedError(f'the CUDA kernels need CUDA tensors, got {q.device}')
    if q.dtype not in SCALAR_TYPES:
        raise UnsupportedError(f'the CUDA kernels take {[str(t) for t in SCALAR_TYPES]}, got '
                               f'{q.dtype}')
    if q.shape[-1] > MAX_HEAD_DIM:
        raise UnsupportedError(f'the CUDA kernels take head dims up to {MAX_HEAD_DIM}, got '
                               f'{q.shape[-1]}')
    cupy_runtime.require_cupy()


def _finite(scale: float) -> c_float:
    """The negative scale in float32, where infinity times a distance of 0 would be NaN."""
    return c_float(max(scale, -torch.finfo(torch.float32).max))


def exponent_scale(kernel_scale: float, kernel: str) -> c_float:
    """What makes exp(-distance / scale) a power of two, computed in float64."""
    return _finite(-math.log2(math.e) / (kernel_scale * (2 if kernel == 'gaussian' else 1)))


def gradient_scale(kernel_scale: float) -> c_float:
    """-1 / kernel_scale, the factor of both kernels' gradients."""
    return _finite(-1 / kernel_scale)


class _Launcher:
    """Launches the four kernels for one size, dtype and kind."""

    def __init__(self, q: Tensor, k: Tensor, kernel: str) -> None:
        self.tiling = Tiling(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
        m_threads, m_outputs = landmark_tile(self.tiling.m)
        self.macros = (('SCALAR_TYPE', SCALAR_TYPES[q.dtype]), ('KERNEL', KERNELS[kernel]),
                       ('HEAD_DIM', self.tiling.d), ('M_THREADS', m_threads),
                       ('M_OUTPUTS', m_outputs))
        self.device = q.device

    def _launch(self, function: str, *arguments: Tensor | c_float | c_longlong) -> None:
        blocks, threads = getattr(self.tiling, function)()
        kernel = cupy_runtime.Kernel('laplacian_kernel', f'laplacian_kernel_{function}',
                                     self.macros)
        cupy_runtime.launch(kernel, blocks, threads, arguments, self.device)

    def run(self, function: str, *arguments: Tensor | c_float, extra: tuple = ()) -> None:
        """Launches a kernel whose arguments end in groups, n, m and ``extra``."""
        sizes = (self.tiling.groups, self.tiling.n, self.tiling.m)
        self._launch(function, *arguments, *map(c_longlong, (*sizes, *extra)))

    def key_gradient(self, tensors: tuple[Tensor, ...], scale: c_float) -> Tensor:
        """Sums chunks of queries, then the chunks: fixed orders, so two runs agree in bits."""
        k, tiling = tensors[1], self.tiling
        partial = torch.empty(tiling.groups, tiling.n_chunks, tiling.m, tiling.d,
                              dtype=torch.float32, device=self.device)
        self.run('backward_k', *tensors, partial, scale, extra=(tiling.rows_per_chunk, ))
        grad_k = torch.empty_like(k)
        self._launch('reduce_k', partial, grad_k, c_longlong(tiling.groups),
                     c_longlong(tiling.n_chunks), c_longlong(tiling.m * tiling.d))
        return grad_k


def kernel_matrix(q: Tensor, k: Tensor, kernel_scale: float, kernel: str) -> Tensor:
    """See :func:`mmlaplacian.ops.laplacian_kernel.registration.kernel_matrix`."""
    output = q.new_empty(*q.shape[:-1], k.shape[-2])
    if output.numel():
        _Launcher(q, k, kernel).run('forward', q, k, output, exponent_scale(kernel_scale, kernel))
    return output


def kernel_matrix_backward(grad_output: Tensor, q: Tensor, k: Tensor, output: Tensor,
                           kernel_scale: float, kernel: str, needs_q: bool,
                           needs_k: bool) -> tuple[Tensor, Tensor]:
    """See :func:`mmlaplacian.ops.laplacian_kernel.registration.kernel_matrix_backward`."""
    launcher = _Launcher(q, k, kernel)
    tensors = q, k, output, grad_output
    scale = gradient_scale(kernel_scale)
    grad_q, grad_k = q.new_empty(0), k.new_empty(0)
    if needs_q:
        grad_q = torch.empty_like(q)
        launcher.run('backward_q', *tensors, grad_q, scale)
    if needs_k:
        grad_k = launcher.key_gradient(tensors, scale)
    return grad_q, grad_k
