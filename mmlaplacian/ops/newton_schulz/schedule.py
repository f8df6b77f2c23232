"""How many Newton-Schulz steps a matrix needs at the worst."""

import math

import torch

GENERAL_LOWER_BOUND = 1e-2
"""Smallest singular value that the default count of the two-norm start provides for, with
norms up to M + 1e-2: the default ridge on a matrix of kernel values."""


def default_iters(m: int, spd_lower_bound: float | None, dtype: torch.dtype) -> int:
    """Steps until the error of the iteration is below the rounding of ``dtype``.

    A step squares the error factor e of the slowest eigenvalue, so s steps leave e^(2^s)
    (Newton-Schulz: Schulz 1933; Ben-Israel and Cohen 1966). For kernel values in [0, 1] plus a
    ridge eps, ||W||_inf <= M + eps, and equal landmarks reach it. Then, with x = 1 - e:

    * SPD start, eigenvalues >= eps: x = 2 eps / (||W||_inf + eps);
    * two-norm start: x = (sigma_min / ||W||)^2.

    Args:
        m: Size M of the matrix, at least 1.
        spd_lower_bound: eps for the SPD start, None for the two-norm start, which assumes
            ``GENERAL_LOWER_BOUND``.
        dtype: float32 or float64, the dtype of the iteration.

    Returns:
        The count, at least 1. It depends on M, eps and the dtype only, never on values.
    """
    if spd_lower_bound is None:
        x = (GENERAL_LOWER_BOUND / (m + GENERAL_LOWER_BOUND))**2
    else:
        x = 2 * spd_lower_bound / (m + 2 * spd_lower_bound)
    # e^(2^s) <= rounding, with log(e) = log(1 - x); at x = 1 the start is exact.
    squarings = math.log2(math.log(torch.finfo(dtype).eps) / math.log1p(-min(x, 0.99)))
    return max(1, math.ceil(squarings))
