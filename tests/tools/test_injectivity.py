"""``tools/analysis/injectivity.py``: which rows of g and Z are equal."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mmlaplacian.ops.laplacian_kernel import reference as kernels
from mmlaplacian.ops.nystrom_attention import reference as attention

ANALYSIS = Path(__file__).resolve().parents[2] / 'tools' / 'analysis'


@pytest.fixture(scope='module')
def injectivity(tool: Callable[[str], ModuleType]) -> ModuleType:
    if str(ANALYSIS) not in sys.path:
        sys.path.append(str(ANALYSIS))
    return tool('analysis/injectivity')


@pytest.fixture(scope='module')
def numbers(injectivity: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Rows of a fast run."""
    out = tmp_path_factory.mktemp('fast')
    assert injectivity.CLAIM.run(['--fast', '--out', str(out)]) == 0
    assert 'grace_hopper.jpg' in (out / 'injectivity.md').read_text(encoding='utf-8')
    with (out / 'injectivity.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    text = ('layer', 'map')
    return [{key: value if key in text else float(value) for key, value in row.items()}
            for row in rows]


def random_layer(injectivity: ModuleType):
    """16 tokens, queries and keys in [0, 1], two heads of 4 channels; multiples of 1/64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randint(64, (3, 1, 2, 16, 4), generator=generator) / 64
    return injectivity.AttentionInputs('stages.0.blocks.0.attn', (4, 4), q, k, v, k)


def dense(q, k, landmarks, normalize):
    """G, or N Z - 1."""
    g = attention.similarity(*(x.double() for x in (q, k, landmarks)), 4.0, 1e-2, 'laplacian')
    if normalize == 'none':
        return g
    return (g - g.mean(-2, keepdim=True)) / (g.var(-2, correction=0, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize('normalize', ['none', 'whiten'])
def test_rows_have_the_geometry_of_the_dense_map(injectivity: ModuleType, normalize: str) -> None:
    layer = random_layer(injectivity)
    landmarks = injectivity.pooled(layer, 2)
    queries = torch.cat((layer.q, layer.q / 2), 2)
    rows = injectivity.feature_rows(queries, layer.k, landmarks, normalize)
    expected = dense(queries, layer.k, landmarks, normalize)
    assert rows.shape == (1, 2, 32, 4) and expected.shape == (1, 2, 32, 16)
    torch.testing.assert_close(rows @ rows.mT, expected @ expected.mT)
    one_map = injectivity.op_map(layer, landmarks, normalize).double()
    n_z = 16 * one_map if normalize == 'none' else 16 * one_map - 1
    torch.testing.assert_close(n_z, dense(layer.q, layer.k, landmarks, normalize), rtol=1e-3,
                               atol=1e-4)


def test_distances_of_all_pairs(injectivity: ModuleType) -> None:
    rows = torch.randn(300, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread = (rows - rows.mean(0)).square().sum(1).mean().sqrt()
    pairs = torch.pdist(rows)
    smallest, near = injectivity.distances(rows)
    assert near == 0 and smallest == pytest.approx((pairs.min() / spread).item())
    # Both of a pair in one chunk, and in two; the last apart by twice what counts.
    for one, other, apart in ((3, 7, 0), (299, 5, 5e-7), (298, 2, 2e-6)):
        rows[one] = rows[other] + torch.tensor([apart * spread, 0, 0])
    assert injectivity.distances(rows) == (0, 2)


def test_collisions_are_counted(injectivity: ModuleType) -> None:
    layer = random_layer(injectivity)
    # Of the first head: two equal queries, and two with one signed sum outside the keys' box.
    layer.q[0, 0, 1] = layer.q[0, 0, 0]
    layer.q[0, 0, 3] = layer.q[0, 0, 2] = torch.tensor([2., -1., .5, .25])
    layer.q[0, 0, 3, :2] += torch.tensor([.5, .5])
    for normalize in injectivity.MAPS:
        found = injectivity.rows_of_map(layer, 2, normalize)
        assert found['distinct_queries'] == 31 and found['near_pairs'] == 1
        assert found['smallest_distance'] < 1e-12
        assert found['distinct_rows_float32'] == 30
        singular = torch.linalg.svdvals(dense(layer.q, layer.k, injectivity.pooled(layer, 2),
                                              normalize)[0])
        assert found['rank_float32'] == 4
        assert found['condition'] == pytest.approx((singular[:, 0] / singular[:, 3]).max().item())


def test_rank_is_that_of_the_jacobian(injectivity: ModuleType) -> None:
    layer = random_layer(injectivity)
    # Between the multiples of 1/64: no ties.
    q, landmarks = layer.q.double() + 1 / 1000, injectivity.pooled(layer, 4).double()
    ranks = injectivity.local_rank(q, landmarks)
    p = torch.linalg.inv(kernels.laplacian_kernel(landmarks, landmarks, 4.0)
                         + 1e-2 * torch.eye(16))
    c_k = kernels.laplacian_kernel(layer.k.double(), landmarks, 4.0)
    for head, token in ((0, 0), (0, 5), (1, 3), (1, 11)):
        def g(x, head=head):
            c_q = kernels.laplacian_kernel(x[None, None, None], landmarks[:, head:head + 1], 4.0)
            return (c_q @ p[:, head:head + 1] @ c_k[:, head:head + 1].mT).flatten()

        jacobian = torch.autograd.functional.jacobian(g, q[0, head, token])
        assert ranks[0, head, token] == torch.linalg.matrix_rank(jacobian, rtol=1e-9)
    # Outside in both of two channels: one slope for the two.
    far = torch.tensor([9., -9., .5, .51], dtype=torch.float64).expand(1, 2, 1, 4)
    assert injectivity.local_rank(far, landmarks).max() <= 3
    assert injectivity.outside_box(far, landmarks).gt(0).sum(-1).tolist() == [[[2], [2]]]


def test_doubles_keep_every_distance(injectivity: ModuleType) -> None:
    layer = random_layer(injectivity)
    q, landmarks = layer.q.double() * 1.25 - 0.125, injectivity.pooled(layer, 4).double()
    l1 = torch.cdist(q, landmarks, p=1.0)
    for balanced in (True, False):
        other, differs = injectivity.doubles(q, landmarks, balanced)
        outside = (injectivity.outside_box(q, landmarks) > 0).sum(-1)
        assert torch.equal(differs, outside >= 2) and 0 < differs.sum() < differs.numel()
        assert torch.equal((other != q).any(-1), differs)
        kept = (torch.cdist(other, landmarks, p=1.0) - l1).abs().amax(-1) < 1e-12
        assert kept[differs].all() if balanced else not kept[differs].any()


def test_fast_run(injectivity: ModuleType, numbers: list[dict]) -> None:
    # 16 x 16 and 8 x 8 tokens take both grids, 4 x 4 and 2 x 2 the small one.
    assert [(row['stage'], row['landmarks']) for row in numbers[::2]] == [
        (1, 4), (1, 49), (2, 4), (2, 49), (3, 4), (4, 4)]
    for row in numbers:
        assert row['distinct_rows_float32'] <= row['distinct_queries'] <= row['tokens']
        assert row['rank_float32'] <= row['landmarks'] and row['condition'] >= 1
        assert row['balanced_change'] < 1e-12
        # Four landmarks cannot tell all directions of 32 channels apart.
        assert row['landmarks'] > 4 or row['locally_injective'] == 0
        assert row['outside_in_two'] <= min(1, row['outside_channels'] / 2)


def test_words_follow_the_numbers(injectivity: ModuleType, numbers: list[dict]) -> None:
    def verdicts(**changes: float) -> list[str]:
        text = injectivity.describe([{**row, **changes} for row in numbers], '')
        return [part.split('**')[0] for part in text.split(' **')[1:]]

    yes, no, some = 'holds', 'does not hold here', 'holds in part'
    assert verdicts() == [some, yes, yes, no]
    assert verdicts(locally_injective=1.0) == [yes, yes, yes, yes]
    assert verdicts(near_pairs=1) == [some, yes, no, no]
    assert verdicts(distinct_rows_float32=0) == [some, yes, no, no]
    assert verdicts(balanced_change=1e-3, near_pairs=1) == [no, no, no, no]
    only_z = [{**row, 'near_pairs': int(row['map'] == 'Z')} for row in numbers]
    assert injectivity.describe(only_z, '').startswith('The claim **does not hold here**')
