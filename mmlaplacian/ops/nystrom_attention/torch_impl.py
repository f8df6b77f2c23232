"""Nystrom attention in plain torch, linear in the number of tokens: nothing is N x N."""

import torch
from torch import Tensor

from ..laplacian_kernel import KERNELS
from ..newton_schulz import newton_schulz_inverse


def nystrom_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kernel_scale: float,
                      ridge: float, whiten_eps: float, solver_iters: int | None, kernel: str,
                      normalize: str) -> Tensor:
    """See :func:`mmlaplacian.ops.nystrom_attention`."""
    kernel_matrix = KERNELS[kernel]
    c_q = kernel_matrix(q, landmarks, kernel_scale)
    c_k = kernel_matrix(k, landmarks, kernel_scale)
    w = kernel_matrix(landmarks, landmarks, kernel_scale)
    w = w + ridge * torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    p = newton_schulz_inverse(w, solver_iters, spd_lower_bound=ridge)
    n = k.shape[-2]
    if normalize == 'none':
        return (c_q @ p) @ (c_k.mT @ v) / n
    if normalize == 'row':
        # About the mean value, and P on the queries: for nearly uniform maps C_k^T (V - mean)
        # is then small itself instead of a difference of large terms after P.
        queries = c_q @ p
        mass = queries @ c_k.mean(-2)[..., None]
        floored = mass.clamp_min(whiten_eps)
        mean = v.mean(-2, keepdim=True)
        context = c_k.mT @ (v - mean) / n
        return queries @ context / floored + mean * (mass / floored)
    # P on the keys first: var and ctx then carry its rounding once, not twice as in P Cov P.
    keys = c_k @ p
    # The dense map's statistics over queries, one mean and variance for each key j:
    # mu_j = c_bar . keys_j and var_j = keys_j^T Cov(C_q) keys_j.
    centered = c_q - c_q.mean(-2, keepdim=True)
    covariance = centered.mT @ centered / n
    variance = ((keys @ covariance) * keys).sum(-1, keepdim=True).clamp_min(0)
    context = keys.mT @ (v * (variance + whiten_eps).rsqrt())
    return centered @ context / n + v.mean(-2, keepdim=True)
