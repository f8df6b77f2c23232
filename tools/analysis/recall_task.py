"""A task that needs content-based attention: every token names a colour that few tokens carry.

A map of 16 x 16 tokens is cut into 4 x 4 regions, each of one of four types. In one region of
each type a patch of 2 x 2 tokens also carries a colour, one of eight. Every token must name the
colour of its type, wherever on the map that patch lies. Types and colours are one-hot channels
under noise. Nothing but the content says where to look, and convolutions reach a part of the map.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlaplacian.models.block import LaplacianBlock

SIDE, REGIONS = 16, 4
TYPES, COLOURS = 4, 8
CHANNELS = TYPES + COLOURS
NOISE = 0.3


def layout(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draws what maps hold, before tokens or pixels show it.

    Args:
        count: Maps B.
        generator: Source of the random numbers.

    Returns:
        The type of each region ``(B, R * R)``, every type at least once; the colour of each type
        ``(B, TYPES)``; for each type the region that carries it ``(B, TYPES)``.
    """
    regions = REGIONS * REGIONS
    types = torch.randint(TYPES, (count, regions), generator=generator)
    # The carriers, and with them every type, are drawn first: other regions are of any type.
    carriers = torch.rand(count, regions, generator=generator).argsort(1)[:, :TYPES]
    types.scatter_(1, carriers, torch.arange(TYPES).expand(count, -1))
    colours = torch.randint(COLOURS, (count, TYPES), generator=generator)
    return types, colours, carriers


def enlarged(regions: Tensor, side: int) -> Tensor:
    """``(B, R * R)`` to a map ``(B, side, side)`` of equal squares."""
    width = side // REGIONS
    grid = regions.unflatten(1, (REGIONS, REGIONS))
    return grid.repeat_interleave(width, 1).repeat_interleave(width, 2)


def carrier_colours(colours: Tensor, carriers: Tensor) -> Tensor:
    """The colour that each region carries ``(B, R * R)``, -1 for none."""
    carried = torch.full((len(colours), REGIONS * REGIONS), -1)
    return carried.scatter_(1, carriers, colours)


def patches(colours: Tensor, carriers: Tensor) -> Tensor:
    """The colour that each token carries ``(B, 16, 16)``, -1 for none."""
    width = SIDE // REGIONS
    carried = enlarged(carrier_colours(colours, carriers), SIDE)
    inner = (torch.arange(SIDE) % width - (width - 1) / 2).abs() < 1
    return torch.where(inner[:, None] & inner, carried, -1)


def batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws maps.

    Args:
        count: Maps B.
        generator: Source of the random numbers.

    Returns:
        Tokens ``(B, 16, 16, 12)`` and the colour that each must name ``(B, 16, 16)``.
    """
    types, colours, carriers = layout(count, generator)
    tokens = torch.cat([F.one_hot(enlarged(types, SIDE), TYPES),
                        F.one_hot(patches(colours, carriers) + 1, COLOURS + 1)[..., 1:]],
                       -1).float()
    tokens += NOISE * torch.randn(tokens.shape, generator=generator)
    return tokens, enlarged(colours.gather(1, types), SIDE)


class RecallModel(nn.Module):
    """Three blocks of width 64 with two heads between two linear layers.

    Args:
        embed_dims: Channels C. Default 64.
        num_heads: Heads h. Default 2.
        depth: Blocks. Default 3.
        **attention: Other arguments of :class:`mmlaplacian.models.LaplacianAttention`.
    """

    def __init__(self, embed_dims: int = 64, num_heads: int = 2, depth: int = 3,
                 **attention: object) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS, embed_dims)
        self.blocks = nn.Sequential(*(LaplacianBlock(embed_dims, num_heads, 2, attention)
                                      for _ in range(depth)))
        self.norm = nn.LayerNorm(embed_dims)
        self.head = nn.Linear(embed_dims, COLOURS)

    def forward(self, tokens: Tensor) -> Tensor:
        """``(B, 16, 16, 12)`` to logits ``(B, 16, 16, 8)``."""
        return self.head(self.norm(self.blocks(self.embed(tokens))))
