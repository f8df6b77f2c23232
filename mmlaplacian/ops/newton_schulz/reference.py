"""The inverse and its residual by factorisation, the oracle of the tests."""

import torch
from torch import Tensor


def inverse(w: Tensor) -> Tensor:
    """W^-1 by LU. ``(..., M, M) -> (..., M, M)``."""
    return torch.linalg.inv(w)


def residual(w: Tensor, x: Tensor) -> Tensor:
    """max |W X - I| over the entries of each matrix. ``(..., M, M) x 2 -> (...)``."""
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return (w @ x - identity).abs().amax((-2, -1))
