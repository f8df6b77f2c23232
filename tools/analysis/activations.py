"""What the attention layers of a model see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmlaplacian.models import LaplacianAttention


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of the attention of one layer.

    Attributes:
        layer: Name of the layer in the model.
        grid: Rows H and columns W of the token map, N = H W.
        q: Queries ``(B, h, N, d)``.
        k: Keys ``(B, h, N, d)``.
        v: Values ``(B, h, N, d)``.
        landmarks: Pooled keys ``(B, h, M, d)``.
    """

    layer: str
    grid: tuple[int, int]
    q: Tensor
    k: Tensor
    v: Tensor
    landmarks: Tensor


def _inputs(name: str, layer: LaplacianAttention, x: Tensor) -> AttentionInputs:
    def heads(tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)

    maps = layer.qkv(x).chunk(3, -1)
    q, k, v = (heads(tokens.flatten(1, 2)) for tokens in maps)
    return AttentionInputs(name, tuple(x.shape[1:3]), q, k, v, heads(layer.landmarks(maps[1])))


@torch.no_grad()
def attention_inputs(model: nn.Module, images: Tensor) -> list[AttentionInputs]:
    """Runs a model and keeps what each :class:`LaplacianAttention` in it attends over.

    Args:
        model: Takes ``images``; its mode is left as it is.
        images: As the model takes them.

    Returns:
        One entry a layer, in the order of the forward.
    """
    seen: list[AttentionInputs] = []
    hooks = [module.register_forward_pre_hook(
                 lambda layer, args, name=name: seen.append(_inputs(name, layer, args[0])))
             for name, module in model.named_modules() if isinstance(module, LaplacianAttention)]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
