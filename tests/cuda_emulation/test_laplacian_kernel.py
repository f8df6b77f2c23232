"""The text of laplacian_kernel.cu, run over its real grid, against the float64 reference."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from emulator import Emulator, Offset, Sparse

from mmlaplacian.ops.cupy_runtime import source_text
from mmlaplacian.ops.laplacian_kernel import reference
from mmlaplacian.ops.laplacian_kernel.tiling import Tiling, ceil_div, landmark_tile

SOURCES = [source_text('laplacian_kernel')]
LAMBDA = 4.0
REFERENCES = {'laplacian': reference.laplacian_kernel, 'gaussian': reference.gaussian_kernel}
SCALARS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Relative, and absolute as a part of the largest value: forward, gradients.
TOLERANCES = {torch.float32: ((2e-5, 1e-7), (1e-4, 1e-6)),
              torch.float16: ((6e-4, 1e-6), (2e-2, 2e-3)),
              torch.bfloat16: ((5e-3, 1e-6), (2e-2, 1e-2))}


@dataclass
class Kernels:
    """The four kernels for one d, m and dtype."""
    emulator: Emulator
    d: int
    m: int
    dtype: torch.dtype = torch.float32
    kind: str = 'laplacian'
    scale: float = LAMBDA
    seed: int = 0
    grid: int | None = None  # None: one block a tile
    chunk_rows: int = 64  # small, so that there are several chunks

    def __post_init__(self) -> None:
        m_threads, m_outputs = landmark_tile(self.m)
        self.macros = {'SCALAR_TYPE': SCALARS[self.dtype], 'HEAD_DIM': self.d,
                       'KERNEL': int(self.kind == 'gaussian'), 'M_THREADS': m_threads,
                       'M_OUTPUTS': m_outputs}
        self.exponent_scale = np.float32(
            -math.log2(math.e) / (self.scale * (2 if self.kind == 'gaussian' else 1)))
        self.gradient_scale = np.float32(-1 / self.scale)

    def tiling(self, q: torch.Tensor) -> Tiling:
        return Tiling(q.shape[0], q.shape[1], self.m, self.d)

    def launch(self, kernel: str, launch: tuple[int, int], args: list, **options) -> None:
        blocks, threads = launch
        self.emulator.launch(SOURCES, self.macros, f'laplacian_kernel_{kernel}',
                             self.grid or max(blocks, 1), threads, args, seed=self.seed, **options)

    def sizes(self, q) -> list[np.int64]:
        return [np.int64(q.shape[0]), np.int64(q.shape[1]), np.int64(self.m)]

    def forward(self, q: torch.Tensor, k: torch.Tensor, offset: int = 0) -> torch.Tensor:
        out = poisoned((*q.shape[:2], self.m), self.dtype)
        self.launch('forward', self.tiling(q).forward(),
                    [*(moved(x, offset) for x in (q, k, out)), self.exponent_scale,
                     *self.sizes(q)])
        return out

    def backward_q(self, q, k, kernel, grad, offset: int = 0) -> torch.Tensor:
        out = poisoned(q.shape, self.dtype)
        self.launch('backward_q', self.tiling(q).backward_q(),
                    [*(moved(x, offset) for x in (q, k, kernel, grad, out)), self.gradient_scale,
                     *self.sizes(q)])
        return out

    def backward_k(self, q, k, kernel, grad, offset: int = 0) -> torch.Tensor:
        tiling, n_chunks = self.tiling(q), ceil_div(q.shape[1], self.chunk_rows)
        partial = poisoned((q.shape[0], n_chunks, self.m, self.d), torch.float32)
        blocks, threads = tiling.backward_k()
        self.launch('backward_k', (blocks // max(tiling.n_chunks, 1) * n_chunks, threads),
                    [*(moved(x, offset) for x in (q, k, kernel, grad, partial)),
                     self.gradient_scale, *self.sizes(q), np.int64(self.chunk_rows)])
        out = poisoned(k.shape, self.dtype)
        self.launch('reduce_k', tiling.reduce_k(),
                    [memory(partial), moved(out, offset), np.int64(q.shape[0]),
                     np.int64(n_chunks), np.int64(self.m * self.d)])
        return out


def poisoned(shape, dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def memory(x: torch.Tensor) -> np.ndarray:
    """The tensor's own memory; half types as their bits."""
    return (x if x.dtype == torch.float32 else x.view(torch.int16)).numpy()


def moved(x: torch.Tensor, offset: int) -> Offset:
    return Offset(memory(x), offset)


def make_inputs(groups, n, m, d, dtype=torch.float32, seed=0) -> list[torch.Tensor]:
    """q, k and an incoming gradient. The distances stay about 5 whatever d is."""
    generator = torch.Generator().manual_seed(seed)
    q, k, grad = (torch.randn(groups, *shape, generator=generator, dtype=torch.float64)
                  for shape in ((n, d), (m, d), (n, m)))
    return [x.to(dtype) for x in (q * 4 / d, k * 4 / d, grad)]


def expected(kind, q, k, grad) -> list[torch.Tensor]:
    q, k = (x.double().requires_grad_() for x in (q, k))
    out = REFERENCES[kind](q, k, LAMBDA)
    out.backward(grad.double())
    return [out.detach(), q.grad, k.grad]


def check(emulator, n, m, d, dtype, kind='laplacian', groups=1, **options) -> None:
    q, k, grad = make_inputs(groups, n, m, d, dtype)
    kernels = Kernels(emulator, d, m, dtype, kind, **options)
    out = kernels.forward(q, k)
    got = [out, kernels.backward_q(q, k, out, grad), kernels.backward_k(q, k, out, grad)]
    forward, gradient = TOLERANCES[dtype]
    for name, actual, wanted, (rtol, atol) in zip(
            ('K', 'grad_q', 'grad_k'), got, expected(kind, q, k, grad),
            (forward, gradient, gradient), strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=rtol,
                                   atol=atol * wanted.abs().max().item(),
                                   msg=lambda text, name=name: f'{name}: {text}')


NS, MS, DS = (1, 63, 64, 65, 1000), (1, 16, 48, 49, 50, 64, 128, 129, 200), (
    1, 20, 31, 32, 33, 64, 72, 160, 256)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize('n, m, d, dtype, kind, groups', [
    (1000, 49, 32, F32, 'laplacian', 2), (64, 48, 32, F32, 'laplacian', 3),
    (65, 129, 32, F32, 'laplacian', 1), (63, 64, 64, F32, 'laplacian', 2),
    (1000, 1, 1, F32, 'laplacian', 1), (1, 1, 1, F32, 'laplacian', 3),
    (63, 16, 20, F16, 'laplacian', 2), (65, 50, 31, BF16, 'laplacian', 2),
    (64, 200, 33, F32, 'laplacian', 1), (65, 129, 72, F16, 'laplacian', 1),
    (63, 128, 160, BF16, 'laplacian', 1), (65, 64, 256, F32, 'laplacian', 1),
    (200, 49, 32, F16, 'laplacian', 1), (200, 49, 32, BF16, 'laplacian', 1),
    (130, 49, 32, F32, 'gaussian', 2), (65, 50, 33, F16, 'gaussian', 1),
], ids=lambda value: str(value).removeprefix('torch.'))
def test_against_the_reference(emulator, n, m, d, dtype, kind, groups):
    check(emulator, n, m, d, dtype, kind, groups)


@pytest.mark.soak
@pytest.mark.parametrize('kind', REFERENCES)
@pytest.mark.parametrize('dtype', SCALARS, ids=str)
@pytest.mark.parametrize('m', MS)
@pytest.mark.parametrize('d', DS)
def test_every_size(emulator, d, m, dtype, kind):
    for n in NS:
        check(emulator, n, m, d, dtype, kind, groups=2 if n < 100 else 1, seed=n)


@pytest.fixture
def kernels(emulator) -> Kernels:
    return Kernels(emulator, d=32, m=49)


def run_all(kernels: Kernels, inputs, **options) -> list[torch.Tensor]:
    q, k, grad = inputs
    out = kernels.forward(q, k, **options)
    return [out, kernels.backward_q(q, k, out, grad, **options),
            kernels.backward_k(q, k, out, grad, **options)]


def assert_same_bits(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_same_bits_whatever_the_order_the_grid_and_the_alignment(kernels):
    inputs = make_inputs(2, 150, 49, 32)
    want = run_all(kernels, inputs)
    kernels.seed = 7
    assert_same_bits(run_all(kernels, inputs), want)
    kernels.grid = 1  # one block steps over all tiles
    assert_same_bits(run_all(kernels, inputs), want)
    kernels.grid = 1000  # most blocks have no tile
    assert_same_bits(run_all(kernels, inputs, offset=4), want)


def test_chunks_of_the_key_gradient(kernels):
    q, k, grad = make_inputs(1, 700, 49, 32)
    out = kernels.forward(q, k)
    wanted = expected('laplacian', q, k, grad)[2]
    for kernels.chunk_rows in (64, 128, 640, 704, 6400):
        got = kernels.backward_k(q, k, out, grad)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4,
                                   atol=1e-5 * wanted.abs().max().item())


def test_b20_gradient_at_ties(emulator):
    kernels = Kernels(emulator, d=1, m=3, scale=1.0)
    q, k = torch.zeros(1, 1, 1), torch.tensor([[[0.], [.5], [-.5]]])
    near = math.exp(-.5)
    out = kernels.forward(q, k)
    torch.testing.assert_close(out, torch.tensor([[[1, near, near]]]))
    for column, wanted in enumerate((0, near, -near)):
        grad = torch.zeros(1, 1, 3)
        grad[..., column] = 1
        grad_q, grad_k = (f(q, k, out, grad) for f in (kernels.backward_q, kernels.backward_k))
        assert grad_q.item() == pytest.approx(wanted, rel=1e-6, abs=0)
        wanted_k = torch.zeros(3)
        wanted_k[column] = -wanted
        torch.testing.assert_close(grad_k.flatten(), wanted_k, rtol=1e-6, atol=0)


def test_b20_the_smallest_difference_is_no_tie(emulator):
    """Any normal float32 counts, and the next smaller one does not."""
    kernels = Kernels(emulator, d=1, m=2, scale=1.0)
    smallest = torch.finfo(torch.float32).tiny
    q, k = torch.tensor([[[smallest], [smallest / 2]]]), torch.zeros(1, 2, 1)
    out = kernels.forward(q, k)
    grad = torch.tensor([[[1., 2.], [1., 2.]]])
    assert kernels.backward_q(q, k, out, grad).flatten().tolist() == [-3, 0]
    assert kernels.backward_k(q, k, out, grad).flatten().tolist() == [1, 2]


def test_b20_same_tensor_on_both_sides(kernels):
    x, _, grad = make_inputs(1, 49, 49, 32)
    out, grad_q, grad_k = run_all(kernels, (x, x, grad))
    assert torch.equal(out, out.mT)
    assert (out.diagonal(dim1=-2, dim2=-1) == 1).all()
    for got, wanted in zip((grad_q, grad_k), expected('laplacian', x, x, grad)[1:], strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4,
                                   atol=1e-5 * wanted.abs().max().item())


def test_flat_image_has_exactly_no_gradient(kernels):
    """All queries and landmarks equal: every difference is a tie, whatever the weights."""
    grad = make_inputs(1, 200, 49, 32)[2]
    out, *gradients = run_all(kernels, (torch.full((1, 200, 32), .3), torch.full((1, 49, 32), .3),
                                        grad))
    assert (out == 1).all()
    for gradient in gradients:
        assert (gradient == 0).all()


def test_equal_landmarks(kernels):
    q, k, grad = make_inputs(1, 70, 49, 32)
    k = k[:, :1].repeat(1, 49, 1)
    out, grad_q, grad_k = run_all(kernels, (q, k, grad))
    assert torch.equal(out, out[..., :1].expand_as(out))
    for got, wanted in zip((grad_q, grad_k), expected('laplacian', q, k, grad)[1:], strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4,
                                   atol=1e-5 * wanted.abs().max().item())


def test_far_tokens_underflow_to_zero(kernels):
    q, k = torch.full((1, 70, 32), 1e4), torch.full((1, 49, 32), -1e4)
    for result in run_all(kernels, (q, k, torch.ones(1, 70, 49))):
        assert (result == 0).all()


def test_only_the_token_with_a_nan_is_touched(kernels):
    q, k, grad = make_inputs(1, 70, 49, 32)
    q[0, 5, 3] = math.nan
    out, grad_q, _ = run_all(kernels, (q, k, grad))
    for x in (out, grad_q[..., 3:4]):
        assert x[0, 5].isnan().all() and x[0, torch.arange(70) != 5].isfinite().all()


def test_b43_no_tokens(kernels):
    q, k, grad = torch.zeros(2, 0, 32), torch.ones(2, 49, 32), torch.zeros(2, 0, 49)
    out, grad_q, grad_k = run_all(kernels, (q, k, grad))
    assert out.numel() == grad_q.numel() == 0 and (grad_k == 0).all()


def test_b16_more_groups_than_a_grid_has_rows(emulator):
    groups = 70_000
    kernels = Kernels(emulator, d=1, m=1)
    q, k = torch.randn(groups, 1, 1), torch.randn(groups, 1, 1)
    out = poisoned((groups, 1, 1), F32)
    chosen = [0, 1, 65_535, 65_536, groups - 1]
    kernels.launch('forward', kernels.tiling(q).forward(),
                   [*map(memory, (q, k, out)), kernels.exponent_scale, *kernels.sizes(q)],
                   blocks=chosen)
    assert out.isfinite().sum() == len(chosen)
    torch.testing.assert_close(out[chosen], reference.laplacian_kernel(q, k, LAMBDA)[chosen])


# More than 2^31 elements in K; more than 2^32 in q and 2^31 in the partial sums.
@pytest.mark.parametrize('n, m, d', [(33_554_560, 64, 4), (16_777_344, 64, 256)])
def test_b45_offsets_beyond_32_bits(emulator, n, m, d):
    """The last tile of the grid is given and run; the rest is pages that nobody touches."""
    tail = 128
    assert n % tail == 0
    kernels, tiling = Kernels(emulator, d, m), Tiling(1, n, m, d)
    q, k, grad = make_inputs(1, tail, m, d)
    want = expected('laplacian', q, k, grad)
    got = [poisoned(x.shape, F32) for x in want]
    sizes = [np.int64(1), np.int64(n), np.int64(m)]

    def far(x: torch.Tensor) -> Sparse:
        """x is the end of a tensor n / tail times as large."""
        size = n // tail * x.numel() * 4
        return Sparse(size, {size - x.numel() * 4: memory(x)})

    def last(launch: tuple[int, int], count: int) -> dict[str, range]:
        return {'blocks': range(launch[0] - count, launch[0])}

    inputs = [far(q), memory(k), far(got[0])]
    forward, backward = tiling.forward(), tiling.backward_q()
    kernels.launch('forward', forward, [*inputs, kernels.exponent_scale, *sizes],
                   **last(forward, 1))
    inputs.append(far(grad))
    channel_chunks = ceil_div(d, 32)
    kernels.launch('backward_q', backward, [*inputs, far(got[1]), kernels.gradient_scale, *sizes],
                   **last(backward, channel_chunks))
    # With chunks of one tile, partial has a row of m x d for each; the last one is the sum.
    backward = n // tail * channel_chunks, tiling.backward_k()[1]
    kernels.launch('backward_k', backward, [*inputs, far(got[2]), kernels.gradient_scale, *sizes,
                                            np.int64(tail)], **last(backward, channel_chunks))
    for actual, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=1e-4,
                                   atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize('m, tile', [(1, (8, 1)), (16, (8, 2)), (49, (7, 7)), (50, (8, 7)),
                                     (64, (8, 8)), (196, (7, 7)), (200, (8, 5))])
def test_landmark_tile(m, tile):
    assert landmark_tile(m) == tile
