"""What the attention of the tiny backbone with new weights sees of a photograph."""

from __future__ import annotations

from pathlib import Path

import torch
from activations import AttentionInputs, attention_inputs
from photograph import normalized, square_photograph

from mmlaplacian import LaplacianFormer


def tiny_layers(file: Path, side: int, seed: int) -> list[AttentionInputs]:
    """All attention layers, in order: two a stage.

    Args:
        file: The photograph.
        side: It is cut and resized to this square, in pixels.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    model = LaplacianFormer('tiny').eval()
    model.init_weights()
    return attention_inputs(model, normalized(square_photograph(file, side)))
