"""The same network with another attention: softmax, the Gaussian kernel, or none."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mmlaplacian.models import LaplacianAttention

ATTENTIONS = ('laplacian', 'gaussian', 'softmax', 'none')
"""``none`` is the control: the branch set to zero, the rest with the same parameters."""


class SoftmaxAttention(LaplacianAttention):
    """softmax(Q K^T / sqrt(d)) V in the place of the Nystrom attention; all else as there."""

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, C) -> (B, H, W, C)``."""
        q_map, k_map, v_map = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (self._split_heads(t.flatten(1, 2)) for t in (q_map, k_map, v_map))
        out = F.scaled_dot_product_attention(q, k, v)
        out = self.branch(out.transpose(1, 2).reshape(x.shape))
        return self.drop(self.proj(out + self.local(v_map)))


def set_attention(model: nn.Module, attention: str) -> nn.Module:
    """Changes every :class:`LaplacianAttention` of a model; its parameters stay.

    Args:
        model: Any model; it is changed.
        attention: One of :data:`ATTENTIONS`.

    Returns:
        The model.

    Raises:
        ValueError: Another attention, or a model without one.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f'attention must be one of {ATTENTIONS}, got {attention!r}')
    layers = [module for module in model.modules() if isinstance(module, LaplacianAttention)]
    if not layers:
        raise ValueError(f'the model must have a LaplacianAttention, got {type(model).__name__} '
                         'without one')
    for layer in layers:
        if attention == 'softmax':
            layer.__class__ = SoftmaxAttention
        elif attention == 'none':
            layer.branch.register_forward_hook(lambda module, inputs, output: output * 0)
        else:
            layer.kernel = attention
    return model
