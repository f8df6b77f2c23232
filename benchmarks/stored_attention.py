"""The attention with its N x M matrices kept for the backward: what the op's tiles save."""

from __future__ import annotations

import torch
from torch import Tensor

from mmlaplacian.ops import laplacian_kernel, newton_schulz_inverse


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
    c_q, c_k, w = (laplacian_kernel(x, landmarks, kernel_scale) for x in (q, k, landmarks))
    p = newton_schulz_inverse(w + ridge * torch.eye(w.shape[-1], dtype=w.dtype), solver_iters,
                              ridge)
    centered = c_q - c_q.mean(-2, keepdim=True)
    covariance = centered.mT @ centered / q.shape[2]
    keys = c_k @ p
    variance = ((keys @ covariance) * keys).sum(-1, keepdim=True).clamp_min(0)
    context = keys.mT @ (v * (variance + whiten_eps).rsqrt())
    return centered @ context / q.shape[2] + v.mean(-2, keepdim=True)
