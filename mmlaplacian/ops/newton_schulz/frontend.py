"""Public form of the solver: checks once, then calls the operator."""

from torch import Tensor

from .. import validation
from ..precision import compute_dtype
from . import registration


def newton_schulz_inverse(
        w: Tensor,
        solver_iters: int | None = None,
        spd_lower_bound: float | None = None,
        return_residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Inverse of each matrix by the Newton-Schulz iteration X <- X (2I - W X).

    The start is scaled for each matrix alone, so an inverse never depends on its batch mates.
    Half-precision inputs are computed in float32. The backward is implicit,
    dW = -X^T dX X^T: it holds at convergence, so too few steps give a wrong gradient as well.

    Args:
        w: Nonsingular matrices ``(..., M, M)``, ridge included.
        solver_iters: Steps. None takes what the worst matrix of kernel values of this size
            needs, from M, the bound and the dtype; without a bound it provides for singular
            values down to 1e-2 / (M + 1e-2) of the norm, and a matrix nearer to singular needs
            more (:func:`mmlaplacian.ops.newton_schulz.default_iters`).
        spd_lower_bound: A positive lower bound of the eigenvalues, such as the ridge. It says
            that ``w`` is symmetric positive definite and selects the faster start
            2 / (||W||_inf + bound) I. None starts at W^T / (||W||_1 ||W||_inf), which converges
            for any nonsingular matrix in about twice the steps.
        return_residual: Also return max |W X - I| of each matrix, ``(...)``, without gradient.
            In float32 about 1e-4 is the floor for 49 equal landmarks and ridge 1e-2.

    Returns:
        The inverses ``(..., M, M)`` in the dtype of ``w``, with the residuals if asked for.

    Raises:
        TypeError: Wrong type or dtype.
        ValueError: Not square matrices, or a number out of range.
    """
    if not isinstance(w, Tensor) or w.dtype not in validation.FLOAT_DTYPES:
        raise TypeError('w must be a floating-point tensor (..., M, M), got '
                        f'{w.dtype if isinstance(w, Tensor) else type(w).__name__}')
    if w.dim() < 2 or w.shape[-1] != w.shape[-2] or w.shape[-1] == 0:
        raise ValueError(f'w must have shape (..., M, M) with M >= 1, got {tuple(w.shape)}')
    if spd_lower_bound is not None:
        spd_lower_bound = validation.positive_number('spd_lower_bound', spd_lower_bound)
    if solver_iters is not None:
        solver_iters = validation.integer_at_least('solver_iters', solver_iters, 1)
    matrices = w.to(compute_dtype(w)).reshape(-1, *w.shape[-2:])
    x = registration.newton_schulz_inverse(matrices, solver_iters, spd_lower_bound)
    inverse = x.reshape(w.shape).to(w.dtype)
    if not return_residual:
        return inverse
    residual = registration.newton_schulz_residual(matrices.detach(), x.detach())
    return inverse, residual.reshape(w.shape[:-2])
