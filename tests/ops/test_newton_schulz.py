"""Contract of the solver: against the exact inverse, values and gradients."""

import pytest
import torch

from mmlaplacian.ops import newton_schulz_inverse
from mmlaplacian.ops.laplacian_kernel import reference as kernels
from mmlaplacian.ops.newton_schulz import default_iters, reference

RIDGE = 1e-2
starts = pytest.mark.parametrize('bound', [RIDGE, None], ids=['spd', 'two-norm'])


def landmark_matrix(m, scale=0.5, batch=1, seed=0, dtype=torch.float64, device='cpu'):
    """W of landmark kernels, ridge included; scale 0 is the flat image."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 1, m, 32, generator=generator, dtype=torch.float64) * scale
    w = kernels.laplacian_kernel(x, x, 4.0)[:, 0] + RIDGE * torch.eye(m, dtype=x.dtype)
    return w.to(device, dtype)


@starts
@pytest.mark.parametrize('m', [1, 2, 16, 49, 64, 130])
@pytest.mark.parametrize('scale', [0, 0.05, 1.0])
def test_values_in_float64(bound, m, scale):
    w = landmark_matrix(m, scale)
    x, residual = newton_schulz_inverse(w, spd_lower_bound=bound, return_residual=True)
    expected = reference.inverse(w)
    assert (x - expected).abs().max() <= 1e-9 * expected.abs().max()
    torch.testing.assert_close(residual, reference.residual(w, x), rtol=0.5, atol=1e-12)


@starts
@pytest.mark.parametrize('scale', [0, 0.05, 1.0])
def test_residual_in_float32(bound, scale, device):
    """1e-4 is about the floor for 49 equal landmarks."""
    w = landmark_matrix(49, scale, dtype=torch.float32, device=device)
    x, residual = newton_schulz_inverse(w, spd_lower_bound=bound, return_residual=True)
    assert residual.item() < 5e-4
    assert residual.item() == pytest.approx(reference.residual(w, x).item(), abs=1e-4)


@starts
@pytest.mark.parametrize('m', [1, 16, 49, 64, 136, 137, 200,
                               pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize('scale', [0, 0.05, 0.5])
def test_values_and_gradients_in_float32(bound, m, scale, device):
    """Sizes about the edges of shared memory and beyond; the error follows the condition."""
    w = landmark_matrix(m, scale, batch=3, dtype=torch.float32, device=device).requires_grad_()
    weight = torch.randn(m, m, generator=torch.Generator().manual_seed(1)).to(device)
    x = newton_schulz_inverse(w, spd_lower_bound=bound)
    (x * weight).sum().backward()
    expected = reference.inverse(w.detach().double())
    grad = -expected.mT @ weight.double() @ expected.mT
    eigenvalues = torch.linalg.eigvalsh(w.detach().double().cpu())
    condition = (eigenvalues[:, -1] / eigenvalues[:, 0]).max().item()
    rounding = (0.2 * condition + 4) * torch.finfo(torch.float32).eps
    assert (x - expected).norm() <= rounding * expected.norm()
    assert (w.grad - grad).norm() <= 2 * rounding * grad.norm()


@starts
def test_gradient(bound):
    w = landmark_matrix(6, batch=2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w: newton_schulz_inverse(w, spd_lower_bound=bound), (w, ))


@starts
def test_gradient_against_reference(bound):
    weight = torch.randn(49, 49, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = []
    for inverse in (lambda w: newton_schulz_inverse(w, spd_lower_bound=bound), reference.inverse):
        w = landmark_matrix(49).requires_grad_()
        (inverse(w) * weight).sum().backward()
        grads.append(w.grad)
    assert (grads[0] - grads[1]).abs().max() <= 1e-9 * grads[1].abs().max()


def test_general_matrices(device, precision):
    dtype, rtol, atol = precision
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 3, 20, 20, generator=generator, dtype=torch.float64)
    w = (w + 10 * torch.eye(20, dtype=torch.float64)).to(device, dtype)
    expected = torch.linalg.inv(w.double())
    torch.testing.assert_close(newton_schulz_inverse(w).double(), expected, rtol=rtol,
                               atol=atol * expected.abs().max().item())


def test_strided_matrices_and_gradient(device):
    """Transposed matrices, an expanded batch, and the zero strides that sum() hands back."""
    generator = torch.Generator().manual_seed(0)
    dense = (torch.randn(20, 20, generator=generator) + 10 * torch.eye(20)).to(device)
    grads = []
    for w in (dense.clone().requires_grad_(), dense.mT.contiguous().requires_grad_()):
        view = w if not grads else w.mT
        newton_schulz_inverse(view.expand(3, 20, 20)).sum().backward()
        grads.append(w.grad)
    exact = dense.double().requires_grad_()
    (3 * torch.linalg.inv(exact)).sum().backward()
    for grad in (grads[0], grads[1].mT):
        torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize('m', [16, 64, 100, 196])
def test_b01_two_norm_start_stays_finite(m, device):
    x = 0.1 * torch.randn(1, 1, m, 32, generator=torch.Generator().manual_seed(0))
    a = kernels.laplacian_kernel(x, x, 4.0)[0, 0].to(device)
    for iters, bound in [(6, 0.3), (20, 1e-3)]:
        v = newton_schulz_inverse(a, solver_iters=iters)
        assert v.isfinite().all()
        assert (a @ v @ a - a).norm() / a.norm() < bound


@starts
def test_b02_inverse_is_independent_of_batch_mates(bound, device):
    w = torch.cat([landmark_matrix(49, 1.0), landmark_matrix(49, 0)]).float().to(device)
    together = newton_schulz_inverse(w, spd_lower_bound=bound)
    for index in range(2):
        alone = newton_schulz_inverse(w[index:index + 1], spd_lower_bound=bound)
        torch.testing.assert_close(together[index:index + 1], alone, rtol=1e-5, atol=1e-4)


@starts
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize('m', [1, 49, 196])
def test_default_iters_are_enough_and_not_two_more(bound, dtype, m):
    """The flat image is the worst case that the count is made for."""
    w = landmark_matrix(m, 0)
    iters = default_iters(m, bound, dtype)
    target = torch.finfo(dtype).eps

    def truncation(count):
        x = newton_schulz_inverse(w, solver_iters=count, spd_lower_bound=bound)
        return reference.residual(w, x).item()

    rounding = 1e-10
    assert truncation(iters) <= 10 * target + rounding
    if bound is not None and dtype == torch.float32:
        assert truncation(iters - 2) > 1e2 * target


def test_default_iters_grow_with_size_and_shrink_with_the_ridge():
    counts = [default_iters(m, RIDGE, torch.float32) for m in (1, 49, 196, 1000)]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert default_iters(49, 1e-1, torch.float32) < default_iters(49, 1e-3, torch.float32)
    assert default_iters(49, None, torch.float32) > default_iters(49, RIDGE, torch.float32)


@pytest.mark.parametrize('m', [15, 150])
def test_nan_stays_in_its_matrix(m, device):
    w = landmark_matrix(m, batch=2, dtype=torch.float32, device=device)
    w[0, 0, 0] = float('nan')
    x = newton_schulz_inverse(w, spd_lower_bound=RIDGE)
    assert x[0].isnan().any() and x[1].isfinite().all()


def test_half_precision_and_empty_batch(device):
    w = landmark_matrix(16, dtype=torch.bfloat16, device=device)
    x, residual = newton_schulz_inverse(w, spd_lower_bound=RIDGE, return_residual=True)
    assert x.dtype == torch.bfloat16 and residual.dtype == torch.float32
    assert residual.item() < 1e-4
    empty = torch.zeros(0, 3, 5, 5, device=device, requires_grad=True)
    x, residual = newton_schulz_inverse(empty, return_residual=True)
    x.sum().backward()
    assert (x.shape, residual.shape, empty.grad.shape) == ((0, 3, 5, 5), (0, 3), (0, 3, 5, 5))


@pytest.mark.parametrize('w, options, error, message', [
    (torch.zeros(2, 3), {}, ValueError, r'\(\.\.\., M, M\).*\(2, 3\)'),
    (torch.zeros(3), {}, ValueError, r'\(3,\)'),
    (torch.zeros(0, 0), {}, ValueError, 'M >= 1'),
    (torch.eye(3, dtype=torch.int64), {}, TypeError, 'torch.int64'),
    ([[1.]], {}, TypeError, 'list'),
    (torch.eye(3), dict(solver_iters=0), ValueError, 'solver_iters must be an integer >= 1'),
    (torch.eye(3), dict(solver_iters=2.5), TypeError, '2.5'),
    (torch.eye(3), dict(spd_lower_bound=-1), ValueError, 'spd_lower_bound'),
    (torch.eye(3), dict(spd_lower_bound=0), ValueError, 'spd_lower_bound'),
])
def test_refused_inputs(w, options, error, message):
    with pytest.raises(error, match=message):
        newton_schulz_inverse(w, **options)
