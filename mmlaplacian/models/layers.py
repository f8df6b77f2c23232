"""The layers around the attention, on token maps ``(B, H, W, C)``."""

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn


class DepthwiseConv(nn.Conv2d):
    """3x3 depth-wise convolution, zero-padded. ``(B, H, W, C) -> (B, H, W, C)``.

    The padding is what tells the model positions, as in PVTv2 (arXiv 2106.13797).

    Args:
        channels: C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, padding=1, groups=channels)
        # The layout of its gradient: DDP copies a gradient that is laid out differently.
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class PatchEmbed(BaseModule):
    """Overlapping patches by a strided convolution, then LayerNorm (PVTv2).

    Args:
        in_channels: Channels of the input map.
        embed_dims: Channels C of the tokens.
        kernel_size: Odd side of the window; padding is half of it.
        stride: Stride s; the result has ceil(H/s) x ceil(W/s) tokens.
    """

    def __init__(self, in_channels: int, embed_dims: int, kernel_size: int,
                 stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, embed_dims, kernel_size, stride, kernel_size // 2)
        self.norm = nn.LayerNorm(embed_dims)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, in_channels, H, W) -> (B, ceil(H/s), ceil(W/s), C)``."""
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class ConvMLP(BaseModule):
    """MLP with a 3x3 depth-wise convolution before the activation (PVTv2).

    Args:
        embed_dims: Channels C.
        mlp_ratio: Hidden channels as a multiple of C.
        drop_rate: Dropout after either linear layer. Default 0.
    """

    def __init__(self, embed_dims: int, mlp_ratio: int, drop_rate: float = 0.) -> None:
        super().__init__()
        hidden_dims = embed_dims * mlp_ratio
        self.fc1 = nn.Linear(embed_dims, hidden_dims)
        self.dwconv = DepthwiseConv(hidden_dims)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dims, embed_dims)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, C) -> (B, H, W, C)``."""
        x = self.drop(self.act(self.dwconv(self.fc1(x))))
        return self.drop(self.fc2(x))
