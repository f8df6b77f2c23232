"""Nystrom attention as the dense N x N formula, the oracle of the tests. Never a fast path."""

import torch
from torch import Tensor

from ..laplacian_kernel import reference as kernels
from ..newton_schulz.reference import inverse

KERNELS = {'laplacian': kernels.laplacian_kernel, 'gaussian': kernels.gaussian_kernel}


def similarity(q: Tensor, k: Tensor, landmarks: Tensor, kernel_scale: float, ridge: float,
               kernel: str) -> Tensor:
    """G = C_q W^-1 C_k^T, ``(B, h, N, N)``: the Nystrom form of the kernel matrix k(q, k)."""
    c_q = KERNELS[kernel](q, landmarks, kernel_scale)
    c_k = KERNELS[kernel](k, landmarks, kernel_scale)
    w = KERNELS[kernel](landmarks, landmarks, kernel_scale)
    w = w + ridge * torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return c_q @ inverse(w) @ c_k.mT


def attention_map(g: Tensor, whiten_eps: float, normalize: str) -> Tensor:
    """The map Z ``(B, h, N, N)`` with output Z V, by the name of its normalisation."""
    n = g.shape[-1]
    if normalize == 'whiten':
        # One mean and one biased variance for each key, over the queries.
        mean = g.mean(-2, keepdim=True)
        variance = (g - mean).square().mean(-2, keepdim=True)
        return (1 + (g - mean) / (variance + whiten_eps).sqrt()) / n
    if normalize == 'row':
        return g / n / g.mean(-1, keepdim=True).clamp_min(whiten_eps)
    return g / n


def nystrom_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kernel_scale: float,
                      ridge: float, whiten_eps: float, kernel: str, normalize: str) -> Tensor:
    """Z V with exact inverse. ``(B, h, N, d) x 3, (B, h, M, d) -> (B, h, N, d)``."""
    g = similarity(q, k, landmarks, kernel_scale, ridge, kernel)
    return attention_map(g, whiten_eps, normalize) @ v
