"""Landmarks: average pooling of a token map."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.validation import integer_at_least


def _cells(grid: int, length: int) -> int:
    """min(grid, length), a plain number also where the length is a symbol.

    So a graph of ``torch.compile`` or ``torch.export`` has one count of landmarks, from which
    the solver's steps follow, and serves all maps that are at least as large as the grid.
    """
    if length >= grid:
        return grid
    return next(cells for cells in range(1, grid) if length == cells)


def _pool_rows(x: Tensor, cells: int) -> Tensor:
    """Adaptive average pooling along the next to last dimension, ``(..., L, C) -> (..., g, C)``.

    Cell i averages the rows from floor(i L / g) up to ceil((i + 1) L / g), as
    :func:`torch.nn.functional.adaptive_avg_pool2d` does. As a product with a matrix from index
    arithmetic it is one graph for all sizes and has an ONNX form, which torch's own lacks.
    """
    length = x.shape[-2]
    cell = torch.arange(cells, device=x.device)[:, None]
    row = torch.arange(length, device=x.device)
    first, end = cell * length // cells, ((cell + 1) * length + cells - 1) // cells
    # Zeros and ones, divided afterwards: half precision would round 1 / (end - first).
    return (((row >= first) & (row < end)).to(x.dtype) @ x) / (end - first)


class LandmarkPool(nn.Module):
    """Pools a token map to landmarks, to a fixed grid or by a fixed ratio.

    Args:
        landmark_grid: Side g of the grid: adaptive pooling to min(g, H) x min(g, W) cells.
            Default 7, so 49 landmarks whatever the image size.
        pool_ratio: Side r of square windows instead, stride r; windows that stick out at the
            right and bottom average what lies inside (arXiv 2604.20368). Default None.

    Raises:
        TypeError: Not an integer.
        ValueError: Below 1.
    """

    def __init__(self, landmark_grid: int = 7, pool_ratio: int | None = None) -> None:
        super().__init__()
        self.landmark_grid = integer_at_least('landmark_grid', landmark_grid, 1)
        if pool_ratio is not None:
            pool_ratio = integer_at_least('pool_ratio', pool_ratio, 1)
        self.pool_ratio = pool_ratio

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, C) -> (B, M, C)``, row by row."""
        if self.pool_ratio is not None:
            x = F.avg_pool2d(x.permute(0, 3, 1, 2), self.pool_ratio, ceil_mode=True)
            return x.flatten(2).mT
        height, width, channels = x.shape[1:]
        rows, columns = (_cells(self.landmark_grid, length) for length in (height, width))
        # Along the width first: the larger product then reads x where it lies.
        x = _pool_rows(_pool_rows(x, columns).flatten(2), rows)
        return x.unflatten(2, (columns, channels)).flatten(1, 2)

    def extra_repr(self) -> str:
        if self.pool_ratio is not None:
            return f'pool_ratio={self.pool_ratio}'
        return f'landmark_grid={self.landmark_grid}'
