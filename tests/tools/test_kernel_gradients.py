"""``tools/analysis/kernel_gradients.py``: gradients, attention mass and outliers, two kernels."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mmlaplacian.ops.laplacian_kernel import reference as kernels
from mmlaplacian.ops.nystrom_attention import reference as attention

ANALYSIS = Path(__file__).resolve().parents[2] / 'tools' / 'analysis'
FORMULAS = {'laplacian': kernels.laplacian_kernel, 'gaussian': kernels.gaussian_kernel}


@pytest.fixture(scope='module')
def gradients(tool: Callable[[str], ModuleType]) -> ModuleType:
    if str(ANALYSIS) not in sys.path:
        sys.path.append(str(ANALYSIS))
    return tool('analysis/kernel_gradients')


@pytest.fixture(scope='module')
def numbers(gradients: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Rows of a fast run."""
    out = tmp_path_factory.mktemp('fast')
    assert gradients.CLAIM.run(['--fast', '--out', str(out)]) == 0
    assert 'grace_hopper.jpg' in (out / 'kernel_gradients.md').read_text(encoding='utf-8')
    with (out / 'kernel_gradients.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for key in ('x', 'value', 'scale', 'closed_form'):
            row[key] = float(row[key]) if row[key] else ''
    return rows


def random_layer(gradients: ModuleType, side: int = 9):
    """A layer of 81 tokens."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, side**2, 32, generator=generator, dtype=torch.float64) / 4
    layer = gradients.AttentionInputs('random', (side, side), q, k, v, k)
    return gradients.with_outlier(layer, 0, torch.zeros(32))


def test_gradients_are_slopes_of_the_kernels(numbers: list[dict]) -> None:
    rows = [row for row in numbers if row['part'] == 'gradient']
    assert {row['input'] for row in rows} == {'op, float32', 'op, float64'}
    for row in rows:
        if row['x'] == 0:
            assert row['value'] == row['closed_form'] == 0
            continue
        assert row['value'] == pytest.approx(row['closed_form'], rel=1e-4, abs=1e-30)
        if row['x'] < 1e-3:
            limit = math.sqrt(32) / 4 if row['kernel'] == 'laplacian' else row['x'] / row['scale']
            assert row['closed_form'] == pytest.approx(limit, rel=1e-2)
            continue
        # k falls fastest along u, and all channels move alike: the norm is the slope along u.
        x = torch.full((1, 1, 1, 32), row['x'] / math.sqrt(32), dtype=torch.float64)
        step = 1e-3 * row['x']
        ends = [FORMULAS[row['kernel']](x * (1 + sign * step / row['x']), 0 * x, row['scale'])
                for sign in (-1, 1)]
        slope = (ends[0] - ends[1]).item() / (2 * step)
        assert row['closed_form'] == pytest.approx(slope, rel=1e-3, abs=1e-9)


def test_scales_match_what_they_say(gradients: ModuleType) -> None:
    layer = random_layer(gradients)
    laplacian = kernels.laplacian_kernel(layer.q, layer.k, 4.0)
    median, entropy = (kernels.gaussian_kernel(
        layer.q, layer.k, gradients.matched_scale(layer.q, layer.k, match))
        for match in (gradients.MEDIAN, gradients.ENTROPY))
    # An even number of pairs: the two middle ones count as one.
    assert median.median().item() == pytest.approx(laplacian.median().item(), rel=1e-3)

    def effective_keys(values: torch.Tensor) -> float:
        p = values / values.sum(-1, keepdim=True)
        return -(p * p.log()).sum(-1).mean().item()

    assert effective_keys(entropy) == pytest.approx(effective_keys(laplacian), rel=1e-6)
    assert effective_keys(median) != pytest.approx(effective_keys(laplacian), rel=1e-4)


@pytest.mark.parametrize('kernel', FORMULAS)
def test_mass_goes_by_distance(gradients: ModuleType, kernel: str) -> None:
    layer = random_layer(gradients, 10)
    found = gradients.mass_by_decile(kernel, layer.q, layer.k, 0.5)
    difference = layer.q[..., :, None, :] - layer.k[..., None, :, :]
    distance = difference.abs().sum(-1) if kernel == 'laplacian' else difference.norm(dim=-1)
    values = FORMULAS[kernel](layer.q, layer.k, 0.5).gather(-1, distance.argsort(-1))
    shares = values.unflatten(-1, (10, 10)).sum(-1) / values.sum(-1, keepdim=True)
    assert found == pytest.approx(shares.mean((0, 1, 2)).tolist())
    # A kernel without reach in sight attends to all alike.
    assert gradients.mass_by_decile(kernel, layer.q, layer.k, 1e9) == pytest.approx([0.1] * 10)


def test_mass_of_the_fast_run(gradients: ModuleType, numbers: list[dict]) -> None:
    inputs = {f'stage {stage}' for stage in range(1, 5)} | {gradients.HEAVY}
    for kernel, match in (('laplacian', ''), ('gaussian', gradients.MEDIAN),
                          ('gaussian', gradients.ENTROPY)):
        assert set(gradients.middle_mass(numbers, kernel, match)) == inputs
        for name in inputs:
            shares = list(gradients._values(numbers, part='mass', kernel=kernel, match=match,
                                            input=name).values())
            assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize('kernel', FORMULAS)
def test_influence_is_that_in_the_dense_map(gradients: ModuleType, kernel: str) -> None:
    layer, token = random_layer(gradients), 40
    shift = torch.ones(32, dtype=torch.float64)
    moved = gradients.with_outlier(layer, token, shift)
    for before, after in ((layer.q, moved.q), (layer.k, moved.k)):
        assert (after - before).any(-1).nonzero()[:, 2].unique().tolist() == [token]
    # 9 x 9 tokens in 7 x 7 cells: the middle token is alone in no cell, and in the middle one.
    cells = (moved.landmarks - layer.landmarks).abs().sum(-1)[0, 0]
    assert cells.argmax() == 24

    outputs, maps = [], []
    for one in (layer, moved):
        g = attention.similarity(one.q, one.k, one.landmarks, 2.0, 1e-2, kernel)
        maps.append(g)
        outputs.append(attention.attention_map(g, 1e-5, 'whiten') @ one.v)
    others = [i for i in range(81) if i != token]
    rms = (outputs[0]**2).sum(-1).mean(-1).sqrt()
    output = ((outputs[1] - outputs[0])[:, :, others].norm(dim=-1).amax(-1) / rms).mean()
    rows = ((maps[1] - maps[0])[:, :, others].flatten(2).norm(dim=-1)
            / maps[0][:, :, others].flatten(2).norm(dim=-1)).mean()
    found = gradients.influence(gradients.output_and_map(layer, kernel, 2.0),
                                gradients.output_and_map(moved, kernel, 2.0), token)
    assert found[gradients.OUTPUT] == pytest.approx(output.item())
    assert found[gradients.MAP] == pytest.approx(rows.item())


def test_words_follow_the_numbers(gradients: ModuleType, numbers: list[dict]) -> None:
    parts = (gradients.gradients_in_words, gradients.mass_in_words, gradients.outliers_in_words)
    assert gradients.gradients_in_words(numbers)[1] == [True]
    exchanged = [{**row, 'kernel': 'gaussian' if row['kernel'] == 'laplacian' else 'laplacian'}
                 for row in numbers if row['part'] == 'gradient']
    assert gradients.gradients_in_words(exchanged)[1] == [False]

    def scaled(factor: float) -> list[dict]:
        """All mass and all influence of the Laplacian times a factor."""
        return [{**row, 'value': row['value'] * (factor if row['kernel'] == 'laplacian'
                                                 and row['part'] != 'gradient' else 1)}
                for row in numbers]

    assert [held for part in parts[1:] for held in part(scaled(2))[1]] == [True] * 2 + [False] * 4
    assert [held for part in parts[1:] for held in part(scaled(.5))[1]] == [False] * 2 + [True] * 4
    assert 'claim **holds in part**' in gradients.describe(scaled(2), '')
    assert gradients.verdict([True]) == '**holds**'
    assert gradients.verdict([False]) == '**does not hold here**'
