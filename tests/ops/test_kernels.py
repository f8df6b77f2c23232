"""Contract of the kernels: every form against the reference, values and gradients."""

import numpy as np
import pytest
import torch

from mmlaplacian.ops import gaussian_kernel, laplacian_kernel
from mmlaplacian.ops.laplacian_kernel import reference, torch_impl

PAIRS = [(laplacian_kernel, reference.laplacian_kernel),
         (gaussian_kernel, reference.gaussian_kernel)]
kernels = pytest.mark.parametrize('op, ref', PAIRS, ids=['laplacian', 'gaussian'])
# B, h, N, M, d: ones, primes and sizes around the multiples that tiles like.
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 17, 5, 7), (1, 2, 65, 49, 32), (2, 1, 31, 64, 33),
          (1, 1, 130, 50, 160)]
shapes = pytest.mark.parametrize('shape', SHAPES, ids=str)


def make_inputs(shape, dtype=torch.float64, scale=0.5, seed=0):
    batch, heads, n, m, d = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, n, d, generator=generator, dtype=torch.float64) * scale
    k = torch.randn(batch, heads, m, d, generator=generator, dtype=torch.float64) * scale
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_()


def gradients(function, inputs, weight):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    (function(*leaves) * weight).sum().backward()
    return [x.grad for x in leaves]


@kernels
@shapes
@pytest.mark.parametrize('dtype, rtol, atol', [(torch.float64, 1e-12, 1e-14),
                                               (torch.float32, 1e-4, 1e-6)],
                         ids=['float64', 'float32'])
def test_values_and_gradients(op, ref, shape, dtype, rtol, atol):
    q, k = make_inputs(shape, dtype)
    out, expected = op(q, k, 4.0), ref(q.double(), k.double(), 4.0)
    assert out.dtype == dtype and out.shape == (*shape[:2], shape[2], shape[3])
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)

    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    got = gradients(lambda a, b: op(a, b, 4.0), (q, k), weight.to(dtype))
    want = gradients(lambda a, b: ref(a, b, 4.0), (q.double(), k.double()), weight.double())
    for grad, reference_grad in zip(got, want, strict=True):
        torch.testing.assert_close(grad.double(), reference_grad, rtol=1e2 * rtol, atol=1e1 * atol)


@kernels
@pytest.mark.parametrize('kernel_scale', [0.5, 4.0])
def test_gradcheck(op, ref, kernel_scale):
    inputs = make_inputs((2, 2, 5, 3, 4))
    assert torch.autograd.gradcheck(lambda q, k: op(q, k, kernel_scale), inputs)


@shapes
def test_gradient_off_the_cpu_agrees(shape):
    """The form for other devices, one channel at a time, is executed here on the CPU."""
    q, k = (x.detach() for x in make_inputs(shape))
    grad = torch.randn(*shape[:2], shape[2], shape[3], dtype=torch.float64)
    expected = torch_impl._l1_gradients(grad, q, k)
    for got, want in zip(torch_impl._l1_gradients_by_channel(grad, q, k), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@kernels
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_b09_half_precision_computes_in_float32(op, ref, dtype):
    q, k = make_inputs((2, 4, 64, 49, 32), dtype)
    out = op(q, k, 4.0)
    out.float().sum().backward()
    assert (out.dtype, q.grad.dtype, k.grad.dtype) == (dtype, ) * 3
    # One rounding of the exact result: no error of the sum over channels is left.
    torch.testing.assert_close(out, ref(q.double(), k.double(), 4.0).to(dtype))


@pytest.mark.parametrize('loss', [
    lambda y: y.sum(),
    lambda y: (y.transpose(-1, -2).contiguous() * torch.arange(y.shape[-2])).sum(),
    lambda y: y[..., ::2].sum(),
], ids=['expanded', 'transposed', 'strided'])
@kernels
def test_b06_any_strides_of_the_incoming_gradient(op, ref, loss):
    inputs = make_inputs((2, 4, 30, 49, 32))
    got, want = ([x.grad for x in leaves] for leaves in (
        _backward(op, inputs, loss), _backward(ref, inputs, loss)))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def _backward(function, inputs, loss):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss(function(*leaves, 4.0)).backward()
    return leaves


@kernels
def test_non_contiguous_inputs(op, ref):
    q, k = (x.detach() for x in make_inputs((2, 3, 9, 8, 6)))
    q_t = q.transpose(1, 2).contiguous().transpose(1, 2)
    k_expanded = k[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(op(q_t, k_expanded, 2.0), ref(q, k_expanded, 2.0))


@pytest.mark.parametrize('spelling', [
    2.0, 2, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2.),
    torch.nn.Parameter(torch.tensor([2.]))], ids=lambda value: type(value).__name__)
def test_b18_spellings_of_the_scale(spelling):
    q, k = make_inputs((1, 1, 16, 4, 8))
    out = laplacian_kernel(q, k, spelling)
    torch.testing.assert_close(out, reference.laplacian_kernel(q, k, 2.0))
    out.sum().backward()
    assert q.grad.abs().sum() > 0
    if isinstance(spelling, torch.Tensor):
        assert spelling.grad is None


@kernels
@pytest.mark.parametrize('kernel_scale', [1e-3, 1e3])
def test_b18_extreme_scales(op, ref, kernel_scale):
    q, k = make_inputs((1, 1, 16, 4, 8))
    torch.testing.assert_close(op(q, k, kernel_scale), ref(q, k, kernel_scale))


@kernels
@pytest.mark.parametrize('value, error', [
    (0, ValueError), (-1.0, ValueError), (float('nan'), ValueError), (float('inf'), ValueError),
    ('4', TypeError), (None, TypeError), (True, TypeError), (torch.ones(2), TypeError)],
    ids=repr)
def test_b18_refused_scales(op, ref, value, error):
    q, k = make_inputs((1, 1, 2, 2, 2))
    with pytest.raises(error, match='kernel_scale must be'):
        op(q, k, value)


def test_b20_gradient_at_ties():
    q = torch.zeros(1, 1, 1, 1, requires_grad=True)
    k = torch.tensor([[[[0.], [.5], [-.5]]]], requires_grad=True)
    near = 0.6065307  # exp(-1/2)
    for column, value, grad in [(0, 1., 0.), (1, near, near), (2, near, -near)]:
        q.grad = k.grad = None
        kernel = laplacian_kernel(q, k, 1.0)
        kernel[0, 0, 0, column].backward()
        assert kernel[0, 0, 0, column].item() == pytest.approx(value)
        assert q.grad.item() == pytest.approx(grad, abs=0 if grad == 0 else 1e-6)
        expected = torch.zeros(3)
        expected[column] = -grad
        torch.testing.assert_close(k.grad.flatten(), expected)
        assert (k.grad.flatten()[expected == 0] == 0).all()


def test_b20_same_tensor_on_both_sides():
    x = make_inputs((1, 2, 49, 49, 32), torch.float32)[0]
    kernel = laplacian_kernel(x, x, 4.0)
    kernel.square().sum().backward()
    assert torch.equal(kernel, kernel.mT)
    assert (kernel.diagonal(dim1=-2, dim2=-1) == 1).all()
    assert x.grad.isfinite().all()


def test_b20_one_row_repeats_exactly():
    grads = set()
    for _ in range(20):
        q = torch.zeros(1, 1, 1, 1, requires_grad=True)
        k = torch.tensor([[[[.5], [1.]]]], requires_grad=True)
        laplacian_kernel(q, k, 1.0)[0, 0, 0, 0].backward()
        grads.add(tuple(k.grad.flatten().tolist()))
    (first, second), = grads
    assert first == pytest.approx(-0.6065307) and second == 0


@kernels
@pytest.mark.parametrize('batch, n', [(0, 16), (1, 0)])
def test_b43_empty(op, ref, batch, n):
    q = torch.zeros(batch, 2, n, 32, requires_grad=True)
    k = torch.ones(batch, 2, 4, 32, requires_grad=True)
    out = op(q, k, 4.0)
    assert out.shape == (batch, 2, n, 4)
    out.sum().backward()
    assert q.grad.shape == q.shape and (k.grad == 0).all()


def test_far_tokens_underflow_to_zero():
    q = torch.full((1, 1, 3, 32), 1e4, requires_grad=True)
    k = torch.full((1, 1, 2, 32), -1e4, requires_grad=True)
    out = laplacian_kernel(q, k, 4.0)
    out.sum().backward()
    assert (out == 0).all() and (q.grad == 0).all() and (k.grad == 0).all()


@pytest.mark.parametrize('arguments, error, message', [
    ((torch.zeros(2, 3, 4), torch.zeros(1, 1, 3, 4)), ValueError, r'q must have shape .* \(2, 3'),
    ((torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 5)), ValueError, 'agree in d'),
    ((torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 3, 4)), ValueError, 'agree in B, h'),
    ((torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 0, 4)), ValueError, 'at least one token'),
    ((torch.zeros(1, 1, 3, 0), torch.zeros(1, 1, 3, 0)), ValueError, 'd must be at least 1'),
    ((torch.zeros(1, 1, 3, 4, dtype=torch.int64), torch.zeros(1, 1, 3, 4)), TypeError,
     'torch.int64'),
    ((torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4, dtype=torch.float64)), TypeError,
     'one dtype'),
    ((torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4, device='meta')), ValueError, 'one device'),
    (([[1.]], torch.zeros(1, 1, 3, 4)), TypeError, 'q must be a tensor'),
], ids=lambda value: value if isinstance(value, str) else '')
@kernels
def test_refused_inputs(op, ref, arguments, error, message):
    with pytest.raises(error, match=message):
        op(*arguments, 4.0)


@kernels
def test_b08_autocast_takes_mixed_dtypes(op, ref):
    q, k = make_inputs((1, 2, 30, 16, 32), torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        out = op(q.bfloat16(), k, 4.0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, ref(q.bfloat16().float(), k, 4.0), rtol=1e-5, atol=1e-6)


def test_gaussian_matrix_of_far_clusters_stays_positive_definite():
    """The expanded square would round it to eigenvalues of -7e-2."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(2, 32, generator=generator) * 1000 / 32**0.5
    x = centers[torch.arange(49) % 2] + 1e-3 * torch.randn(49, 32, generator=generator)
    w = gaussian_kernel(x[None, None], x[None, None], 4.0)
    assert torch.equal(w, w.mT) and (w.diagonal(dim1=-2, dim2=-1) == 1).all()
    assert torch.linalg.eigvalsh(w.double()).min() > -1e-4


@kernels
@pytest.mark.parametrize('kernel_scale', [1e-40, 1e30])
def test_scales_at_the_end_of_float32(op, ref, kernel_scale):
    q, _ = make_inputs((1, 1, 4, 4, 8), torch.float32)
    kernel = op(q, q, kernel_scale)
    expected = torch.eye(4) if kernel_scale < 1 else torch.ones(4, 4)
    assert torch.equal(kernel[0, 0], expected)


def test_float32_accuracy_of_the_gaussian_far_from_the_origin():
    """The expanded square would cancel about a common offset."""
    q, k = (x.detach() + 30 for x in make_inputs((1, 1, 50, 20, 32), scale=0.1))
    out = gaussian_kernel(q.float(), k.float(), 4.0)
    torch.testing.assert_close(out.double(), reference.gaussian_kernel(q, k, 4.0),
                               rtol=1e-4, atol=1e-6)


@kernels
def test_no_tensor_of_size_n_m_d(op, ref):
    """B21: memory grows as N x M. The largest tensor that autograd keeps is the result."""
    q, k = make_inputs((1, 1, 500, 49, 32), torch.float32)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t,
                                                  lambda t: t):
        op(q, k, 4.0)
    assert sizes and max(sizes) <= 500 * 49
