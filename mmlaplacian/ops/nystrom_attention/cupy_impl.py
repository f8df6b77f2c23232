"""The whitened attention by this project's CUDA text, ``cuda/nystrom_attention.cu`` and its
backward."""

import warnings
from ctypes import c_float, c_longlong
from functools import cache, partial

import torch
from torch import Tensor

from .. import cupy_runtime
from ..laplacian_kernel import cupy_impl as kernels
from ..laplacian_kernel.cupy_impl import KERNELS, SCALAR_TYPES, exponent_scale, gradient_scale
from ..laplacian_kernel.tiling import landmark_tile
from ..newton_schulz import cupy_impl as solver
from ..newton_schulz import default_iters
from . import torch_impl
from .tiles import empty_tokens
from .tiling import Tiling

_FORWARD, _BACKWARD = 'nystrom_attention', 'nystrom_attention_backward'


def check(q: Tensor) -> None:
    """Raises where the CUDA kernels cannot serve queries like these.

    Raises:
        UnsupportedError: Device, dtype or head dim is not theirs.
        ImportError: CuPy cannot be imported.
    """
    kernels.check(q)


@cache
def _say_once(what: str, reason: str) -> None:
    warnings.warn(f'{what} runs unfused, by the kernels of its parts: {reason}', stacklevel=2)


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
        _say_once('nystrom_attention', reason)
    return reason is None


def _dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _longs(*numbers: int) -> tuple[c_longlong, ...]:
    return tuple(map(c_longlong, numbers))


def _strides(*tensors: Tensor) -> tuple[c_longlong, ...]:
    return _longs(*(stride for x in tensors for stride in x.stride()[:3]))


class _Launcher:
    """Launches kernels of one size, dtype and kernel function."""

    def __init__(self, v: Tensor, landmarks: Tensor, kernel: str) -> None:
        self.tiling = _tiling(v, landmarks)
        m_threads, m_outputs = landmark_tile(self.tiling.m)
        self.macros = (('SCALAR_TYPE', SCALAR_TYPES[v.dtype]), ('KERNEL', KERNELS[kernel]),
                       ('HEAD_DIM', self.tiling.d), ('VALUE_DIM', self.tiling.d_v),
                       ('LANDMARKS', self.tiling.m), ('M_THREADS', m_threads),
                       ('M_OUTPUTS', m_outputs))
        self.device = v.device

    def empty(self, *shape: int) -> Tensor:
        """Memory for ``(G, *shape)`` in float32."""
        return torch.empty(self.tiling.groups, *shape, dtype=torch.float32, device=self.device)

    def __call__(self, source: str, function: str,
                 *arguments: Tensor | c_float | c_longlong) -> None:
        """Launches ``nystrom_attention_<function>`` of a file."""
        blocks, threads, shared_bytes = getattr(self.tiling, function)()
        kernel = cupy_runtime.Kernel(source, f'nystrom_attention_{function}', self.macros)
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
    empty, forward = launch.empty, partial(launch, _FORWARD)

    w, ridged, covariance = empty(m, m), empty(m, m), empty(m, m)
    forward('landmarks', landmarks, w, ridged, scale, c_float(ridge), *sizes[:2],
            *_strides(landmarks))
    if solver_iters is None:
        solver_iters = default_iters(m, ridge, w.dtype)
    p = solver.newton_schulz_inverse(ridged, solver_iters, ridge)

    mean = empty(1, m)
    chunk_mean, chunk_scatter = (empty(tiling.n_chunks, size)
                                 for size in (m, tiling.scatter_entries))
    forward('statistics', q, landmarks, chunk_mean, chunk_scatter, scale, *sizes,
            *_strides(q, landmarks))
    forward('merge_statistics', chunk_mean, chunk_scatter, mean, covariance, *merged_sizes)

    context, mean_value = empty(m, d_v), empty(d_v)
    chunk_context = empty(tiling.n_chunks, m + 1, d_v)
    forward('keys', k, v, landmarks, p, covariance, chunk_context, scale, c_float(whiten_eps),
            *sizes, *_strides(k, v, landmarks))
    forward('merge_keys', chunk_context, context, mean_value, *merged_sizes)

    out = empty_tokens(v)
    forward('output', q, landmarks, mean, context, mean_value, out, scale, *sizes,
            *_strides(q, landmarks, out))
    return out, [w, p, context, mean, covariance]


def nystrom_attention_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor,
                               landmarks: Tensor, kept: list[Tensor], kernel_scale: float,
                               whiten_eps: float, kernel: str,
                               normalize: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`mmlaplacian.ops.nystrom_attention.torch_impl.nystrom_attention_backward`, which
    serves sizes that the fused backward has no room for: said once with the reason."""
    launch = _Launcher(v, landmarks, kernel)
    tiling, empty, backward = launch.tiling, launch.empty, partial(launch, _BACKWARD)
    reason = tiling.backward_unsupported_reason(cupy_runtime.shared_memory_limit(v.device))
    if reason:
        _say_once('the backward of nystrom_attention', reason)
        return torch_impl.nystrom_attention_backward(grad_out, q, k, v, landmarks, kept,
                                                     kernel_scale, whiten_eps, kernel, normalize)
    grad_out, q, k, v, landmarks = map(_dense_channels, (grad_out, q, k, v, landmarks))
    _, p, context, mean, covariance = kept
    n, m, d, d_v, n_chunks = tiling.n, tiling.m, tiling.d, tiling.d_v, tiling.n_chunks
    scale, slope = exponent_scale(kernel_scale, kernel), gradient_scale(kernel_scale)
    sizes = _longs(tiling.groups, tiling.heads, n, tiling.rows_per_chunk)
    merged_sizes = _longs(tiling.groups, n, tiling.rows_per_chunk)

    chunk_context = empty(n_chunks, m + 1, d_v)
    backward('grad_context', q, grad_out, landmarks, mean, chunk_context, scale, *sizes,
             *_strides(q, grad_out, landmarks))
    grad_context, mean_grad = empty(m, d_v), empty(d_v)
    launch(_FORWARD, 'merge_keys', chunk_context, grad_context, mean_grad, *merged_sizes)

    p_covariance, key_square, p_grad_context = empty(m, m), empty(m, m), empty(m, d_v)
    backward('grad_factors', p, covariance, grad_context, p_covariance, key_square,
             p_grad_context, *_longs(tiling.groups, n))

    grad_q, grad_k, grad_v = map(empty_tokens, (q, k, v))
    token_factors, chunk_square = empty(n, 2), empty(n_chunks, tiling.scatter_entries)
    backward('grad_values', k, v, landmarks, p, covariance, grad_context, mean_grad, grad_v,
             token_factors, chunk_square, scale, c_float(whiten_eps), *sizes,
             *_strides(k, v, landmarks, grad_v))
    grad_covariance = empty(m, m)
    backward('merge_grad_covariance', chunk_square, grad_covariance, *merged_sizes)

    partials = empty(tiling.landmark_partials, m, d)
    backward('grad_keys', k, v, landmarks, token_factors, key_square, p_grad_context, grad_k,
             partials, scale, slope, *sizes, *_strides(k, v, landmarks, grad_k))
    backward('grad_queries', q, grad_out, landmarks, mean, mean_grad, grad_covariance, context,
             grad_q, partials, scale, slope, *sizes, *_strides(q, grad_out, landmarks, grad_q))
    backward('grad_landmarks', landmarks, grad_covariance, context, p_covariance, p_grad_context,
             partials, scale, slope, *sizes, *_strides(landmarks))
    grad_landmarks = landmarks.new_empty(landmarks.shape)
    backward('merge_landmarks', partials, grad_landmarks, *merged_sizes)
    return grad_q, grad_k, grad_v, grad_landmarks
