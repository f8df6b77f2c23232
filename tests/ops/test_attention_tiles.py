"""The attention by tiles of tokens: any cut gives the same, and nothing N x M is kept."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mmlaplacian.ops import nystrom_attention, use_backend
from mmlaplacian.ops.newton_schulz import default_iters
from mmlaplacian.ops.nystrom_attention import NORMALIZATIONS, tiles

B, H, N, M, D, D_V = 2, 3, 50, 9, 8, 5
normalizations = pytest.mark.parametrize('normalize', NORMALIZATIONS)


@pytest.fixture(autouse=True)
def torch_form():
    """The C text cuts its tiles by itself."""
    with use_backend('torch'):
        yield


def make_inputs(n=N, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(B, H, tokens, channels, generator=generator, dtype=torch.float64) * .5)
            .to(dtype) for tokens, channels in ((n, D), (n, D), (n, D_V), (M, D))]


def cut(monkeypatch, length):
    monkeypatch.setattr(tiles, '_SHORTEST_TILE', length)
    monkeypatch.setattr(tiles, '_TILE_ELEMENTS', {'cpu': 0})


def run(inputs, normalize):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = nystrom_attention(*leaves, normalize=normalize)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weight).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


@normalizations
@pytest.mark.parametrize('length', [1, 7, 25, 49])
def test_any_cut_gives_the_same(normalize, length, monkeypatch):
    inputs = make_inputs()
    whole = run(inputs, normalize)
    cut(monkeypatch, length)
    for got, want in zip(run(inputs, normalize), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@normalizations
def test_tiles_are_as_accurate_as_one_in_float32(normalize, monkeypatch):
    """Nearly equal queries: a covariance from sums of squares would cancel."""
    inputs = make_inputs(300)
    inputs[0] = inputs[0][:, :, :1] + 1e-3 * inputs[0]
    single = [x.float() for x in inputs]
    exact = run(inputs, normalize)
    whole = run(single, normalize)
    cut(monkeypatch, 64)
    for tiled, one, want in zip(run(single, normalize), whole, exact, strict=True):
        assert (tiled - want).norm() <= 1.5 * (one - want).norm() + 1e-6 * want.norm()


@normalizations
def test_gradcheck_with_several_tiles(normalize, monkeypatch):
    cut(monkeypatch, 3)
    inputs = [x[:1, :1, :7, :3].clone().requires_grad_() for x in make_inputs()]
    assert torch.autograd.gradcheck(lambda *x: nystrom_attention(*x, normalize=normalize), inputs)


@normalizations
def test_b21_nothing_of_size_n_m_is_kept(normalize):
    n = 400
    inputs = [x.requires_grad_() for x in make_inputs(n, torch.float32)]
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        nystrom_attention(*inputs, normalize=normalize)
    with_tokens = {x.data_ptr() for x in inputs[:3]}
    assert with_tokens <= kept.keys()
    assert all(n not in x.shape for pointer, x in kept.items() if pointer not in with_tokens)


@normalizations
def test_large_tokens_come_in_tiles_of_limited_size(normalize, monkeypatch):
    monkeypatch.setattr(tiles, '_TILE_ELEMENTS', {'cpu': 300 * H * M})
    lengths = []
    original = tiles.kernel_matrix

    def watched(x, y, *options):
        lengths.append(x.shape[1])
        return original(x, y, *options)

    monkeypatch.setattr(tiles, 'kernel_matrix', watched)
    run(make_inputs(1000, torch.float32), normalize)
    assert max(lengths) == 300


@normalizations
def test_flops(normalize):
    """Distances, solver and products by hand, forward and backward."""
    leaves = [x.requires_grad_() for x in make_inputs(dtype=torch.float32)]
    with FlopCounterMode(display=False) as counter:
        out = nystrom_attention(*leaves, normalize=normalize)
    groups, steps = B * H, default_iters(M, 1e-2, torch.float32)
    square, context = N * M * M, N * M * D_V
    distance = groups * M * D * (2 * N + M)
    products = {'whiten': 3, 'row': 1, 'none': 1}[normalize] * square + 2 * context
    assert counter.get_total_flops() == \
        2 * (distance + groups * (products + 2 * steps * M**3))
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    products = {'whiten': 6 * square + 4 * context, 'row': 3 * square + 5 * context,
                'none': 3 * square + 4 * context}[normalize]
    assert counter.get_total_flops() == 2 * groups * (2 * N * M * D) + 6 * distance \
        + 2 * groups * (products + 2 * M**3)
