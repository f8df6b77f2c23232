"""Queries and keys of DeiT, Swin, PVTv2 and LaplacianFormer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mmpretrain.models.utils import WindowMSA
from mmpretrain.models.utils.attention import MultiheadAttention
from torch import Tensor, nn

from mmlaplacian.models import LaplacianAttention


@dataclass(frozen=True)
class QueriesKeys:
    """What one attention layer compares.

    Attributes:
        layer: Name of the layer in the model.
        q: Queries ``(B, h, N, d)``; B counts images, or windows where a layer has them.
        k: Keys ``(B, h, M, d)``.
    """

    layer: str
    q: Tensor
    k: Tensor


def _heads(tokens: Tensor, heads: int) -> Tensor:
    """``(B, N, C) -> (B, h, N, d)``."""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joint(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """Of a layer that makes q, k and v by one linear layer from one input."""
    x = args[0].flatten(1, -2)
    q, k, _ = layer.qkv(x).chunk(3, -1)
    return _heads(q, layer.num_heads), _heads(k, layer.num_heads)


def _separate(layer: nn.MultiheadAttention, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """Of torch's layer, which has an input for each."""
    projections = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
    found = []
    for name, (weight, bias) in zip(('query', 'key'), projections, strict=False):
        x = kwargs[name] if layer.batch_first else kwargs[name].transpose(0, 1)
        found.append(_heads(nn.functional.linear(x, weight, bias), layer.num_heads))
    return found[0], found[1]


_LAYERS = {LaplacianAttention: _joint, MultiheadAttention: _joint, WindowMSA: _joint,
           nn.MultiheadAttention: _separate}


@torch.no_grad()
def queries_keys(model: nn.Module, images: Tensor) -> list[QueriesKeys]:
    """Runs a model and keeps the queries and keys of its attention layers.

    Args:
        model: Takes ``images``; its mode is left as it is.
        images: ``(B, 3, H, W)``.

    Returns:
        One entry a layer, in the order of the forward; before any scaling of q.
    """
    seen: list[QueriesKeys] = []

    def keep(name: str, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(QueriesKeys(name, *_LAYERS[type(layer)](layer, args, kwargs)))

    hooks = [module.register_forward_pre_hook(
                 lambda layer, args, kwargs, name=name: keep(name, layer, args, kwargs),
                 with_kwargs=True)
             for name, module in model.named_modules() if type(module) in _LAYERS]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
