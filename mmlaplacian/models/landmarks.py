"""Landmarks: average pooling of a token map."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.validation import integer_at_least


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
        x = x.permute(0, 3, 1, 2)
        if self.pool_ratio is not None:
            x = F.avg_pool2d(x, self.pool_ratio, ceil_mode=True)
        else:
            height, width = x.shape[2:]
            grid = self.landmark_grid
            x = F.adaptive_avg_pool2d(x, (min(grid, height), min(grid, width)))
        return x.flatten(2).mT

    def extra_repr(self) -> str:
        if self.pool_ratio is not None:
            return f'pool_ratio={self.pool_ratio}'
        return f'landmark_grid={self.landmark_grid}'
