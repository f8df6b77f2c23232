"""The attention with its N x M matrices kept for the backward: what the op's tiles save."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmlaplacian.ops import laplacian_kernel, newton_schulz_inverse


def composed(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, ridge: float, whiten_eps: float,
             kernel: Callable[[Tensor, Tensor], Tensor],
             inverse: Callable[[Tensor], Tensor]) -> Tensor:
    """The whitened attention from a kernel and an inverse, under autograd.

    Args:
        q: Queries ``(B, h, N, d)``.
        k: Keys, alike.
        v: Values ``(B, h, N, d_v)``.
        landmarks: ``(B, h, M, d)``.
        ridge: Added to the diagonal of the landmark matrix.
        whiten_eps: Floor of the variance.
        kernel: Kernel matrix of tokens and landmarks.
        inverse: Of the matrix with its ridge.
    """
    c_q, c_k, w = (kernel(x, landmarks) for x in (q, k, landmarks))
    p = inverse(w + ridge * torch.eye(w.shape[-1], dtype=w.dtype, device=w.device))
    centered = c_q - c_q.mean(-2, keepdim=True)
    covariance = centered.mT @ centered / q.shape[2]
    keys = c_k @ p
    variance = ((keys @ covariance) * keys).sum(-1, keepdim=True).clamp_min(0)
    context = keys.mT @ (v * (variance + whiten_eps).rsqrt())
    return centered @ context / q.shape[2] + v.mean(-2, keepdim=True)


def stored_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, kernel_scale: float,
                     ridge: float, whiten_eps: float, solver_iters: int | None, kernel: str,
                     normalize: str) -> Tensor:
    """:func:`mmlaplacian.ops.nystrom_attention` composed of the other ops under autograd.

    Raises:
        ValueError: Another kernel or normalisation than the model's defaults.
    """
    if (kernel, normalize) != ('laplacian', 'whiten'):
        raise ValueError("stored_attention has kernel 'laplacian' and normalize 'whiten', got "
                         f'{kernel!r} and {normalize!r}')
    return composed(q, k, v, landmarks, ridge, whiten_eps,
                    lambda x, y: laplacian_kernel(x, y, kernel_scale),
                    lambda w: newton_schulz_inverse(w, solver_iters, ridge))
