"""The attention layer alone, against the dense formula in float64."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmlaplacian import LaplacianAttention
from mmlaplacian.ops.nystrom_attention import reference

MAPS = [(25, 42), (13, 13), (7, 7), (3, 5), (1, 1), (1, 40)]


def attention(dims: int = 12, heads: int = 3, **arguments: object) -> LaplacianAttention:
    """A layer in eval mode with the same random weights and biases at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = LaplacianAttention(dims, heads, **arguments)
        with torch.no_grad():
            layer.qkv.weight.normal_(std=0.4)
            for bias in (layer.qkv.bias, layer.proj.bias, layer.local.bias):
                bias.normal_(std=0.1)
    return layer.eval()


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def split(tokens: Tensor, heads: int) -> Tensor:
    """``(B, tokens, C) -> (B, h, tokens, d)``, heads one after the other in C."""
    return torch.stack(tokens.tensor_split(heads, dim=-1), dim=1)


def dense_branch(layer: LaplacianAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The attention branch by the N x N formula and the value map, float64 ``(B, H, W, C)``."""
    weight, bias = layer.qkv.weight.double(), layer.qkv.bias.double()
    q, k, v = (x.double() @ w.T + b for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True))
    height, width = x.shape[1:3]
    rows, columns = ((torch.arange(min(layer.landmarks.landmark_grid, n)) * n, n,
                      min(layer.landmarks.landmark_grid, n)) for n in (height, width))
    windows = [[slice(int(s) // cells, -(-(int(s) + n) // cells)) for s in starts]
               for starts, n, cells in (rows, columns)]
    landmarks = torch.stack([k[:, r, c].mean((1, 2)) for r, c in itertools.product(*windows)], 1)
    heads = layer.num_heads
    out = reference.nystrom_attention(
        *(split(t.flatten(1, 2), heads) for t in (q, k, v)), split(landmarks, heads),
        layer.kernel_scale, layer.ridge, layer.whiten_eps, layer.kernel, layer.normalize)
    return torch.cat(out.unbind(1), dim=-1).reshape(x.shape), v


def dense(layer: LaplacianAttention, x: Tensor) -> Tensor:
    """The whole layer in float64."""
    branch, v = dense_branch(layer, x)
    local = F.conv2d(v.permute(0, 3, 1, 2), layer.local.weight.double(),
                     layer.local.bias.double(), padding=1, groups=v.shape[-1])
    out = branch + local.permute(0, 2, 3, 1)
    return out @ layer.proj.weight.double().T + layer.proj.bias.double()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compares relative to the largest expected value."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f'relative error {error:.1e}'


def branch_of(layer: LaplacianAttention, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = layer.branch.register_forward_hook(lambda module, args, out: seen.append(out))
    layer(x)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize('size', MAPS)
def test_b13_equals_dense_formula(size: tuple[int, int]) -> None:
    layer = attention()
    x = inputs(2, *size, 12)
    expected = dense(layer, x)
    assert_close(copy.deepcopy(layer).double()(x.double()), expected, 1e-10)
    assert_close(layer(x), expected, 1e-4)


@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
@pytest.mark.parametrize('normalize', ['whiten', 'row', 'none'])
def test_every_form_equals_dense_formula(kernel: str, normalize: str) -> None:
    layer = attention(kernel=kernel, normalize=normalize, kernel_scale=2.0, ridge=0.1,
                      whiten_eps=1e-3, landmark_grid=3).double()
    x = inputs(2, 5, 6, 12).double()
    assert_close(layer(x), dense(layer, x), 1e-10)


def test_forms_and_settings_differ() -> None:
    """Each argument reaches the operator: none of these layers gives another's output."""
    x = inputs(1, 5, 6, 12)
    outputs = [attention(**{'landmark_grid': 3, **change})(x) for change in (
        {}, dict(kernel='gaussian'), dict(normalize='row'), dict(normalize='none'),
        dict(kernel_scale=2.0), dict(ridge=0.1), dict(whiten_eps=1e-1), dict(solver_iters=1),
        dict(pool_ratio=4), dict(landmark_grid=2))]
    for one, other in itertools.combinations(outputs, 2):
        assert (one - other).abs().max() > 1e-4


@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
def test_b13_landmarks_of_all_tokens_give_exact_kernel_attention(kernel: str) -> None:
    """On 7 x 7 tokens W is the kernel matrix, and |K (K + eps I)^-1 K - K| <= eps."""
    layer = attention(kernel=kernel, normalize='none').double()
    with torch.no_grad():
        # Queries equal to keys: G is then K (K + eps I)^-1 K.
        layer.qkv.weight[:12] = layer.qkv.weight[12:24]
        layer.qkv.bias[:12] = layer.qkv.bias[12:24]
    x = inputs(1, 7, 7, 12).double()
    k, v = layer.qkv(x).flatten(1, 2).chunk(3, -1)[1:]
    k, v = split(k, 3), split(v, 3)
    distance = k[..., :, None, :] - k[..., None, :, :]
    exact = torch.exp(-distance.abs().sum(-1) / 4) if kernel == 'laplacian' \
        else torch.exp(-distance.square().sum(-1) / 8)
    expected = torch.cat((exact @ v / 49).unbind(1), -1).reshape(1, 7, 7, 12)
    assert_close(branch_of(layer, x), expected, 1e-2)


@pytest.mark.parametrize('size', [size for size in MAPS if size != (1, 1)])
@pytest.mark.parametrize('normalize', ['whiten', 'row', 'none'])
def test_b13_last_token_influences_its_own_output_most(size: tuple[int, int],
                                                       normalize: str) -> None:
    layer = attention(normalize=normalize)
    with torch.no_grad():
        # A window with its peak in the middle, or the local context may favour a neighbour.
        layer.local.weight.copy_(torch.tensor([[1., 2, 1], [2, 4, 2], [1, 2, 1]]))
    x = torch.zeros(1, *size, 12)
    x[0, -1, -1] = inputs(12)
    influence = (layer(x) - layer(torch.zeros_like(x))).norm(dim=-1).flatten()
    others, last = influence[:-1], influence[-1]
    assert last > 1.05 * others.max()


def test_last_token_influences_its_own_branch_most() -> None:
    layer = attention()
    x = torch.zeros(1, 9, 11, 12)
    x[0, -1, -1] = inputs(12)
    influence = (branch_of(layer, x) - branch_of(layer, torch.zeros_like(x))).norm(dim=-1)
    others, last = influence.flatten()[:-1], influence[0, -1, -1]
    assert last > 2 * others.max()


def test_gradients_equal_those_of_the_dense_formula() -> None:
    layer = attention(dims=6, heads=2, landmark_grid=2).double()
    x = inputs(2, 4, 5, 6).double()
    weights = inputs(2, 4, 5, 6).double().flip(1)
    grads = []
    for forward in (layer, lambda tokens: dense(layer, tokens)):
        tokens = x.clone().requires_grad_()
        (forward(tokens) * weights).sum().backward()
        grads.append([tokens.grad, *(p.grad.clone() for p in layer.parameters())])
        layer.zero_grad()
    for own, expected in zip(*grads, strict=True):
        assert_close(own, expected, 1e-8)


def test_b02_heads_do_not_mix() -> None:
    """Two heads of the same weights give the same channels as one head alone."""
    one, two = attention(4, 1), attention(8, 2)
    with torch.no_grad():
        for target, source in zip((two.qkv.weight, two.qkv.bias),
                                  (one.qkv.weight, one.qkv.bias), strict=True):
            rows = source.unflatten(0, (3, 4)).repeat(1, 2, *(1, ) * (source.dim() - 1))
            # The weights of the doubled layer see the first four channels only.
            target.zero_()
            target[(slice(None), slice(0, 4))[:target.dim()]] = rows.flatten(0, 1)
        two.qkv.weight[4:8] *= 7  # the second head's queries change nothing for the first
    x = inputs(1, 6, 5, 8)
    both, alone = branch_of(two, x), branch_of(one, x[..., :4])
    torch.testing.assert_close(both[..., :4], alone, atol=1e-6, rtol=0)
    assert (both[..., 4:] - alone).abs().max() > 1e-3


@pytest.mark.parametrize('pool', [dict(landmark_grid=7), dict(pool_ratio=2)])
def test_b43_empty_batch(pool: dict) -> None:
    x = torch.zeros(0, 9, 7, 12, requires_grad=True)
    layer = attention(**pool)
    out = layer(x)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape
    assert all(not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize('x, said', [
    (torch.zeros(1, 4, 4, 12, dtype=torch.uint8), 'floating-point dtype, got torch.uint8'),
    (np.zeros((1, 4, 4, 12), np.float32), 'x must be a tensor, got ndarray'),
    (None, 'x must be a tensor, got NoneType')])
def test_what_is_no_tensor_of_floats_is_refused(x: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        LaplacianAttention(12, 2)(x)


@pytest.mark.parametrize('shape', [(2, 12), (2, 30, 12), (2, 5, 6, 11), (2, 12, 5, 6),
                                   (2, 0, 6, 12), (2, 5, 0, 12), (1, 2, 5, 6, 12)])
def test_bad_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        attention()(torch.zeros(shape))
    assert str(caught.value) == (f'x must have shape (B, H, W, 12) with H, W >= 1, got {shape}')


@pytest.mark.parametrize(('arguments', 'error', 'message'), [
    (dict(embed_dims=0), ValueError, 'embed_dims must be an integer >= 1, got 0'),
    (dict(embed_dims=12.), TypeError, 'embed_dims must be an integer >= 1, got 12.0'),
    (dict(num_heads=0), ValueError, 'num_heads must be an integer >= 1, got 0'),
    (dict(num_heads='3'), TypeError, "num_heads must be an integer >= 1, got '3'"),
    (dict(num_heads=5), ValueError, 'num_heads must divide embed_dims=12, got 5'),
    (dict(solver_iters=0), ValueError, 'solver_iters must be an integer >= 1, got 0'),
    (dict(solver_iters=2.5), TypeError, 'solver_iters must be an integer >= 1, got 2.5'),
    (dict(kernel='rbf'), ValueError,
     "kernel must be one of ('laplacian', 'gaussian'), got 'rbf'"),
    (dict(normalize=None), ValueError,
     "normalize must be one of ('whiten', 'row', 'none'), got None"),
    (dict(drop_rate=1.), ValueError, 'drop_rate must be in [0, 1), got 1.0'),
    (dict(drop_rate='0.1'), TypeError, "drop_rate must be a number in [0, 1), got '0.1'"),
    *((dict([(name, value)]), error, f'{name} must be {accepted}, got {value!r}')
      for name in ('kernel_scale', 'ridge', 'whiten_eps')
      for value, error, accepted in (
          (0., ValueError, 'positive and finite'), (-1, ValueError, 'positive and finite'),
          (float('nan'), ValueError, 'positive and finite'),
          (float('inf'), ValueError, 'positive and finite'), ('4', TypeError, 'a positive number'),
          (None, TypeError, 'a positive number'))),
])
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        LaplacianAttention(**{'embed_dims': 12, 'num_heads': 3, **arguments})
    assert message in str(caught.value)


def test_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match='qkv_bias'):
        LaplacianAttention(12, 3, qkv_bias=True)


def test_b08_half_precision_at_the_size_of_a_detector() -> None:
    """Large maps of 800 x 1344 images at stride 4, float16 autocast, loss scale 65536."""
    layer = attention(64, 2)
    x, weight = 8 * inputs(2, 200, 336, 64), inputs(2, 200, 336, 64)
    results = []
    for enabled in (True, False):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast('cpu', torch.float16, enabled=enabled):
            out = layer(leaf)
        ((out.float() * weight).mean() * 65536).backward()
        results.append([out.detach().float(), leaf.grad, *(p.grad for p in layer.parameters())])
    for half, single in zip(*results, strict=True):
        assert half.isfinite().all()
        assert (half - single).norm() <= 2e-2 * single.norm()


def test_dropout_acts_in_training_alone() -> None:
    layer = attention(drop_rate=0.5)
    x = inputs(1, 8, 8, 12)
    assert torch.equal(layer(x), layer(x))
    dropped = (layer.train()(x) == 0).float().mean()
    assert 0.4 < dropped < 0.6


def test_repr_names_the_settings() -> None:
    text = attention(kernel='gaussian', normalize='row', solver_iters=9).extra_repr()
    assert text == ("num_heads=3, kernel='gaussian', kernel_scale=4.0, ridge=0.01, "
                    "whiten_eps=1e-05, solver_iters=9, normalize='row'")
