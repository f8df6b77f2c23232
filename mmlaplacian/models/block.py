"""One transformer block."""

from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import LaplacianAttention
from .layers import ConvMLP


class LaplacianBlock(BaseModule):
    """Pre-norm block: attention, then MLP, each on a residual path with stochastic depth.

    Args:
        embed_dims: Channels C.
        num_heads: Heads h.
        mlp_ratio: Hidden channels of the MLP as a multiple of C.
        attention: The other arguments of :class:`LaplacianAttention`.
        drop_rate: Dropout in attention and MLP. Default 0.
        drop_path_rate: Probability to skip a path of a sample. Default 0.
        with_cp: Recompute the block in the backward to save memory. Default False.
    """

    def __init__(self,
                 embed_dims: int,
                 num_heads: int,
                 mlp_ratio: int,
                 attention: dict,
                 drop_rate: float = 0.,
                 drop_path_rate: float = 0.,
                 with_cp: bool = False) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.norm1 = nn.LayerNorm(embed_dims)
        self.attn = LaplacianAttention(embed_dims, num_heads, drop_rate=drop_rate, **attention)
        self.norm2 = nn.LayerNorm(embed_dims)
        self.mlp = ConvMLP(embed_dims, mlp_ratio, drop_rate)
        self.drop_path = DropPath(drop_path_rate)

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, C) -> (B, H, W, C)``."""
        if self.with_cp and self.training:
            # The re-entrant form gives no gradient behind a frozen input.
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)
