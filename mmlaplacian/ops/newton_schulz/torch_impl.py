"""Newton-Schulz iteration in plain torch: matrix products alone, each matrix for itself."""

import torch
from torch import Tensor


def _start(w: Tensor, spd_lower_bound: float | None) -> Tensor:
    """X_0 of proven convergence, scaled for each matrix of the batch alone."""
    norm_inf = w.abs().sum(-1).amax(-1)[..., None, None]
    if spd_lower_bound is not None:
        # Eigenvalues of X_0 W lie in (0, 2) since those of W lie in [eps, ||W||_inf].
        return 2 / (norm_inf + spd_lower_bound) * _identity(w)
    # ||W||_2^2 <= ||W||_1 ||W||_inf, so the eigenvalues of X_0 W lie in (0, 1].
    norm_1 = w.abs().sum(-2).amax(-1)[..., None, None]
    return (w / norm_1 / norm_inf).mT


def _identity(w: Tensor) -> Tensor:
    return torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)


def newton_schulz_inverse(w: Tensor, solver_iters: int,
                          spd_lower_bound: float | None) -> Tensor:
    """X <- X (2I - W X), written X + X (I - W X): the correction shrinks, its rounding too."""
    x, identity = _start(w, spd_lower_bound).contiguous(), _identity(w)
    for _ in range(solver_iters):
        x = torch.baddbmm(x, x, torch.baddbmm(identity, w, x, alpha=-1))
    return x


def newton_schulz_inverse_backward(grad_x: Tensor, x: Tensor) -> Tensor:
    """-X^T dX X^T for matrices ``(batch, M, M)``."""
    return -(x.mT @ grad_x @ x.mT)


def newton_schulz_residual(w: Tensor, x: Tensor) -> Tensor:
    """max |W X - I| over the entries of each matrix ``(batch, M, M)``."""
    return torch.baddbmm(_identity(w), w, x, alpha=-1).abs().amax((-2, -1))
