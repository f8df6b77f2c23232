"""Images whose distant parts must be matched: the recall task drawn with textures and dots.

An image of 128 x 128 pixels is cut into 4 x 4 regions. A region's texture (stripes of one of
four directions) is its type; one region of each texture has a coloured dot. Every cell of 8 x 8
pixels must name the colour of the dot that lies on its texture.
"""

from __future__ import annotations

import math

import torch
from recall_task import COLOURS, REGIONS, TYPES, carrier_colours, enlarged, layout
from torch import Tensor, nn

from mmlaplacian import LaplacianFormer

SIDE, CELL = 128, 8
NOISE = 0.15
# Pixels of a stripe, and the radius of a dot in widths of a region.
_PERIOD, _RADIUS = 6.0, 7 / 32
PALETTE = torch.tensor([[.9, .1, .1], [.1, .8, .1], [.1, .2, .9], [.9, .9, .1], [.9, .1, .9],
                        [.1, .9, .9], [.95, .55, .1], [.5, .25, .05]])
# Of the four stages the first two are built: maps of stride 4 and 8, 1024 and 256 tokens, M = 49.
ARCH = dict(embed_dims=(32, 64, 64, 64), depths=(1, 3, 1, 1), num_heads=(1, 2, 2, 2),
            mlp_ratios=(4, 4, 4, 4))


def batch(count: int, generator: torch.Generator, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Draws images.

    Args:
        count: Images B.
        generator: Source of the random numbers.
        side: Rows and columns S in pixels, a multiple of 32. Default 128.

    Returns:
        Images ``(B, 3, S, S)``, about 0 to 1 before noise, less 0.5, and the colour that each cell
        must name ``(B, S / 8, S / 8)``.
    """
    types, colours, carriers = layout(count, generator)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing='ij')
    angle = enlarged(types, side) * (math.pi / TYPES)
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    wave = torch.sin((x * angle.cos() + y * angle.sin()) * (2 * math.pi / _PERIOD) + phase)
    images = (.5 + .25 * wave)[:, None].repeat(1, 3, 1, 1)

    width = side // REGIONS
    dots = enlarged(carrier_colours(colours, carriers), side)
    apart = [(axis % width - (width - 1) / 2)**2 for axis in (y, x)]
    dots = torch.where(sum(apart) < (_RADIUS * width)**2, dots, -1)[:, None]
    images = torch.where(dots >= 0, PALETTE[dots[:, 0]].permute(0, 3, 1, 2), images)
    images += NOISE * torch.randn(images.shape, generator=generator)
    return images - .5, enlarged(colours.gather(1, types), side // CELL)


class DistantPartsModel(nn.Module):
    """The first two stages of a narrow pyramid and a linear layer.

    Args:
        **attention: Arguments of :class:`mmlaplacian.LaplacianFormer`, for its attention.
    """

    def __init__(self, **attention: object) -> None:
        super().__init__()
        self.backbone = LaplacianFormer(arch=ARCH, out_indices=(1, ), **attention)
        self.backbone.init_weights()
        self.head = nn.Linear(ARCH['embed_dims'][1], COLOURS)

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, 128, 128)`` to logits ``(B, 16, 16, 8)``."""
        maps, = self.backbone(images)
        return self.head(maps.permute(0, 2, 3, 1))
