"""``tools/analysis/landmark_grids.py``: landmarks, cost and error of G over the image size."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from mmlaplacian.ops.laplacian_kernel import reference as kernels
from mmlaplacian.ops.nystrom_attention.reference import similarity

ANALYSIS = Path(__file__).resolve().parents[2] / 'tools' / 'analysis'


@pytest.fixture(scope='module')
def grids(tool: Callable[[str], ModuleType]) -> ModuleType:
    if str(ANALYSIS) not in sys.path:
        sys.path.append(str(ANALYSIS))
    return tool('analysis/landmark_grids')


def _strides(side: int) -> list[int]:
    """Side of the token map of each stage."""
    return [math.ceil(side / stride) for stride in (4, 8, 16, 32)]


def test_fast_run(grids: ModuleType, tmp_path: Path) -> None:
    assert grids.CLAIM.run(['--fast', '--out', str(tmp_path)]) == 0
    with (tmp_path / 'landmark_grids.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4 * len(grids.FAST_SIDES)
    for row in rows:
        stage = int(row['stage']) - 1
        map_side = _strides(int(row['side']))[stage]
        cells = (min(7, map_side) if row['rule'] == grids.GRID
                 else math.ceil(map_side / (8, 4, 2, 1)[stage]))
        assert (int(row['tokens']), int(row['landmarks'])) == (map_side**2, cells**2)
        assert 0 < float(row['relative_error']) < 1
        # The input of the first block's MLP, eight times as wide, lives at once with its result.
        assert float(row['peak_bytes']) > 2 * 8 * 64 * 4 * _strides(int(row['side']))[0]**2
    text = (tmp_path / 'landmark_grids.md').read_text(encoding='utf-8')
    assert 'grace_hopper.jpg, new weights' in text


def test_error_is_that_of_the_dense_matrices(grids: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, landmarks = (torch.randn(1, 2, n, 4, generator=generator) for n in (9, 30, 5))
    exact = kernels.laplacian_kernel(q.double(), k.double(), 4.0)
    g = similarity(q.double(), k.double(), landmarks.double(), 4.0, 1e-2, 'laplacian')
    expected = (((g - exact)**2).sum() / (exact**2).sum()).sqrt().item()
    assert grids.relative_error(q, k, landmarks) == pytest.approx(expected, rel=1e-9)


def test_landmarks_of_a_layer_are_what_the_model_pools(grids: ModuleType) -> None:
    image = torch.rand(1, 3, 72, 72, generator=torch.Generator().manual_seed(0))
    for rule in grids.RULES:
        model = grids.backbone(rule, 0, None)
        for inputs in grids.attention_inputs(model, image):
            found = grids.landmarks_of(inputs, rule, int(inputs.layer.split('.')[1]))
            torch.testing.assert_close(found, inputs.landmarks)


@pytest.mark.parametrize(('powers', 'verdict'), [((1, 1), 'holds'), ((1, 2), 'holds in part'),
                                                 ((2, 2), 'does not hold here')])
def test_verdict_follows_the_numbers(grids: ModuleType, powers: tuple[int, int],
                                     verdict: str) -> None:
    rows = [{'rule': rule, 'side': side, 'stage': stage, 'landmarks': 49,
             'relative_error': 0.1, 'milliseconds': side**(2 * power), 'peak_bytes': 1,
             'gmacs': 1.0}
            for rule, power in zip(grids.RULES, powers, strict=True)
            for side in (64, 128) for stage in (1, 2, 3, 4)]
    assert f'**{verdict}**' in grids.describe(rows, '')


def test_wrong_files_are_refused(grids: ModuleType, tmp_path: Path,
                                 capsys: pytest.CaptureFixture) -> None:
    text, other = tmp_path / 'text.jpg', tmp_path / 'other.pth'
    text.write_text('no image')
    torch.save({'weight': torch.zeros(1)}, other)
    for option, file in (('--image', text), ('--checkpoint', other),
                         ('--checkpoint', tmp_path / 'none.pth')):
        assert grids.CLAIM.run(['--fast', '--out', str(tmp_path), option, str(file)]) == 2
        assert option in capsys.readouterr().err


def test_photograph_is_the_square_at_the_top(grids: ModuleType, tmp_path: Path) -> None:
    from photograph import normalized, square_photograph

    image = Image.new('RGB', (6, 12), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 6, 6))
    image.save(tmp_path / 'a.png')
    square = square_photograph(tmp_path / 'a.png', 12)
    assert square.shape == (1, 3, 12, 12)
    assert square[0, 0].min() > 0.999 and square[0, 2].max() < 0.001
    assert normalized(square)[0, 0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229)
