"""``tools/analysis/attention_maps.py``: what tokens attend to."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mmlaplacian.ops import nystrom_attention
from mmlaplacian.ops.nystrom_attention.reference import attention_map
from mmlaplacian.ops.nystrom_attention.reference import similarity as dense_similarity

ANALYSIS = Path(__file__).resolve().parents[2] / 'tools' / 'analysis'


@pytest.fixture(scope='module')
def maps(tool: Callable[[str], ModuleType]) -> ModuleType:
    if str(ANALYSIS) not in sys.path:
        sys.path.append(str(ANALYSIS))
    return tool('analysis/attention_maps')


def _inputs(maps: ModuleType):
    generator = torch.Generator().manual_seed(0)
    return maps.AttentionInputs('', (4, 4), *(torch.randn(1, 2, n, 4, generator=generator)
                                              for n in (16, 16, 16, 5)))


def test_fast_run(maps: ModuleType, tmp_path: Path) -> None:
    assert maps.CLAIM.run(['--fast', '--out', str(tmp_path)]) == 0
    with (tmp_path / 'attention_maps.csv').open(encoding='utf-8', newline='') as file:
        *rows, control = csv.DictReader(file)
    assert control['attention'] == 'none' and 0 <= float(control['accuracy']) <= 1
    for attention in maps.SHOWN:
        own = [row for row in rows if row['attention'] == attention]
        # The shown layer is the one with the largest share.
        best = max(own, key=lambda row: float(row['share_of_map']))
        assert [row for row in own if row['shown'] == 'True'] == [best]
        # After two steps the mass is spread about evenly.
        for row in own:
            assert float(row['share_of_g']) == pytest.approx(maps.EVEN, rel=0.3)
            assert 1 <= float(row['tokens_attended']) <= float(row['tokens'])
    assert 'prove nothing' in (tmp_path / 'attention_maps.md').read_text(encoding='utf-8')


@pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
def test_rows_are_those_of_the_op(maps: ModuleType, kernel: str) -> None:
    inputs = _inputs(maps)
    g = maps.similarity(inputs, kernel)
    torch.testing.assert_close(
        g, dense_similarity(inputs.q, inputs.k, inputs.landmarks, 4.0, 1e-2, kernel), rtol=1e-4,
        atol=1e-4)
    torch.testing.assert_close(
        attention_map(g, maps.WHITEN_EPS, 'whiten') @ inputs.v,
        nystrom_attention(inputs.q, inputs.k, inputs.v, inputs.landmarks, kernel=kernel),
        rtol=1e-3, atol=1e-3)


def test_softmax_rows(maps: ModuleType) -> None:
    inputs = _inputs(maps)
    torch.testing.assert_close(
        maps.similarity(inputs, 'softmax') @ inputs.v,
        torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v))


def test_shares_and_counts_of_known_maps(maps: ModuleType) -> None:
    import distant_parts
    from recall_task import REGIONS

    even = torch.full((2, 64, 64), 1 / 64)
    assert maps.share_found(even, 2, 7) == pytest.approx(1 / REGIONS**2)
    assert maps.tokens_attended(even) == pytest.approx(64, rel=1e-4)
    assert maps.tokens_attended(torch.eye(64)[None]) == pytest.approx(1)
    # All mass on the dot of the colour that a cell must name: found in the image itself.
    images, colours = distant_parts.batch(2, torch.Generator().manual_seed(7))
    cells = torch.nn.functional.avg_pool2d(images + .5, distant_parts.SIDE // 8)
    apart = (cells[:, :, None] - distant_parts.PALETTE.T[None, :, :, None, None]).square().sum(1)
    shown = apart.flatten(2)
    named = colours[:, ::2, ::2].flatten(1)
    rows = torch.stack([torch.nn.functional.one_hot(shown[i, named[i]].argmin(1), 64).float()
                        for i in range(2)])
    assert maps.share_found(rows, 2, 7) > 5 * maps.EVEN


def test_negative_similarities_are_left_out(maps: ModuleType) -> None:
    rows = maps.rows_of(torch.tensor([[[[-1., 1.], [3., 1.]]]]))
    torch.testing.assert_close(rows, torch.tensor([[[0., 1.], [.75, .25]]]))


@pytest.mark.parametrize(('share', 'accuracy', 'words'), [
    (.5, .9, '**holds**'), (.2, .9, '**holds in part**'), (.01, .9, '**does not hold here**'),
    (.5, .13, 'prove nothing'), (.5, .30, 'prove nothing'), (.5, .36, 'chance 0.125). Each')])
def test_text_follows_the_numbers(maps: ModuleType, share: float, accuracy: float,
                                  words: str) -> None:
    row = {'layer': 'a', 'shown': True, 'share_of_g': .1, 'share_of_map': .3, 'tokens': 64,
           'tokens_attended': 9., 'accuracy': accuracy}
    rows = [row | {'attention': name} for name in maps.SHOWN]
    rows[0]['share_of_map'] = share
    rows.append(dict.fromkeys(row, '') | {'attention': 'none', 'accuracy': .12})
    assert words in maps.describe(rows, Path('a.jpg'), 1)


def test_every_column_has_a_title(maps: ModuleType) -> None:
    rows = [{'attention': name, 'shown': True, 'layer': 'a'} for name in maps.SHOWN]
    figure = maps.draw(torch.rand(3, 32, 32), {name: torch.rand(16, 4, 4) for name in maps.SHOWN},
                       rows)
    titles = [axes.get_title() for axes in figure.axes]
    assert ['photograph' in titles[0], *(name in title for name, title in zip(
        maps.SHOWN, titles[1:4], strict=True))] == [True] * 4 and not any(titles[4:])
    maps.plt.close(figure)
