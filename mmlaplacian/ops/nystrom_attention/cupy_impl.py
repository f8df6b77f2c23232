"""The whitened attention by this project's CUDA text, ``cuda/nystrom_attention.cu``."""

import warnings
from ctypes import c_float, c_longlong
from functools import cache

import torch
from torch import Tensor

from .. import cupy_runtime
from ..laplacian_kernel import cupy_impl as kernels
from ..laplacian_kernel.cupy_impl import KERNELS, SCALAR_TYPES, exponent_scale
from ..laplacian_kernel.tiling import landmark_tile
from ..newton_schulz import cupy_impl as solver
from ..newton_schulz import default_iters
from . import torch_impl
from .tiles import empty_tokens
from .tiling import Tiling

_SOURCE = 'nystrom_attention'


def check(q: Tensor) -> None:
    """Raises where the CUDA kernels cannot serve queries like these.

    Raises:
        UnsupportedError: Device, dtype or head dim is not theirs.
        ImportError: CuPy cannot be imported.
    """
    kernels.check(q)


@cache
def _say_once(reason: str) -> None:
    warnings.warn(f'nystrom_attention runs unfused, by the kernels of its parts: {reason}',
                  stacklevel=2)


def _tiling(v: Tensor, landmarks: Tensor) -> Tiling:
    batch, heads, n, d_v = v.shape
    return Tiling(batch, heads, n, *landmarks.shape[2:], d_v)


def serves(v: Tensor, landmarks: Tensor, normalize: str) -> bool:
    """Whether the fused kernels have this map and these sizes; else the parts' kernels serve in
    the torch form, which is said once with the reason."""
    if normalize != 'whiten':
        return False
    reason = _tiling(v, landmarks).unsupported_reason(
        cupy_runtime.shared_memory_limit(v.device))
    if reason:
        _say_once(reason)
    return reason is None


def _dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _longs(*numbers: int) -> tuple[c_longlong, ...]:
    return tuple(map(c_longlong, numbers))


class _Launcher:
    """Launches the forward's kernels for one size, dtype and kernel function."""

    def __init__(self, v: Tensor, landmarks: Tensor, kernel: str) -> None:
        self.tiling = _tiling(v, landmarks)
        m_threads, m_outputs = landmark_tile(self.tiling.m)
        self.macros = (('SCALAR_TYPE', SCALAR_TYPES[v.dtype]), ('KERNEL', KERNELS[kernel]),
                       ('HEAD_DIM', self.tiling.d), ('VALUE_DIM', self.tiling.d_v),
                       ('LANDMARKS', self.tiling.m), ('M_THREADS', m_threads),
                       ('M_OUTPUTS', m_outputs))
        self.device = v.device

    def __call__(self, function: str, *arguments: Tensor | c_float | c_longlong) -> None:
        """Launches ``nystrom_attention_<function>``."""
        blocks, threads, shared_bytes = getattr(self.tiling, function)()
        kernel = cupy_runtime.Kernel(_SOURCE, f'{_SOURCE}_{function}', self.macros)
        cupy_runtime.launch(kernel, blocks, threads, arguments, self.device, shared_bytes)


def nystrom_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kernel_scale: float,
                      ridge: float, whiten_eps: float, solver_iters: int | None, kernel: str,
                      normalize: str) -> tuple[Tensor, list[Tensor]]:
    """See :func:`mmlaplacian.ops.nystrom_attention.torch_impl.nystrom_attention`."""
    q, k, v, landmarks = map(_dense_channels, (q, k, v, landmarks))
    launch = _Launcher(v, landmarks, kernel)
    tiling = launch.tiling
    groups, m, d_v = tiling.groups, tiling.m, tiling.d_v
    scale = exponent_scale(kernel_scale, kernel)
    sizes = _longs(groups, tiling.heads, tiling.n, tiling.rows_per_chunk)
    merged_sizes = _longs(groups, tiling.n, tiling.rows_per_chunk)

    def empty(*shape: int) -> Tensor:
        return v.new_empty(groups, *shape, dtype=torch.float32)

    def strides(*tensors: Tensor) -> tuple[c_longlong, ...]:
        return _longs(*(stride for x in tensors for stride in x.stride()[:3]))

    w, ridged, covariance = empty(m, m), empty(m, m), empty(m, m)
    launch('landmarks', landmarks, w, ridged, scale, c_float(ridge), *sizes[:2],
           *strides(landmarks))
    if solver_iters is None:
        solver_iters = default_iters(m, ridge, w.dtype)
    p = solver.newton_schulz_inverse(ridged, solver_iters, ridge)

    mean = empty(1, m)
    chunk_mean, chunk_scatter = (empty(tiling.n_chunks, size)
                                 for size in (m, tiling.scatter_entries))
    launch('statistics', q, landmarks, chunk_mean, chunk_scatter, scale, *sizes,
           *strides(q, landmarks))
    launch('merge_statistics', chunk_mean, chunk_scatter, mean, covariance, *merged_sizes)

    context, mean_value = empty(m, d_v), empty(d_v)
    chunk_context = empty(tiling.n_chunks, m + 1, d_v)
    launch('keys', k, v, landmarks, p, covariance, chunk_context, scale, c_float(whiten_eps),
           *sizes, *strides(k, v, landmarks))
    launch('merge_keys', chunk_context, context, mean_value, *merged_sizes)

    out = empty_tokens(v)
    launch('output', q, landmarks, mean, context, mean_value, out, scale, *sizes,
           *strides(q, landmarks, out))
    return out, [w, p, context, mean, covariance]


nystrom_attention_backward = torch_impl.nystrom_attention_backward
