"""Attention cores of other linear transformers, from their formulas, for a comparison of time.

All take q, k, v ``(B, h, N, d)`` without projections and return ``(B, h, N, d)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PINV_STEPS = 6


def segment_means(x: Tensor, segments: int) -> Tensor:
    """Means of consecutive tokens, ``(B, h, N, d) -> (B, h, segments, d)``.

    Where N is no multiple, the last segments hold a token more.
    """
    length, longer = divmod(x.shape[2], segments)
    split = (segments - longer) * length
    parts = [x[:, :, :split].unflatten(2, (-1, length)).mean(3)]
    if longer:
        parts.append(x[:, :, split:].unflatten(2, (-1, length + 1)).mean(3))
    return torch.cat(parts, 2)


def _pseudo_inverse(a: Tensor) -> Tensor:
    """Third-order iteration Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    largest = a.sum(-1).amax(-1) * a.sum(-2).amax(-1)
    z = a.mT / largest[..., None, None]
    for _ in range(_PINV_STEPS):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z


def nystromformer(q: Tensor, k: Tensor, v: Tensor, landmarks: int) -> Tensor:
    """Softmax by landmarks that are segment means, arXiv 2102.03902, without its convolution."""
    scale = q.shape[-1]**-0.25
    q, k = q * scale, k * scale
    q_marks, k_marks = segment_means(q, landmarks), segment_means(k, landmarks)
    to_keys = (q_marks @ k.mT).softmax(-1)
    between = (q_marks @ k_marks.mT).softmax(-1)
    return ((q @ k_marks.mT).softmax(-1) @ _pseudo_inverse(between)) @ (to_keys @ v)


def orthogonal_features(features: int, d: int, generator: torch.Generator) -> Tensor:
    """Random directions ``(features, d)``, orthogonal in blocks of d, of Gaussian length."""
    blocks = []
    for _ in range(-(-features // d)):
        rotation, r = torch.linalg.qr(torch.randn(d, d, generator=generator))
        # Positive diagonals of R make the rotations uniform.
        blocks.append(rotation * r.diagonal().sign())
    lengths = torch.randn(features, d, generator=generator).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:features] * lengths


def performer(q: Tensor, k: Tensor, v: Tensor, directions: Tensor) -> Tensor:
    """Softmax by positive random features, arXiv 2009.14794.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        directions: ``(features, d)``.
    """
    q, k = (x * q.shape[-1]**-0.25 for x in (q, k))
    exponents = [x @ directions.mT - x.square().sum(-1, keepdim=True) / 2 for x in (q, k)]
    # A factor of a query's row, or of all keys of a head, cancels.
    q_features = (exponents[0] - exponents[0].amax(-1, keepdim=True)).exp()
    k_features = (exponents[1] - exponents[1].amax((-2, -1), keepdim=True)).exp()
    normalizer = q_features @ k_features.sum(-2)[..., None]
    return q_features @ (k_features.mT @ v) / normalizer
