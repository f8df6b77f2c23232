"""The tiny backbone on weights and images of many seeds: maps and gradients stay finite."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mmlaplacian import LaplacianFormer

FEW, MANY = 5, 1000


def drawn_image(draw: random.Random) -> Tensor:
    """One image of up to 64 px a side: noise, one colour, raw pixels or nearly nothing."""
    height, width = (draw.choice([64, 64, draw.randint(1, 64)]) for _ in range(2))
    x = torch.randn(1, 3, height, width)
    kind = draw.choice(['noise', 'colour', 'pixels', 'faint'])
    return {'noise': x, 'colour': x[:, :, :1, :1].expand_as(x).clone(),
            'pixels': (x * 60 + 128).clamp(0, 255).round(), 'faint': x * 1e-6}[kind]


@pytest.mark.parametrize('count', [FEW, pytest.param(MANY, marks=pytest.mark.soak)])
def test_maps_and_gradients_are_finite(count: int) -> None:
    """Seed n gives weights, image and stochastic depth; the message names it."""
    model = LaplacianFormer('tiny', drop_path_rate=0.1).train()
    with torch.random.fork_rng():
        for seed in range(count):
            torch.manual_seed(seed)
            model._draw_weights()
            maps = model(drawn_image(random.Random(seed)))
            model.zero_grad()
            sum((x * torch.randn_like(x)).sum() for x in maps).backward()
            wrong = [index for index, x in enumerate(maps) if not x.isfinite().all()]
            wrong += [name for name, p in model.named_parameters()
                      if p.grad is None or not p.grad.isfinite().all()]
            assert not wrong, f'seed {seed}: {wrong}'
