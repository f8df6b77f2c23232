"""Contract of the kernels: every form against the reference, values and gradients."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmlaplacian.ops import gaussian_kernel, laplacian_kernel
from mmlaplacian.ops.laplacian_kernel import reference, torch_impl

PAIRS = [(laplacian_kernel, reference.laplacian_kernel),
         (gaussian_kernel, reference.gaussian_kernel)]
kernels = pytest.mark.parametrize('op, ref', PAIRS, ids=['laplacian', 'gaussian'])
# B, h, N, M, d: ones, primes and sizes around the multiples that tiles like.
SHAPES = [(1, 1, 1, 1, 1), (2, 3, 17, 5, 7), (1, 2, 65, 49, 32), (2, 1, 31, 64, 33),
          (1, 1, 130, 50, 160)]
shapes = pytest.mark.parametrize('shape', SHAPES, ids=str)


PLACES = [pytest.param('cpu', torch.float64, 1e-12, 1e-14, id='cpu-float64'),
          pytest.param('cpu', torch.float32, 1e-4, 1e-6, id='cpu-float32'),
          pytest.param('cuda', torch.float32, 1e-4, 1e-6, id='cuda-float32',
                       marks=pytest.mark.gpu)]


def make_inputs(shape, dtype=torch.float64, scale=0.5, seed=0, device='cpu'):
    batch, heads, n, m, d = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, n, d, generator=generator, dtype=torch.float64) * scale
    k = torch.randn(batch, heads, m, d, generator=generator, dtype=torch.float64) * scale
    return [x.to(device, dtype).requires_grad_() for x in (q, k)]


def assert_near(got, want, rtol, atol):
    """Elementwise; ``atol`` is a fraction of the largest entry."""
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol,
                               atol=atol * want.abs().max().item())


def gradients(function, inputs, weight):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    (function(*leaves) * weight).sum().backward()
    return [x.grad for x in leaves]


@kernels
@shapes
@pytest.mark.parametrize('device, dtype, rtol, atol', PLACES)
def test_values_and_gradients(op, ref, shape, device, dtype, rtol, atol):
    q, k = make_inputs(shape, dtype, device=device)
    out, expected = op(q, k, 4.0), ref(q.double(), k.double(), 4.0)
    assert out.dtype == dtype and out.shape == (*shape[:2], shape[2], shape[3])
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)

    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
    got = gradients(lambda a, b: op(a, b, 4.0), (q, k), weight.to(dtype))
    want = gradients(lambda a, b: ref(a, b, 4.0), (q.double(), k.double()), weight.double())
    for grad, reference_grad in zip(got, want, strict=True):
        assert_near(grad, reference_grad, 10 * rtol, 10 * atol)


@kernels
@pytest.mark.parametrize('kernel_scale', [0.5, 4.0])
def test_gradcheck(op, ref, kernel_scale):
    inputs = make_inputs((2, 2, 5, 3, 4))
    assert torch.autograd.gradcheck(lambda q, k: op(q, k, kernel_scale), inputs)


@shapes
@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
def test_gradient_off_the_cpu_agrees(shape, kernel, monkeypatch):
    """The form for other devices, one channel at a time, is executed here on the CPU."""
    q, k = (x.detach() for x in make_inputs(shape))
    grad = torch.randn(*shape[:2], shape[2], shape[3], dtype=torch.float64)
    gradient = torch_impl._GRADIENTS[kernel]
    for arguments in ((grad, q, k), (grad.mT, k, q)):
        elsewhere = [_Elsewhere(x) for x in arguments]
        torch.testing.assert_close(gradient(*elsewhere), gradient(*arguments), rtol=1e-12,
                                   atol=1e-12)


class _Elsewhere(torch.Tensor):
    """On the CPU, and says that it is not."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device('meta')


@kernels
@pytest.mark.parametrize('far', [1e3, 1e6, 1e20, 1e38])
def test_one_far_token_changes_no_other_gradient(op, ref, far, device):
    """Also where the square of a difference is beyond float32."""
    q, k = (x.detach() for x in make_inputs((1, 2, 9, 7, 5)))
    q[:, :, 2], k[:, :, 3] = -far, far
    inputs = [x.float().to(device).requires_grad_() for x in (q, k)]
    op(*inputs, 2.0).sum().backward()
    expected = gradients(lambda a, b: ref(a, b, 2.0),
                         [x.detach().double().requires_grad_() for x in inputs],
                         torch.ones(1, 2, 9, 7, dtype=torch.float64, device=device))
    for x, want in zip(inputs, expected, strict=True):
        torch.testing.assert_close(x.grad.double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('dtype, rtol, atol', [(torch.float32, 1e-4, 1e-5),
                                               (torch.bfloat16, 2e-2, 2e-2)],
                         ids=['float32', 'bfloat16'])
@pytest.mark.parametrize('d', [16, 20, 32, 33, 64, 72, 80, 96, 128, 160, 256])
def test_b14_every_channel_of_any_head_dim_takes_part(d, dtype, rtol, atol, device):
    q, k = make_inputs((1, 2, 130, 49, d), dtype, scale=4 / d, device=device)
    weight = torch.randn(1, 2, 130, 49, generator=torch.Generator().manual_seed(1))
    weight = weight.to(device, dtype)
    out = laplacian_kernel(q, k, 4.0)
    out.backward(weight)
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    expected = reference.laplacian_kernel(*exact, 4.0)
    expected.backward(weight.double())
    for got, want in [(out, expected), (q.grad, exact[0].grad), (k.grad, exact[1].grad)]:
        assert_near(got.detach(), want.detach(), rtol, atol)


@kernels
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_b09_half_precision_computes_in_float32(op, ref, dtype, device):
    q, k = make_inputs((2, 4, 1024, 49, 32), dtype, device=device)
    out = op(q, k, 4.0)
    out.float().sum().backward()
    assert (out.dtype, q.grad.dtype, k.grad.dtype) == (dtype, ) * 3
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    expected = ref(*exact, 4.0)
    expected.sum().backward()
    # One rounding of the exact result: no error of the sum over channels is left.
    torch.testing.assert_close(out, expected.to(dtype))
    for x, want in zip((q, k), exact, strict=True):
        assert_near(x.grad, want.grad, 2e-2, 2e-2)


@pytest.mark.parametrize('loss', [
    lambda y: y.sum(),
    lambda y: (y.transpose(-1, -2).contiguous()
               * torch.arange(y.shape[-2], device=y.device)).sum(),
    lambda y: y[..., ::2].sum(),
], ids=['expanded', 'transposed', 'strided'])
@kernels
def test_b06_any_strides_of_the_incoming_gradient(op, ref, loss, device, precision):
    dtype, rtol, atol = precision
    inputs = make_inputs((2, 4, 300, 49, 32), dtype, device=device)
    got = _backward(op, inputs, loss)
    want = _backward(ref, [x.double() for x in inputs], loss)
    for x, exact in zip(got, want, strict=True):
        assert_near(x.grad, exact.grad, rtol, atol)


def _backward(function, inputs, loss):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss(function(*leaves, 4.0)).backward()
    return leaves


@kernels
def test_non_contiguous_inputs(op, ref, device, precision):
    dtype, rtol, atol = precision
    q, k = (x.detach() for x in make_inputs((2, 3, 9, 8, 6), dtype, device=device))
    q_t = q.transpose(1, 2).contiguous().transpose(1, 2)
    k_expanded = k[:, :1].expand(-1, 3, -1, -1)
    assert_near(op(q_t, k_expanded, 2.0), ref(q.double(), k_expanded.double(), 2.0), rtol, atol)


@pytest.mark.parametrize('spelling', [
    2.0, 2, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2.),
    torch.nn.Parameter(torch.tensor([2.]))], ids=lambda value: type(value).__name__)
def test_b18_spellings_of_the_scale(spelling, device, precision):
    dtype, rtol, atol = precision
    q, k = make_inputs((1, 1, 16, 4, 8), dtype, device=device)
    if isinstance(spelling, torch.nn.Parameter):
        spelling = torch.nn.Parameter(spelling.detach().to(device))
    out = laplacian_kernel(q, k, spelling)
    assert_near(out, reference.laplacian_kernel(q.double(), k.double(), 2.0), rtol, atol)
    out.sum().backward()
    assert q.grad.abs().sum() > 0
    if isinstance(spelling, torch.Tensor):
        assert spelling.grad is None


@kernels
@pytest.mark.parametrize('kernel_scale', [1e-3, 1e3])
def test_b18_extreme_scales(op, ref, kernel_scale, device, precision):
    dtype, rtol, atol = precision
    q, k = make_inputs((1, 1, 16, 4, 8), dtype, device=device)
    k.data[0, 0, 0] = q.data[0, 0, 0]
    assert_near(op(q, k, kernel_scale), ref(q.double(), k.double(), kernel_scale), rtol, atol)


@kernels
@pytest.mark.parametrize('value, error', [
    (0, ValueError), (-1.0, ValueError), (float('nan'), ValueError), (float('inf'), ValueError),
    ('4', TypeError), (None, TypeError), (True, TypeError), (torch.ones(2), TypeError)],
    ids=repr)
def test_b18_refused_scales(op, ref, value, error):
    q, k = make_inputs((1, 1, 2, 2, 2))
    with pytest.raises(error, match='kernel_scale must be'):
        op(q, k, value)


def test_b20_gradient_at_ties(device):
    q = torch.zeros(1, 1, 1, 1, device=device, requires_grad=True)
    k = torch.tensor([[[[0.], [.5], [-.5]]]], device=device, requires_grad=True)
    near = 0.6065307  # exp(-1/2)
    for column, value, grad in [(0, 1., 0.), (1, near, near), (2, near, -near)]:
        q.grad = k.grad = None
        kernel = laplacian_kernel(q, k, 1.0)
        kernel[0, 0, 0, column].backward()
        assert kernel[0, 0, 0, column].item() == pytest.approx(value)
        assert q.grad.item() == pytest.approx(grad, abs=0 if grad == 0 else 1e-6)
        expected = torch.zeros(3, device=device)
        expected[column] = -grad
        torch.testing.assert_close(k.grad.flatten(), expected)
        assert (k.grad.flatten()[expected == 0] == 0).all()


def test_b20_same_tensor_on_both_sides(device):
    x = make_inputs((1, 2, 49, 49, 32), torch.float32, device=device)[0]
    kernel = laplacian_kernel(x, x, 4.0)
    kernel.square().sum().backward()
    assert torch.equal(kernel, kernel.mT)
    assert (kernel.diagonal(dim1=-2, dim2=-1) == 1).all()
    assert x.grad.isfinite().all()


def test_b20_one_row_repeats_exactly(device):
    grads = set()
    for _ in range(20):
        q = torch.zeros(1, 1, 1, 1, device=device, requires_grad=True)
        k = torch.tensor([[[[.5], [1.]]]], device=device, requires_grad=True)
        laplacian_kernel(q, k, 1.0)[0, 0, 0, 0].backward()
        grads.add(tuple(k.grad.flatten().tolist()))
    (first, second), = grads
    assert first == pytest.approx(-0.6065307) and second == 0


@kernels
@pytest.mark.parametrize('batch, n', [(0, 16), (1, 0)])
def test_b43_empty(op, ref, batch, n, device):
    q = torch.zeros(batch, 2, n, 32, device=device, requires_grad=True)
    k = torch.ones(batch, 2, 4, 32, device=device, requires_grad=True)
    out = op(q, k, 4.0)
    assert out.shape == (batch, 2, n, 4)
    out.sum().backward()
    assert q.grad.shape == q.shape and (k.grad == 0).all()
    # A launch without blocks would show in whatever runs next.
    assert (torch.arange(4, device=device) + 1).tolist() == [1, 2, 3, 4]


def test_far_tokens_underflow_to_zero(device):
    q = torch.full((1, 1, 3, 32), 1e4, device=device, requires_grad=True)
    k = torch.full((1, 1, 2, 32), -1e4, device=device, requires_grad=True)
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
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_b08_autocast_takes_mixed_dtypes(op, ref, dtype, device):
    q, k = make_inputs((1, 2, 30, 16, 32), torch.float32, device=device)
    with torch.autocast(device.type, dtype):
        out = op(q.to(dtype), k, 4.0)
        out.sum().backward()
    assert (out.dtype, q.grad.dtype, k.grad.dtype) == (torch.float32, ) * 3
    expected = ref(q.to(dtype).double(), k.double(), 4.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-6)


def test_gaussian_matrix_of_far_clusters_stays_positive_definite(device):
    """The expanded square would round it to eigenvalues of -7e-2."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(2, 32, generator=generator) * 1000 / 32**0.5
    x = centers[torch.arange(49) % 2] + 1e-3 * torch.randn(49, 32, generator=generator)
    x = x[None, None].to(device)
    w = gaussian_kernel(x, x, 4.0)
    assert torch.equal(w, w.mT) and (w.diagonal(dim1=-2, dim2=-1) == 1).all()
    assert torch.linalg.eigvalsh(w.double()).min() > -1e-4


@kernels
@pytest.mark.parametrize('kernel_scale', [1e30])
def test_scales_at_the_end_of_float32(op, ref, kernel_scale, device):
    q, _ = make_inputs((1, 1, 4, 4, 8), torch.float32, device=device)
    kernel = op(q, q, kernel_scale)
    expected = torch.eye(4) if kernel_scale < 1 else torch.ones(4, 4)
    assert torch.equal(kernel[0, 0].cpu(), expected)


def test_float32_accuracy_of_the_gaussian_far_from_the_origin(device):
    """The expanded square would cancel about a common offset."""
    q, k = (x.detach() + 30 for x in make_inputs((1, 1, 50, 20, 32), scale=0.1, device=device))
    out = gaussian_kernel(q.float(), k.float(), 4.0)
    torch.testing.assert_close(out.double(), reference.gaussian_kernel(q, k, 4.0),
                               rtol=1e-4, atol=1e-6)


class LargestOutput(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return output


@kernels
def test_b21_no_tensor_of_size_n_m_d(op, ref, device):
    """Memory grows as N x M: kept by autograd, and while the plain torch form computes."""
    q, k = make_inputs((1, 1, 500, 49, 32), torch.float32, device=device)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t,
                                                  lambda t: t):
        output = op(q, k, 4.0)
    assert sizes and max(sizes) <= 500 * 49
    kernel = 'gaussian' if op is gaussian_kernel else 'laplacian'
    q, k, output = q.detach(), k.detach(), output.detach()
    with LargestOutput() as largest:
        torch_impl.kernel_matrix(q, k, 4.0, kernel)
        torch_impl.kernel_matrix_backward(torch.ones_like(output), q, k, output, 4.0, kernel,
                                          True, True)
    assert 500 * 49 <= largest.elements < 2 * 500 * 49
