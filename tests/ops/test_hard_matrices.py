"""The solver on matrices without a good inverse; attention where the kernel says nothing."""

import pytest
import torch

from mmlaplacian.ops import newton_schulz_inverse, nystrom_attention
from mmlaplacian.ops.newton_schulz import reference

IDENTITY = torch.eye(20, dtype=torch.float64)
ONES = torch.ones(20, 20, dtype=torch.float64)


def inverse(w, device, **options):
    """Inverses and residuals of matrices, each also solved alone with the same bits."""
    w = w.float().to(device)
    x, residual = newton_schulz_inverse(w, return_residual=True, **options)
    for index in range(len(w)):
        alone = newton_schulz_inverse(w[index:index + 1], **options)
        assert torch.equal(alone[0].isfinite(), x[index].isfinite())
    return x, residual


@pytest.mark.parametrize('w', [0 * ONES, ONES, torch.diag(torch.arange(20.).double())],
                         ids=['zero', 'rank one', 'one eigenvalue zero'])
def test_singular_matrices_show_in_the_residual(device, w):
    x, residual = inverse(torch.stack([w, IDENTITY]), device)
    assert not residual[0] < 0.1
    assert residual[1] < 1e-5 and x[1].isfinite().all()


@pytest.mark.parametrize('factor', [1e-30, 1e-10, 1e10, 1e18])
def test_tiny_and_huge_matrices(device, factor):
    w = (IDENTITY + 0.5 * ONES / 20)[None]
    x, residual = inverse(factor * w, device)
    assert residual.item() < 1e-4
    torch.testing.assert_close(x.double().cpu() * factor, torch.linalg.inv(w), rtol=1e-4,
                               atol=1e-5)


def test_negative_definite_matrices_have_an_inverse_without_a_bound(device):
    w = -(IDENTITY + 0.5 * ONES / 20)[None]
    x, residual = inverse(w, device)
    assert residual.item() < 1e-4
    torch.testing.assert_close(x.double().cpu(), reference.inverse(w), rtol=1e-4, atol=1e-5)


def test_a_wrong_bound_shows_in_the_residual(device):
    w = torch.stack([-IDENTITY, IDENTITY])
    _, residual = inverse(w, device, spd_lower_bound=1e-2)
    assert not residual[0] < 1 and residual[1] < 1e-4


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_what_is_not_finite_stays_in_its_matrix(device, value):
    w = torch.stack([IDENTITY, IDENTITY, IDENTITY])
    w[1, 3, 4] = value
    x, residual = inverse(w, device)
    assert not residual[1] < 1
    assert x[[0, 2]].isfinite().all() and (residual[[0, 2]] < 1e-4).all()


@pytest.mark.parametrize('normalize', ['whiten', 'row', 'none'])
@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
@pytest.mark.parametrize('case', ['equal landmarks', 'no similarity', 'one token', 'all equal'])
def test_attention_where_the_kernel_says_nothing(device, case, kernel, normalize):
    generator = torch.Generator().manual_seed(0)
    tokens = 1 if case == 'one token' else 50
    q, k, v = (torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(3))
    landmarks = torch.randn(1, 2, 9, 16, generator=generator)
    if case == 'equal landmarks':
        landmarks = landmarks[:, :, :1].expand(1, 2, 9, 16)
    elif case == 'no similarity':
        landmarks = landmarks + 1e4
    elif case == 'all equal':
        q, k, landmarks = (0 * x + 0.3 for x in (q, k, landmarks))
    leaves = [x.to(device).clone().requires_grad_() for x in (q, k, v, landmarks)]
    out = nystrom_attention(*leaves, kernel=kernel, normalize=normalize)
    out.sum().backward()
    for x in (out, *(leaf.grad for leaf in leaves)):
        assert x.isfinite().all()
    if normalize == 'whiten' and case == 'no similarity':
        # Rows of equal weight: the mean of v.
        torch.testing.assert_close(out, leaves[2].mean(2, keepdim=True).expand_as(out))
