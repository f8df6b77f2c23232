"""The text of newton_schulz.cu, run over its real grid, against float64."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator import Emulator, Offset, Sparse

from mmlaplacian.ops.laplacian_kernel import reference as kernels
from mmlaplacian.ops.newton_schulz import default_iters, reference
from mmlaplacian.ops.newton_schulz.tiling import LARGEST_IN_A_BLOCK, Tiling, row_outputs

CUDA = Path(__file__).parents[2] / 'cuda'
SOURCES = [CUDA / 'common.cuh', CUDA / 'newton_schulz.cu']
RIDGE = 1e-2
NOTHING, IDENTITY, MATRIX = range(3)
starts = pytest.mark.parametrize('bound', [RIDGE, None], ids=['spd', 'two-norm'])


@dataclass
class Solver:
    """The three kernels, launched as cupy_impl does."""
    emulator: Emulator
    seed: int = 0
    grid: int | None = None  # None: one block a matrix or tile

    def launch(self, kernel: str, launch: tuple[int, int], macros: dict, args: list,
               **options) -> None:
        blocks, threads = launch
        self.emulator.launch(SOURCES, macros, f'newton_schulz_{kernel}', self.grid or blocks,
                             threads, args, seed=self.seed, **options)

    def inverse(self, w: torch.Tensor, iters: int, bound: float | None,
                offset: int = 0) -> torch.Tensor:
        tiling, x = Tiling(*w.shape[:2]), poisoned(w.shape)
        macros = {'SIZE': w.shape[1], 'ROWS': row_outputs(w.shape[1]),
                  'SPD_START': int(bound is not None)}
        self.launch('inverse', tiling.inverse(), macros,
                    [Offset(w.numpy(), offset), Offset(x.numpy(), offset), np.float32(bound or 0),
                     np.int64(w.shape[0]), np.int64(iters)], shared_bytes=tiling.shared_bytes)
        return x

    def start(self, w: torch.Tensor, bound: float | None) -> torch.Tensor:
        x = poisoned(w.shape)
        self.launch('start', Tiling(*w.shape[:2]).start(), {'SPD_START': int(bound is not None)},
                    [w.numpy(), x.numpy(), np.float32(bound or 0), *sizes(w)])
        return x

    def product(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None,
                scale: float = 1, term: int = NOTHING,
                transpose: tuple[bool, bool] = (False, False),
                offsets: tuple[int, int] = (0, 0)) -> torch.Tensor:
        d = poisoned(a.shape)
        macros = {'TERM': term, 'TRANSPOSE_A': int(transpose[0]),
                  'TRANSPOSE_B': int(transpose[1])}
        self.launch('product', Tiling(*a.shape[:2]).product(), macros,
                    [Offset(a.numpy(), offsets[0]), Offset(b.numpy(), offsets[1]),
                     Offset((a if c is None else c).numpy(), 4), Offset(d.numpy(), 4),
                     np.float32(scale), *sizes(a)])
        return d

    def inverse_by_products(self, w: torch.Tensor, iters: int,
                            bound: float | None) -> torch.Tensor:
        x = self.start(w, bound)
        for _ in range(iters):
            x = self.product(x, self.product(w, x, scale=-1, term=IDENTITY), x, term=MATRIX)
        return x


def sizes(w: torch.Tensor) -> list[np.int64]:
    return [np.int64(size) for size in w.shape[:2]]


def poisoned(shape) -> torch.Tensor:
    return torch.full(shape, math.nan)


def landmark_matrices(batch: int, m: int, scale: float = .5, seed: int = 0) -> torch.Tensor:
    """W with its ridge; scale 0 is the flat image, where W is nearest to singular."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, m, 32, generator=generator, dtype=torch.float64) * scale
    return kernels.laplacian_kernel(x, x, 4.0) + RIDGE * torch.eye(m, dtype=torch.float64)


def check(w: torch.Tensor, x: torch.Tensor) -> None:
    """No further off than rounding: that of m terms a sum, and of W times its condition number."""
    exact = reference.inverse(w.double())
    condition = torch.linalg.cond(w.double())
    error = torch.linalg.matrix_norm(x.double() - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    eps = torch.finfo(torch.float32).eps
    bound = 2 + w.shape[-1]**.5 + condition
    assert (error <= bound * eps).all(), (error / eps, condition)


@pytest.fixture
def solver(emulator) -> Solver:
    return Solver(emulator)


# Sizes around the tiles of every ROWS; a matrix in a block, both starts.
@starts
@pytest.mark.parametrize('m', [1, 2, 5, 16, 20, 48, 49, 50, 64])
def test_inverse(solver, m, bound):
    w = torch.cat([landmark_matrices(2, m), landmark_matrices(1, m, 0)]).float()
    check(w, solver.inverse(w, default_iters(m, bound, w.dtype), bound))


@pytest.mark.soak
@starts
@pytest.mark.parametrize('m', range(1, LARGEST_IN_A_BLOCK + 1))
def test_inverse_of_every_size(solver, m, bound):
    test_inverse(solver, m, bound)


@starts
@pytest.mark.parametrize('m', [1, 31, 64, 65])
def test_inverse_by_products(solver, m, bound):
    w = torch.cat([landmark_matrices(1, m), landmark_matrices(1, m, 0)]).float()
    check(w, solver.inverse_by_products(w, default_iters(m, bound, w.dtype), bound))


@pytest.mark.soak
@starts
@pytest.mark.parametrize('m', [129, 130, 137, 200])
def test_inverse_of_large_matrices(solver, m, bound):
    test_inverse_by_products(solver, m, bound)


@pytest.mark.parametrize('m', [1, 31, 64, 68, 130])
@pytest.mark.parametrize('term', [NOTHING, IDENTITY, MATRIX])
@pytest.mark.parametrize('transpose', [(False, False), (True, False), (False, True)], ids=str)
def test_product(solver, m, term, transpose):
    generator = torch.Generator().manual_seed(m)
    a, b, c = torch.randn(3, 2, m, m, generator=generator)
    got = solver.product(a, b, c, scale=-.5, term=term, transpose=transpose)
    factors = [x.double().mT if flag else x.double()
               for x, flag in zip((a, b), transpose, strict=True)]
    want = -.5 * factors[0] @ factors[1]
    if term == IDENTITY:
        want = want + torch.eye(m, dtype=want.dtype)
    elif term == MATRIX:
        want = want + c.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6 * m**.5)


@starts
@pytest.mark.parametrize('scale', [1, 1e25])
def test_start(solver, bound, scale):
    """Rows and columns of different weight: the two norms differ. Their product may overflow."""
    generator = torch.Generator().manual_seed(0)
    m = 300
    w = torch.randn(2, m, m, generator=generator) * torch.linspace(.1, 3, m) * scale
    norm_inf, norm_1 = (w.abs().sum(dim).amax(-1)[:, None, None] for dim in (-1, -2))
    want = w.mT / norm_1 / norm_inf if bound is None else 2 / (norm_inf + bound) * torch.eye(m)
    torch.testing.assert_close(solver.start(w, bound), want, rtol=1e-5, atol=0)
    w = (w[:, :20, :20] / scale + 4 * torch.eye(20)).contiguous()
    x = solver.inverse(w, 1, bound)  # one step shows the start
    start = solver.start(w, bound).double()
    torch.testing.assert_close(x.double(), start @ (2 * torch.eye(20) - w.double() @ start),
                               rtol=1e-4, atol=1e-6)


def test_same_bits_whatever_the_order_the_grid_and_the_alignment(solver):
    w, even = (landmark_matrices(3, m).float() for m in (49, 68))

    def results(offset=0):
        return [solver.inverse(w, 4, RIDGE, offset), solver.start(w, RIDGE), solver.start(w, None),
                *(solver.product(x, x, x, term=MATRIX, offsets=offsets) for x in (w, even)
                  for offsets in ((0, offset), (offset, 0)))]

    want = results()
    for solver.seed, solver.grid, offset in ((5, None, 0), (6, 1, 0), (7, 100, 4)):
        for got, expected in zip(results(offset), want, strict=True):
            assert torch.equal(got, expected)


def test_b01_two_norm_start_stays_finite(solver):
    x = .1 * torch.randn(1, 100, 32, generator=torch.Generator().manual_seed(0))
    a = kernels.laplacian_kernel(x, x, 4.0)
    for iters, bound in ((6, .3), (20, 1e-3)):
        v = solver.inverse(a, iters, None)
        assert v.isfinite().all() and (a @ v @ a - a).norm() / a.norm() < bound


@starts
@pytest.mark.parametrize('by_products', [False, True])
def test_b02_same_bits_whatever_the_batch_mates(solver, bound, by_products):
    solve = solver.inverse_by_products if by_products else solver.inverse
    w = torch.cat([landmark_matrices(1, 20, 1.), landmark_matrices(1, 20, 0)]).float()
    together = solve(w, 5, bound)
    for index in range(2):
        assert torch.equal(solve(w[index:index + 1].clone(), 5, bound)[0], together[index])


@starts
@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_nan_stays_in_its_matrix(solver, bound, bad):
    w = landmark_matrices(3, 21).float()
    w[1, 4, 7] = bad
    for x in (solver.inverse(w, 12, bound), solver.inverse_by_products(w, 12, bound)):
        assert not x[1].isfinite().all()
        check(w[::2], x[::2])


def test_gradient_through_products(solver):
    """-X^T dX X^T, as cupy_impl computes it."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 2, 66, 66, generator=generator)
    left = solver.product(x, grad, transpose=(True, False))
    got = solver.product(left, x, scale=-1, transpose=(False, True))
    want = -(x.double().mT @ grad.double() @ x.double().mT)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_b16_more_matrices_than_a_grid_has_rows(solver):
    batch = 70_000
    w = torch.rand(batch, 1, 1) + .5
    x, chosen = poisoned(w.shape), [0, 65_535, 65_536, batch - 1]
    tiling = Tiling(batch, 1)
    solver.launch('inverse', tiling.inverse(), {'SIZE': 1, 'ROWS': 4, 'SPD_START': 1},
                  [w.numpy(), x.numpy(), np.float32(.5), np.int64(batch), np.int64(8)],
                  blocks=chosen, shared_bytes=tiling.shared_bytes)
    assert x.isfinite().sum() == len(chosen)
    torch.testing.assert_close(x[chosen], 1 / w[chosen])


def test_b45_offsets_beyond_32_bits(solver):
    """The last matrix of a batch with more than 2^32 elements; the rest nobody touches."""
    m = 64
    batch = 2**32 // m**2 + 3
    w = landmark_matrices(1, m).float()
    x, d, start = (poisoned(w.shape) for _ in range(3))
    nbytes = batch * m * m * 4

    def far(matrix: torch.Tensor) -> Sparse:
        return Sparse(nbytes, {nbytes - m * m * 4: matrix.numpy()})

    tiling = Tiling(batch, m)
    count = np.int64(batch), np.int64(m)
    last = dict(blocks=[batch - 1])
    solver.launch('inverse', tiling.inverse(), {'SIZE': m, 'ROWS': row_outputs(m)},
                  [far(w), far(x), np.float32(RIDGE), count[0], np.int64(16)],
                  shared_bytes=tiling.shared_bytes, **last)
    check(w, x)
    solver.launch('product', tiling.product(), {'TERM': MATRIX},
                  [far(w), far(w), far(w), far(d), np.float32(1), *count], **last)
    torch.testing.assert_close(d, w @ w + w, rtol=1e-5, atol=1e-5)
    solver.launch('start', tiling.start(), {}, [far(w), far(start), np.float32(RIDGE), *count],
                  **last)
    torch.testing.assert_close(start, solver.start(w, RIDGE), rtol=0, atol=0)


@pytest.mark.parametrize('m, rows', [(1, 4), (49, 7), (50, 8), (64, 8), (91, 7), (128, 8)])
def test_row_outputs(m, rows):
    assert row_outputs(m) == rows


def test_shared_memory_of_the_largest_matrix_fits_a_large_device():
    assert all(Tiling(1, m).shared_bytes <= 227 * 1024 and 32 <= Tiling(1, m).inverse()[1] <= 512
               for m in range(1, LARGEST_IN_A_BLOCK + 1))
    assert Tiling(1, 49).shared_bytes <= 48 * 1024  # no opting in for the default
