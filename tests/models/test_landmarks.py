"""Landmark pooling against a loop over windows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmlaplacian.models.landmarks import LandmarkPool

MAPS = [(25, 42), (13, 13), (7, 7), (3, 5), (1, 1), (1, 40), (40, 1)]


def pool_windows(x: Tensor, rows: list[slice], columns: list[slice]) -> Tensor:
    """Means of windows of ``(B, H, W, C)``, row by row: ``(B, windows, C)``."""
    return torch.stack([x[:, r, c].mean((1, 2)) for r in rows for c in columns], dim=1)


def grid_windows(length: int, cells: int) -> list[slice]:
    """Windows that cover ``length`` with ``cells`` equal real intervals, rounded outwards."""
    cells = min(cells, length)
    return [slice(i * length // cells, -(-(i + 1) * length // cells)) for i in range(cells)]


def ratio_windows(length: int, ratio: int) -> list[slice]:
    return [slice(start, min(start + ratio, length)) for start in range(0, length, ratio)]


@pytest.mark.parametrize('size', MAPS)
@pytest.mark.parametrize('grid', [1, 4, 7])
def test_grid_equals_loop(size: tuple[int, int], grid: int) -> None:
    x = torch.randn(2, *size, 3, dtype=torch.float64)
    landmarks = LandmarkPool(grid)(x)
    expected = pool_windows(x, *(grid_windows(length, grid) for length in size))
    assert landmarks.shape == (2, min(grid, size[0]) * min(grid, size[1]), 3)
    torch.testing.assert_close(landmarks, expected)


@pytest.mark.parametrize('size', MAPS)
@pytest.mark.parametrize('ratio', [1, 2, 4, 8])
def test_ratio_equals_loop(size: tuple[int, int], ratio: int) -> None:
    """Also windows that stick out (B13): they average what lies inside, none is lost."""
    x = torch.randn(2, *size, 3, dtype=torch.float64)
    expected = pool_windows(x, *(ratio_windows(length, ratio) for length in size))
    torch.testing.assert_close(LandmarkPool(pool_ratio=ratio)(x), expected)


@pytest.mark.parametrize(('side', 'ratio'), [(56, 8), (28, 4), (14, 2), (7, 1)])
def test_published_ratios_are_the_grid_at_224_px(side: int, ratio: int) -> None:
    x = torch.randn(1, side, side, 4)
    torch.testing.assert_close(LandmarkPool(7)(x), LandmarkPool(pool_ratio=ratio)(x))


@pytest.mark.parametrize('pool', [LandmarkPool(7), LandmarkPool(pool_ratio=2)])
def test_b43_empty_batch(pool: LandmarkPool) -> None:
    assert pool(torch.randn(0, 14, 14, 4)).shape == (0, 49, 4)


@pytest.mark.parametrize('name', ['landmark_grid', 'pool_ratio'])
@pytest.mark.parametrize(('value', 'error'), [(0, ValueError), (-3, ValueError),
                                              (2.5, TypeError), ('7', TypeError),
                                              (True, TypeError)])
def test_bad_values(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        LandmarkPool(**{name: value})
    assert f'{name} must be an integer >= 1, got {value!r}' in str(caught.value)


def test_repr_names_the_form_in_use() -> None:
    assert repr(LandmarkPool(5)) == 'LandmarkPool(landmark_grid=5)'
    assert repr(LandmarkPool(5, pool_ratio=2)) == 'LandmarkPool(pool_ratio=2)'
