"""Ways to invert the landmark matrix W, ``(..., M, M)``, each to the precision of its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mmlaplacian.ops import newton_schulz_inverse

PAPER, SPD, GENERAL = 'start 2 W^T / ||W||_2', 'start for SPD', 'general start'
GRADIENTS, CHOLESKY, PINV = 'conjugate gradient', 'Cholesky', 'pinv'
ITERATIVE, DIRECT = (PAPER, SPD, GENERAL, GRADIENTS), (CHOLESKY, PINV)


def residual(w: Tensor, x: Tensor) -> Tensor:
    """max |W X - I| over the entries of each matrix, in float64; infinite where X diverged."""
    identity = torch.eye(w.shape[-1], dtype=torch.float64)
    found = (w.double() @ x.double() - identity).abs().amax((-2, -1))
    return found.nan_to_num(torch.inf, torch.inf)


def paper_steps(w: Tensor, steps: int) -> Iterator[Tensor]:
    """X <- X (2I - W X) from X_0 = 2 W^T / ||W||_2, as printed in arXiv 2604.20368."""
    identity = torch.eye(w.shape[-1], dtype=w.dtype)
    x = 2 * w.mT / torch.linalg.matrix_norm(w, 2)[..., None, None]
    for _ in range(steps):
        x = x @ (2 * identity - w @ x)
        yield x


def gradient_steps(w: Tensor, steps: int) -> Iterator[Tensor]:
    """Conjugate gradient (Hestenes and Stiefel, 1952) for every column of the identity."""
    x = torch.zeros_like(w)
    r = torch.eye(w.shape[-1], dtype=w.dtype).expand_as(w)
    p, squares = r, r.square().sum(-2, keepdim=True)
    for _ in range(steps):
        image = w @ p
        curvature = (p * image).sum(-2, keepdim=True)
        # A column that is solved exactly stays.
        step = squares / torch.where(curvature == 0, 1, curvature)
        x, r = x + step * p, r - step * image
        previous, squares = squares, r.square().sum(-2, keepdim=True)
        p = r + squares / torch.where(previous == 0, 1, previous) * p
        yield x


def own_steps(w: Tensor, steps: int, bound: float | None) -> Iterator[Tensor]:
    """The op after 1, 2, ... steps."""
    for step in range(1, steps + 1):
        yield newton_schulz_inverse(w, step, bound)


def cholesky(w: Tensor) -> Tensor:
    """By the factor of an SPD matrix; not a number where W is not positive definite."""
    factor, failed = torch.linalg.cholesky_ex(w)
    return torch.where(failed[..., None, None] > 0, torch.nan, torch.cholesky_inverse(factor))


def iterates(name: str, bound: float) -> Callable[[Tensor, int], Iterator[Tensor]]:
    """An iteration by its name.

    Args:
        name: One of :data:`ITERATIVE`.
        bound: Positive lower bound of the eigenvalues, for the start that needs one.
    """
    return {PAPER: paper_steps, GRADIENTS: gradient_steps, SPD: partial(own_steps, bound=bound),
            GENERAL: partial(own_steps, bound=None)}[name]


def direct(name: str) -> Callable[[Tensor], Tensor]:
    """A direct method by its name, one of :data:`DIRECT`."""
    return {CHOLESKY: cholesky, PINV: torch.linalg.pinv}[name]
