"""The kernels on a CUDA device at sizes that break others: grids, 64-bit offsets, memory."""

import pytest
import torch

from mmlaplacian.ops import gaussian_kernel, laplacian_kernel
from mmlaplacian.ops.laplacian_kernel import reference

pytestmark = pytest.mark.gpu
DEVICE = torch.device('cuda')
SCALE = 4.0


def make_inputs(groups, n, m, d):
    """q ``(groups, 1, n, d)`` and k, made on the device: some are too large to bring there."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [(torch.randn(groups, 1, size, d, generator=generator, device=DEVICE) * 0.3)
            .requires_grad_() for size in (n, m)]


def assert_near(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5 * want.abs().max().item())


def some_of(size, count=1000):
    """Indices of the first, the last and random entries of an axis."""
    if size <= 3 * count:
        return torch.arange(size, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(1)
    random = torch.randint(size, (count, ), generator=generator, device=DEVICE)
    ends = torch.arange(count, device=DEVICE)
    return torch.cat([ends, random, size - 1 - ends])


def exact_rows(q, k, rows, weight):
    """Kernel and q gradient of some queries, which depend on no other query, in float64."""
    leaf = q.detach()[:, :, rows].double().requires_grad_()
    kernel = reference.laplacian_kernel(leaf, k.detach().double(), SCALE)
    grad, = torch.autograd.grad((kernel * weight[:, :, rows].double()).sum(), leaf)
    return kernel.detach(), grad


def exact_key_gradient(q, k, weight, rows_at_once=50_000):
    """Over all queries, a part at a time, in float64."""
    total = torch.zeros_like(k, dtype=torch.float64)
    for part, part_weight in zip(q.detach().split(rows_at_once, 2),
                                 weight.split(rows_at_once, 2), strict=True):
        leaf = k.detach().double().requires_grad_()
        kernel = reference.laplacian_kernel(part.double(), leaf, SCALE)
        total += torch.autograd.grad((kernel * part_weight.double()).sum(), leaf)[0]
    return total


def test_b16_tokens_of_a_4128_px_image():
    q, k = make_inputs(1, 1_065_024, 49, 32)
    weight = torch.randn(1, 1, 1_065_024, 49, device=DEVICE)
    out = laplacian_kernel(q, k, SCALE)
    out.backward(weight)
    rows = some_of(q.shape[2])
    kernel, grad_q = exact_rows(q, k, rows, weight)
    assert_near(out.detach()[:, :, rows], kernel)
    assert_near(q.grad[:, :, rows], grad_q)
    assert_near(k.grad, exact_key_gradient(q, k, weight))


@pytest.mark.parametrize('groups, n, m', [(4, 520, 520), (70_000, 16, 7)], ids=str)
def test_b16_square_and_many_groups(groups, n, m):
    q, k = make_inputs(groups, n, m, 32)
    weight = torch.randn(groups, 1, n, m, device=DEVICE)
    out = laplacian_kernel(q, k, SCALE)
    out.backward(weight)
    some = some_of(groups)
    exact = [x.detach()[some].double().requires_grad_() for x in (q, k)]
    expected = reference.laplacian_kernel(*exact, SCALE)
    expected.backward(weight[some].double())
    for got, want in [(out, expected), (q.grad, exact[0].grad), (k.grad, exact[1].grad)]:
        assert_near(got.detach()[some], want.detach())


def extra_peak(op, n):
    """Bytes that forward and backward hold at the most beside their inputs; bytes of those."""
    q, k = make_inputs(2, n, 49, 64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = op(q, k, SCALE)
    size = sum(x.numel() * x.element_size() for x in (q, k, out))
    out.sum().backward()
    return torch.cuda.max_memory_allocated() - before, size


@pytest.mark.parametrize('op', [laplacian_kernel, gaussian_kernel])
def test_b21_memory_grows_as_the_tokens(op):
    peak, size = extra_peak(op, 67_200)
    assert peak < 6 * size
    larger, _ = extra_peak(op, 4 * 67_200)
    assert 3 < larger / peak < 5


def free_memory():
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize('groups, n', [(1, 33_554_560), (524_290, 64)], ids=['one', 'many'])
def test_b45_beyond_32_bit_offsets(groups, n):
    """More than 2^31 kernel values; only the last 100 queries carry a gradient."""
    if (free := free_memory()) < 40e9:
        pytest.skip(f'needs 40 GB of free device memory, {free / 1e9:.0f} GB are free')
    q, k = make_inputs(groups, n, 64, 4)
    out = laplacian_kernel(q, k, SCALE)
    assert out.numel() > 2**31
    last = slice(max(0, n - 100), n)
    weight = torch.zeros_like(out)
    weight[-1, :, last] = 1
    grad_q, grad_k = torch.autograd.grad(out, (q, k), weight)

    for group in some_of(groups, 10).tolist():
        rows = some_of(n)
        kernel, _ = exact_rows(q[group:group + 1], k[group:group + 1], rows,
                               weight[group:group + 1])
        assert_near(out[group:group + 1][:, :, rows], kernel)
    _, tail = exact_rows(q[-1:], k[-1:], last, weight[-1:])
    assert_near(grad_q[-1:, :, last], tail)
    assert_near(grad_k[-1:], exact_key_gradient(q[-1:, :, last], k[-1:], weight[-1:, :, last]))
    grad_q[-1, :, last] = 0
    assert not grad_q.any() and not grad_k[:-1].any()
