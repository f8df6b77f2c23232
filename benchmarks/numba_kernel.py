"""The Laplacian kernel in Numba: one of the ways of building it that ``cpu_ways.py`` compares.

The algorithm of ``mmlaplacian/cpu_src``, as far as Numba's compiler follows it: queries in the
lanes of the forward pass, channels in those of the backward, fixed chunks of the key gradient.
The exponential is torch's: Numba's own is not vectorised without Intel's library.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

# Its OpenMP layer loads a second runtime beside torch's, whose idle threads would spin while
# others are timed.
numba.config.THREADING_LAYER = 'workqueue'

_TOKENS = 64
_CHUNK = 512


@njit(parallel=True, cache=True)
def _forward(q: np.ndarray, k: np.ndarray, scale: np.float32, output: np.ndarray) -> None:
    groups, n, d = q.shape
    m = k.shape[1]
    tiles = (n + _TOKENS - 1) // _TOKENS
    for item in prange(groups * tiles):
        group, first = item // tiles, item % tiles * _TOKENS
        rows = min(_TOKENS, n - first)
        tile = np.zeros((d, _TOKENS), np.float32)
        for t in range(rows):
            for c in range(d):
                tile[c, t] = q[group, first + t, c]
        sums = np.empty((4, _TOKENS), np.float32)
        for r in range(0, m, 4):
            # Four landmarks for each load of the tile; the last block overlaps.
            a, b, c2, c3 = min(r, m - 1), min(r + 1, m - 1), min(r + 2, m - 1), min(r + 3, m - 1)
            sums[:] = 0
            for c in range(d):
                ka, kb, kc, kd = k[group, a, c], k[group, b, c], k[group, c2, c], k[group, c3, c]
                for t in range(_TOKENS):
                    x = tile[c, t]
                    sums[0, t] += abs(x - ka)
                    sums[1, t] += abs(x - kb)
                    sums[2, t] += abs(x - kc)
                    sums[3, t] += abs(x - kd)
            for t in range(rows):
                for i in range(min(4, m - r)):
                    output[group, first + t, r + i] = sums[i, t] * scale


@njit(parallel=True, cache=True)
def _backward(grad_output: np.ndarray, q: np.ndarray, k: np.ndarray, output: np.ndarray,
              scale: np.float32, grad_q: np.ndarray, partial: np.ndarray) -> None:
    groups, n, d = q.shape
    m, chunks = k.shape[1], partial.shape[1]
    for item in prange(groups * chunks):
        group, chunk = item // chunks, item % chunks
        grad_k = partial[group, chunk]
        grad_k[:] = 0
        for i in range(chunk * _CHUNK, min(n, (chunk + 1) * _CHUNK)):
            x, grad_x = q[group, i], grad_q[group, i]
            grad_x[:] = 0
            for r in range(m):
                weight = grad_output[group, i, r] * output[group, i, r] * scale
                y, grad_y = k[group, r], grad_k[r]
                for c in range(d):
                    slope = np.float32(x[c] > y[c]) - np.float32(x[c] < y[c])
                    grad_x[c] += weight * slope
                    grad_y[c] -= weight * slope


def _array(x: Tensor) -> np.ndarray:
    return x.detach().flatten(0, 1).numpy()


def forward(q: Tensor, k: Tensor, kernel_scale: float) -> Tensor:
    """K ``(B, h, N, M)`` of float32 q ``(B, h, N, d)`` and k ``(B, h, M, d)``."""
    output = q.new_empty(*q.shape[:-1], k.shape[-2])
    _forward(_array(q), _array(k), np.float32(-1 / kernel_scale), _array(output))
    return output.exp_()


def backward(grad_output: Tensor, q: Tensor, k: Tensor, output: Tensor,
             kernel_scale: float) -> tuple[Tensor, Tensor]:
    """Gradients for q and k."""
    grad_q = torch.empty_like(q)
    partial = q.new_empty(q.shape[0] * q.shape[1], -(-q.shape[2] // _CHUNK), *k.shape[2:])
    _backward(_array(grad_output), _array(q), _array(k), _array(output),
              np.float32(-1 / kernel_scale), _array(grad_q), partial.numpy())
    return grad_q, partial.sum(1).view_as(k)
