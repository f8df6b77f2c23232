"""Newton-Schulz iteration in plain torch: matrix products alone, each matrix for itself."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def _start(w: Tensor, spd_lower_bound: float | None) -> Tensor:
    """X_0 of proven convergence, scaled for each matrix of the batch alone."""
    norm_inf = w.abs().sum(-1).amax(-1)[..., None, None]
    if spd_lower_bound is not None:
        # Eigenvalues of X_0 W lie in (0, 2) since those of W lie in [eps, ||W||_inf].
        identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
        return 2 / (norm_inf + spd_lower_bound) * identity
    # ||W||_2^2 <= ||W||_1 ||W||_inf, so the eigenvalues of X_0 W lie in (0, 1].
    norm_1 = w.abs().sum(-2).amax(-1)[..., None, None]
    return (w / norm_1 / norm_inf).mT


def _residual_matrix(w: Tensor, x: Tensor) -> Tensor:
    """I - W X for matrices ``(batch, M, M)``."""
    identity = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return torch.baddbmm(identity, w, x, alpha=-1)


class _NewtonSchulzInverse(torch.autograd.Function):
    """X <- X (2I - W X), written X + X (I - W X): the correction shrinks, its rounding too.

    The backward is that of the inverse, dW = -X^T dX X^T. It keeps X alone and is valid at
    convergence.
    """

    @staticmethod
    def forward(w: Tensor, solver_iters: int, spd_lower_bound: float | None) -> Tensor:
        x = _start(w, spd_lower_bound)
        for _ in range(solver_iters):
            x = torch.baddbmm(x, x, _residual_matrix(w, x))
        return x

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, int, float | None],
                      output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_x: Tensor) -> tuple[Tensor, None, None]:
        x_t = ctx.saved_tensors[0].mT
        return -(x_t @ grad_x @ x_t), None, None


def newton_schulz_inverse(w: Tensor, solver_iters: int,
                          spd_lower_bound: float | None) -> Tensor:
    """The inverses of matrices ``(batch, M, M)``."""
    return _NewtonSchulzInverse.apply(w, solver_iters, spd_lower_bound)


def residual(w: Tensor, x: Tensor) -> Tensor:
    """max |W X - I| over the entries of each matrix ``(batch, M, M)``, without gradient."""
    return _residual_matrix(w.detach(), x.detach()).abs().amax((-2, -1))
