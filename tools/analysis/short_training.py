"""Trains a small model for some hundred steps and keeps its curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from mmengine.optim import CosineAnnealingLR, LinearLR, OptimWrapper
from torch import Tensor, nn
from tqdm import tqdm

Batch = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""Takes a size and a generator; gives inputs and the class that each place must name."""

_VALIDATION_SEED = 2**31 - 1


@dataclass(frozen=True)
class Curve:
    """What a training did.

    Args:
        steps: After how many steps it was looked at.
        loss: Mean cross entropy of the training batches since the last look.
        accuracy: On maps that are the same for every training, 0 to 1.
    """

    steps: list[int]
    loss: list[float]
    accuracy: list[float]


def train(build: Callable[[], nn.Module], batch: Batch, *, steps: int = 600, batch_size: int = 16,
          learning_rate: float = 2e-3, seed: int = 0, looks: int = 12, validation: int = 64,
          watch: Callable[[nn.Module, int], None] | None = None,
          progress: str | None = None) -> tuple[nn.Module, Curve]:
    """Trains with AdamW after a linear warm-up of a twentieth, then down a cosine.

    Args:
        build: Makes the model, logits in the last dimension.
        batch: Draws data; every step draws new ones.
        steps: Optimizer steps.
        batch_size: Items of a step.
        learning_rate: The highest.
        seed: Of weights and data.
        looks: How often the curve is measured.
        validation: Items that accuracy is measured on.
        watch: Called after each step's backward with the model and the number of the step.
        progress: Label of the progress bar on stderr; None for no bar.

    Returns:
        The model in eval mode and its curve.
    """
    torch.manual_seed(seed)
    model = build().train()
    generator = torch.Generator().manual_seed(seed)
    held_out = batch(validation, torch.Generator().manual_seed(_VALIDATION_SEED))
    optimizer = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=learning_rate,
                                               weight_decay=0.05))
    warm_up = max(1, steps // 20)
    schedules = (LinearLR(optimizer, start_factor=1 / warm_up, by_epoch=False, end=warm_up),
                 CosineAnnealingLR(optimizer, T_max=max(1, steps - warm_up), by_epoch=False,
                                   begin=warm_up, end=max(steps, warm_up + 1)))
    every = max(1, steps // looks)
    curve, losses = Curve([], [], []), []
    for step in tqdm(range(1, steps + 1), desc=progress, disable=progress is None):
        inputs, target = batch(batch_size, generator)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        optimizer.backward(loss)
        if watch is not None:
            watch(model, step)
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
        if step % every == 0 or step == steps:
            curve.steps.append(step)
            curve.loss.append(sum(losses) / len(losses))
            curve.accuracy.append(accuracy(model, *held_out))
            losses.clear()
    return model.eval(), curve


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, target: Tensor) -> float:
    """Share of places that are named right, in eval mode; the model's mode stays."""
    mode = model.training
    model.eval()
    right = model(inputs).argmax(-1) == target
    model.train(mode)
    return right.float().mean().item()
