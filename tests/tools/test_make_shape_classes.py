"""The shape classes set holds what its docstring guarantees, measured on files and shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest

NAMES = ('circle', 'square', 'triangle')


@pytest.fixture(scope='module')
def tool(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool('make_shape_classes')


def files(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes()
            for path in sorted(out.rglob('*')) if path.is_file()}


def test_layout_and_pixels(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.main(['--out', str(tmp_path), '--num-train', '7', '--num-val', '3']) == 0
    content = files(tmp_path)
    assert set(content) == {
        'shape_classes.json',
        *(f'train/{NAMES[i % 3]}/{i + 1:06d}.png' for i in range(7)),
        *(f'val/{NAMES[i]}/{i + 1:06d}.png' for i in range(3))}
    for name in content:
        if name.endswith('.png'):
            assert cv2.imread(str(tmp_path / name)).shape == (64, 64, 3)
    assert not tool.make_dataset(tmp_path, 7, 3, 64, 0)
    assert tool.make_dataset(tmp_path, 6, 3, 64, 0)
    fewer = files(tmp_path)
    assert 'train/circle/000007.png' not in fewer
    assert fewer['train/square/000005.png'] == content['train/square/000005.png']
    assert fewer['val/circle/000001.png'] != fewer['train/circle/000001.png']


def test_one_shape_dominates(tool: ModuleType) -> None:
    numbers = set()
    for index in range(60):
        pixels, (dominant, *others) = tool.make_sample(3, 'val', index, 96)
        numbers.add(len(others))
        assert pixels.shape == (96, 96, 3) and pixels.dtype == np.uint8
        assert dominant.category == index % 3
        assert 0.5 * 96 - 1e-6 <= dominant.side <= 0.8 * 96 + 1e-6
        for shape in others:
            assert shape.category != dominant.category
            assert shape.side <= 0.5 * dominant.side + 1e-6
        for shape in (dominant, *others):
            left, top, right, bottom = shape.outline.bounds
            assert min(left, top) >= 0 and max(right, bottom) <= 96
        for shape in others:
            assert shape.outline.distance(dominant.outline) >= 2
    assert numbers == {0, 1}


def test_the_drawn_shape_is_the_class(tool: ModuleType) -> None:
    """The dominant shape's pixels differ from what lies beside them, inside its outline."""
    for index in range(12):
        pixels, shapes = tool.make_sample(0, 'train', index, 64)
        centres = np.arange(64) + 0.5
        covered = shapes[0].coverage(centres[None, :], centres[:, None]) > 0.9
        beside = np.logical_not(cv2.dilate(covered.astype(np.uint8), np.ones((5, 5))))
        for shape in shapes[1:]:
            beside &= shape.coverage(centres[None, :], centres[:, None]) == 0
        assert np.linalg.norm(pixels[covered].mean(0) - pixels[beside].mean(0)) > 50


@pytest.mark.parametrize(('option', 'value'), [
    ('image-size', 63), ('num-train', 2), ('num-val', 0), ('seed', -1)])
def test_bad_numbers_are_refused(tool: ModuleType, tmp_path: Path, option: str, value: int,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(['--out', str(tmp_path / 'set'), f'--{option}={value}']) == 2
    error = capsys.readouterr().err
    assert f'--{option} must be from' in error and f'got {value}' in error
    assert not (tmp_path / 'set').exists()


@pytest.mark.parametrize('name', ['mine.txt', 'train/circle/mine.png', 'train/star/000001.png',
                                  'val/000001.png'])
def test_foreign_files_are_kept(tool: ModuleType, tmp_path: Path, name: str,
                                capsys: pytest.CaptureFixture[str]) -> None:
    tool.make_dataset(tmp_path, 3, 3, 64, 0)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('mine')
    before = files(tmp_path)
    assert tool.main(['--out', str(tmp_path), '--num-train', '4']) == 2
    assert 'which this tool did not make' in capsys.readouterr().err
    assert files(tmp_path) == before
