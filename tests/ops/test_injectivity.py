"""What the attention can tell apart: rows of Z are equal exactly where rows of g are."""

import pytest
import torch

from mmlaplacian.ops import nystrom_attention
from mmlaplacian.ops.nystrom_attention import reference

OPTIONS = dict(kernel_scale=4.0, ridge=1e-2, whiten_eps=1e-5)
seeds = pytest.mark.parametrize('seed', range(5))


def equal_rows(x):
    """``(..., n, m)`` to ``(..., n, n)``: whether two rows are equal in every bit."""
    return (x[..., :, None, :] == x[..., None, :, :]).all(-1)


def repeated(n, generator, *lead, d):
    """Rows of which about half are copies of another, ``(*lead, n, d)``."""
    rows = torch.randn(*lead, n, d, generator=generator, dtype=torch.float64)
    return rows[..., torch.randint(n // 2, (n, ), generator=generator), :]


@seeds
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_whitening_adds_and_removes_no_collision(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that rows also agree in many columns without being equal.
    g = torch.randint(3, (40, 40), generator=generator).to(dtype)
    g = g[torch.randint(20, (40, ), generator=generator)]
    # Columns of zero variance, and one row that a single column tells from its copy, by a
    # difference far below whiten_eps.
    g[:, ::3] = 1
    g[1] = g[0]
    g[:, 2] = 0
    g[1, 2] = 1e-4
    z = reference.attention_map(g, OPTIONS['whiten_eps'], 'whiten')
    equal = equal_rows(g)
    assert equal.sum() > 2 * 40 and not equal[0, 1]
    assert torch.equal(equal_rows(z), equal)


def test_a_flat_g_gives_a_flat_map():
    g = torch.full((9, 9), 0.3, dtype=torch.float64)
    z = reference.attention_map(g, OPTIONS['whiten_eps'], 'whiten')
    # Its mean may differ from 0.3 by a rounding, which the scale multiplies.
    torch.testing.assert_close(z, torch.full_like(z, 1 / 9), rtol=1e-12, atol=0)
    assert equal_rows(z).all()


@seeds
@pytest.mark.parametrize('normalize', ['whiten', 'none'])
@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
def test_output_tells_queries_apart_as_the_dense_map_does(seed, normalize, kernel):
    """With V = I the output is the map."""
    generator = torch.Generator().manual_seed(seed)
    q = repeated(24, generator, 1, 2, d=8) / 2
    k, landmarks = (torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64) / 2
                    for n in (24, 9))
    # Keys far from all queries: columns of g of zero variance.
    k[:, :, :3] = 1e4
    identity = torch.eye(24, dtype=torch.float64).expand(1, 2, -1, -1)
    rows = nystrom_attention(q, k, identity, landmarks, kernel=kernel, normalize=normalize,
                             **OPTIONS)
    g = reference.similarity(q, k, landmarks, 4.0, 1e-2, kernel)
    assert (g[..., :3] == 0).all()
    distance, scale = torch.cdist(rows, rows), rows.norm(dim=-1).amax()
    equal = equal_rows(q)
    assert equal.sum() > 2 * 2 * 24
    assert distance[equal].max() <= 1e-10 * scale
    assert distance[~equal].min() >= 1e-4 * scale


@pytest.mark.parametrize('normalize', ['whiten', 'row', 'none'])
def test_two_channels_outside_the_landmarks_count_by_their_signed_sum(normalize):
    """g itself collides: the only promise is that the normalised map adds no collision."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.rand(2, 1, 1, 16, 8, generator=generator, dtype=torch.float64)
    landmarks = k[:, :, :4]
    # Landmarks lie in [0, 1]. Above in channel 0 and below in channel 1: q0 - q1 counts.
    q[0, 0, 1:] = q[0, 0, 0]
    q[..., 0], q[..., 1] = 2.5, -1.5
    q[0, 0, 1, :2] += 0.25
    q[0, 0, 2, :2] += torch.tensor([0.25, -0.25])
    identity = torch.eye(16, dtype=torch.float64).expand(1, 1, -1, -1)
    rows = nystrom_attention(q, k, identity, landmarks, normalize=normalize, **OPTIONS)[0, 0]
    scale = rows.norm(dim=-1).amax()
    assert (rows[1] - rows[0]).norm() <= 1e-12 * scale
    # Both outwards: g times a constant, which only a division by its sum loses.
    apart = (rows[2] - rows[0]).norm() / scale
    assert apart <= 1e-12 if normalize == 'row' else apart >= 1e-3
