"""Contract of the attention: against the dense N x N formula with an exact inverse."""

import math

import pytest
import torch
import torch.nn.functional as F

from mmlaplacian.ops import nystrom_attention
from mmlaplacian.ops.nystrom_attention import NORMALIZATIONS, reference

OPTIONS = dict(kernel_scale=4.0, ridge=1e-2, whiten_eps=1e-5)
normalizations = pytest.mark.parametrize('normalize', NORMALIZATIONS)
kernels = pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])


def make_inputs(n=64, d=32, heads=2, batch=1, scale=0.3, case='random', grid=7, seed=0,
                device='cpu'):
    """q, k, v ``(B, h, N, d)`` in float64 and the landmarks that pooling would give."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, heads, n, d, generator=generator, dtype=torch.float64)
    q, k = q * scale, k * scale
    if case in ('flat keys', 'flat'):
        k = k[:, :, :1].expand_as(k)
    if case == 'flat':
        q = k
    height = next(side for side in range(math.isqrt(n), 0, -1) if n % side == 0)
    key_map = k.mT.reshape(batch * heads, d, height, n // height)
    landmarks = F.adaptive_avg_pool2d(key_map, (min(grid, height), min(grid, n // height)))
    return [x.to(device)
            for x in (q, k, v, landmarks.flatten(2).mT.reshape(batch, heads, -1, d))]


def dense(inputs, kernel='laplacian', normalize='whiten'):
    return reference.nystrom_attention(*inputs, kernel=kernel, normalize=normalize, **OPTIONS)


def relative_error(x, expected):
    return ((x.double() - expected).norm() / expected.norm()).item()


cases = pytest.mark.parametrize('case', ['random', 'flat keys', 'flat'])
scales = pytest.mark.parametrize('scale', [0.05, 0.3, 1.0])


@normalizations
@kernels
@cases
@scales
@pytest.mark.parametrize('n', [1, 3, 49, 130])
def test_values_in_float64(normalize, kernel, case, scale, n):
    inputs = make_inputs(n, scale=scale, case=case)
    out = nystrom_attention(*inputs, kernel=kernel, normalize=normalize, **OPTIONS)
    expected = dense(inputs, kernel, normalize)
    # W^-1 and 1 / sqrt(whiten_eps) of a flat image magnify rounding, in which processors differ.
    tolerance = 1e-9 if (case, normalize) == ('flat', 'whiten') else 1e-10
    assert (out - expected).abs().max() <= tolerance * expected.abs().max()


@normalizations
def test_values_at_stage_1_of_224_px(normalize):
    inputs = make_inputs(3136, heads=1)
    out = nystrom_attention(*inputs, normalize=normalize)
    assert relative_error(out, dense(inputs, normalize=normalize)) <= 1e-10


@normalizations
@cases
@scales
@pytest.mark.parametrize('n', [1, 49, 400])
def test_float32_error_against_that_of_the_dense_form(normalize, case, scale, n, device):
    """At most twice it on the CPU; elsewhere the sums of either run in another order: 4 times."""
    inputs = make_inputs(n, scale=scale, case=case)
    exact = dense(inputs, normalize=normalize)
    single = [x.float() for x in inputs]
    dense_error = relative_error(dense(single, normalize=normalize), exact)
    out = nystrom_attention(*(x.to(device) for x in single), normalize=normalize)
    # Two roundings of the result, for the cases where the dense form happens to make none.
    factor = 2 if device.type == 'cpu' else 4
    assert relative_error(out.cpu(), exact) \
        <= factor * dense_error + 2 * torch.finfo(torch.float32).eps


def test_float32_error_at_3136_tokens():
    inputs = make_inputs(3136, heads=1, scale=0.05)
    exact, single = dense(inputs), [x.float() for x in inputs]
    assert relative_error(nystrom_attention(*single), exact) \
        <= 2 * relative_error(dense(single), exact)


@normalizations
@kernels
def test_gradcheck(normalize, kernel):
    inputs = [x.clone().requires_grad_() for x in make_inputs(6, d=3, scale=1.0, grid=2)]
    assert torch.autograd.gradcheck(
        lambda *x: nystrom_attention(*x, kernel=kernel, normalize=normalize), inputs)


@normalizations
@kernels
@pytest.mark.parametrize('case', ['random', 'flat keys'])
def test_gradients_against_reference(normalize, kernel, case):
    weight = torch.randn(1, 2, 130, 32, dtype=torch.float64,
                         generator=torch.Generator().manual_seed(1))
    grads = []
    for function in (lambda x: nystrom_attention(*x, kernel=kernel, normalize=normalize),
                     lambda x: dense(x, kernel, normalize)):
        leaves = [x.clone().requires_grad_() for x in make_inputs(130, case=case)]
        (function(leaves) * weight).sum().backward()
        grads.append([x.grad for x in leaves])
    largest = max(grad.norm() for grad in grads[1])
    for name, got, want in zip('q k v landmarks'.split(), *grads, strict=True):
        # Some gradients of flat keys are zero but for rounding, hence the second term.
        assert (got - want).norm() <= 1e-8 * want.norm() + 1e-10 * largest, name


@normalizations
def test_gradients_in_float32(normalize, device):
    weight = torch.randn(1, 2, 196, 32, generator=torch.Generator().manual_seed(1)).to(device)
    grads = []
    for dtype, function in ((torch.float32, lambda x: nystrom_attention(*x, normalize=normalize)),
                            (torch.float64, lambda x: dense(x, normalize=normalize))):
        leaves = [x.to(dtype, copy=True).requires_grad_()
                  for x in make_inputs(196, device=device)]
        (function(leaves) * weight.to(dtype)).sum().backward()
        grads.append([x.grad for x in leaves])
    for got, want in zip(*grads, strict=True):
        assert relative_error(got, want) <= 1e-3


@normalizations
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_b09_half_precision_computes_in_float32(normalize, dtype, device):
    inputs = [x.to(dtype).requires_grad_() for x in make_inputs(196, device=device)]
    out = nystrom_attention(*inputs, normalize=normalize)
    out.float().square().sum().backward()
    assert out.dtype == dtype and all(x.grad.dtype == dtype for x in inputs)
    torch.testing.assert_close(out, dense([x.double() for x in inputs], normalize=normalize)
                               .to(dtype), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_b08_autocast_and_large_values(dtype, device):
    inputs = [x.float() * 8 for x in make_inputs(196, device=device)]
    inputs = [inputs[0].to(dtype), *inputs[1:]]
    with torch.autocast(device.type, dtype):
        out = nystrom_attention(*inputs)
    expected = nystrom_attention(inputs[0].float(), *inputs[1:])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize('spread', [0.16, 1.28])
def test_b08_autocast_at_the_tokens_of_a_detector(spread, device):
    """An 800 x 1344 image at stride 4, float16 as a linear layer gives it, loss scale 65536.

    A new layer gives the smaller spread to normalised tokens, the larger one to 8 times those.
    """
    size = 1 if device.type == 'cpu' else 2
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, size, size, 200 * 336, 32, generator=generator).to(device) * spread
    landmarks = tokens[1].unflatten(2, (8400, 8))[:, :, :8400:175].mean(3)
    inputs = [x.half() for x in (*tokens[:3], landmarks)]
    results = []
    for autocast in (True, False):
        leaves = [x.to(x.dtype if autocast else torch.float32, copy=True).requires_grad_()
                  for x in inputs]
        with torch.autocast(device.type, torch.float16, enabled=autocast):
            out = nystrom_attention(*leaves)
        ((out.float() * tokens[3]).mean() * 65536).backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    smallest = torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps
    for name, half, single in zip('out q k v landmarks'.split(), *results, strict=True):
        assert half.dtype == torch.float16 and half.isfinite().all(), name
        error = (half.float() - single).abs()
        assert (error <= 2e-2 * single.abs() + 2e-3 * single.abs().max() + smallest).all(), name
        assert half.count_nonzero() > half.numel() / 2, name


@normalizations
def test_b02_result_is_independent_of_batch_mates(normalize, device):
    image = make_inputs(196, device=device)
    flat = make_inputs(196, case='flat', seed=1, device=device)
    together = nystrom_attention(*[torch.cat(pair).float() for pair in zip(image, flat,
                                                                           strict=True)],
                                 normalize=normalize)
    alone = nystrom_attention(*[x.float() for x in image], normalize=normalize)
    assert (together[:1] - alone).abs().max() <= 1e-6 * alone.abs().max()


@normalizations
def test_nan_stays_in_its_image(normalize, device):
    inputs = [x.float() for x in make_inputs(49, batch=2, device=device)]
    inputs[0][0, 0, 0, 0] = float('nan')
    out = nystrom_attention(*inputs, normalize=normalize)
    assert out[0].isnan().any() and out[1].isfinite().all()


def test_b13_landmarks_at_every_token_give_exact_kernel_attention():
    """With landmarks = keys and a small ridge G is the kernel matrix itself."""
    q, k, v, landmarks = make_inputs(49, scale=1.0)
    assert torch.allclose(landmarks, k)
    out = nystrom_attention(q, k, v, k, ridge=1e-6, normalize='none')
    exact = reference.KERNELS['laplacian'](q, k, 4.0) @ v / 49
    assert relative_error(out, exact) < 1e-3


def test_whitened_map_is_unit_gaussian_for_each_key():
    """mean 1/N and variance 1/N^2 of each column, read off with one-hot values."""
    n = 64
    q, k, _, landmarks = make_inputs(n)
    v = torch.eye(n, dtype=torch.float64).expand(1, 2, n, n)
    z = nystrom_attention(q, k, v, landmarks, whiten_eps=1e-12)
    torch.testing.assert_close(z.mean(-2) * n, torch.ones_like(z.mean(-2)))
    torch.testing.assert_close(z.var(-2, correction=0) * n**2, torch.ones_like(z.mean(-2)),
                               rtol=1e-4, atol=0)


def test_rows_of_the_row_map_sum_to_one(device):
    q, k, v, landmarks = (x.float() for x in make_inputs(64, device=device))
    out = nystrom_attention(q, k, torch.ones_like(v), landmarks, normalize='row')
    torch.testing.assert_close(out, torch.ones_like(out))


def test_row_map_far_from_every_landmark_is_bounded(device):
    q, k, v, landmarks = (x.float() for x in make_inputs(64, device=device))
    out = nystrom_attention(q + 100, k, v, landmarks, normalize='row')
    assert out.abs().max() <= v.abs().max()


def test_nothing_kept_for_the_backward_is_quadratic(device):
    inputs = [x.float().requires_grad_() for x in make_inputs(1024, heads=1, device=device)]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t,
                                                  lambda t: t):
        nystrom_attention(*inputs)
    assert sizes and max(sizes) <= 1024 * 49


@normalizations
@pytest.mark.parametrize('batch, heads, n', [(0, 2, 16), (1, 0, 16), (1, 2, 0)])
def test_b43_empty(normalize, batch, heads, n, device):
    q, k, v = (torch.zeros(batch, heads, n, 8, device=device, requires_grad=True)
               for _ in range(3))
    landmarks = torch.zeros(batch, heads, 4, 8, device=device, requires_grad=True)
    out = nystrom_attention(q, k, v, landmarks, normalize=normalize)
    assert out.shape == (batch, heads, n, 8)
    out.sum().backward()
    assert q.grad.shape == q.shape and (landmarks.grad == 0).all()


@normalizations
@kernels
@pytest.mark.parametrize('case', ['flat keys', 'flat'])
def test_smallest_accepted_ridge_gives_finite_results_in_float32(normalize, kernel, case, device):
    inputs = [x.float() for x in make_inputs(784, case=case, grid=14, device=device)]
    smallest = 2 * 196 * torch.finfo(torch.float32).eps
    out = nystrom_attention(*inputs, ridge=1.01 * smallest, kernel=kernel, normalize=normalize)
    assert out.isfinite().all()
    with pytest.raises(ValueError, match='ridge must be at least .* for 196 landmarks'):
        nystrom_attention(*inputs, ridge=0.99 * smallest, kernel=kernel, normalize=normalize)


def test_huge_ridge_leaves_the_mean_value(device):
    q, k, v, landmarks = (x.float() for x in make_inputs(49, device=device))
    out = nystrom_attention(q, k, v, landmarks, ridge=1e30)
    torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(out))


def tokens(n=4, d=8, heads=1, dtype=torch.float32):
    return torch.zeros(1, heads, n, d, dtype=dtype)


@pytest.mark.parametrize('tensors, options, error, message', [
    ((tokens(), tokens(5), tokens(), tokens()), {}, ValueError, 'agree in tokens'),
    ((tokens(), tokens(), tokens(5), tokens()), {}, ValueError, 'agree in tokens'),
    ((tokens(), tokens(), tokens(), tokens(d=4)), {}, ValueError, 'agree in d'),
    ((tokens(), tokens(), tokens(heads=2), tokens()), {}, ValueError, 'agree in B, h'),
    ((tokens(), tokens(), tokens(), tokens(0)), {}, ValueError, 'at least one token'),
    ((tokens(), tokens(), tokens(dtype=torch.float16), tokens()), {}, TypeError, 'one dtype'),
    ((tokens(), ) * 4, dict(kernel='cosine'), ValueError, "'laplacian', 'gaussian'.*'cosine'"),
    ((tokens(), ) * 4, dict(normalize='softmax'), ValueError, "'whiten'.*'softmax'"),
    ((tokens(), ) * 4, dict(ridge=0), ValueError, 'ridge must be positive'),
    ((tokens(), ) * 4, dict(ridge=1e39), ValueError, 'ridge must be from 1.18e-38 to 3.4e.38'),
    ((tokens(), ) * 4, dict(kernel_scale=1e-40), ValueError, 'kernel_scale must be from'),
    ((tokens(), ) * 4, dict(kernel_scale=10**400), ValueError, 'kernel_scale must be from'),
    ((tokens(), ) * 4, dict(solver_iters=10**30), ValueError, 'an integer below 2.63'),
    ((tokens()[..., :0], ) * 4, dict(), ValueError, 'd must be at least 1'),
    ((tokens(), ) * 4, dict(whiten_eps=-1e-5), ValueError, 'whiten_eps must be positive'),
    ((tokens(), ) * 4, dict(solver_iters=0), ValueError, 'solver_iters'),
])
def test_refused_inputs(tensors, options, error, message):
    with pytest.raises(error, match=message):
        nystrom_attention(*tensors, **options)
