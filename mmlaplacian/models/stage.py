"""One stage of the pyramid."""

from collections.abc import Sequence

from mmengine.model import BaseModule, ModuleList
from torch import Tensor

from .block import LaplacianBlock
from .layers import PatchEmbed


class LaplacianStage(BaseModule):
    """A patch embedding that reduces the map, then blocks at one resolution.

    Args:
        in_channels: Channels of the input map.
        embed_dims: Channels C of the stage.
        num_heads: Heads h.
        mlp_ratio: Hidden channels of the MLP as a multiple of C.
        patch_size: Odd window of the patch embedding.
        stride: Its stride s.
        drop_path_rates: Stochastic depth of each block; its length is the depth.
        attention: The other arguments of :class:`LaplacianAttention`.
        drop_rate: Dropout in attention and MLP. Default 0.
        with_cp: Recompute blocks in the backward to save memory. Default False.
    """

    def __init__(self,
                 in_channels: int,
                 embed_dims: int,
                 num_heads: int,
                 mlp_ratio: int,
                 patch_size: int,
                 stride: int,
                 drop_path_rates: Sequence[float],
                 attention: dict,
                 drop_rate: float = 0.,
                 with_cp: bool = False) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(in_channels, embed_dims, patch_size, stride)
        self.blocks = ModuleList(
            LaplacianBlock(embed_dims, num_heads, mlp_ratio, attention, drop_rate,
                           drop_path_rate, with_cp) for drop_path_rate in drop_path_rates)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_channels, H, W) -> (B, ceil(H/s), ceil(W/s), C)``."""
        x = self.patch_embed(x)
        for block in self.blocks:
            x = block(x)
        return x
