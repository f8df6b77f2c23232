"""Batches and data sets of background images alone (B36)."""

from __future__ import annotations

import pytest
import torch
from mmdet.utils import register_all_modules
from mmengine.dataset import pseudo_collate
from mmengine.registry import DefaultScope
from torch import nn
from two_ranks import DETECTORS, Squares, build


@pytest.fixture(params=DETECTORS)
def detector(request: pytest.FixtureRequest) -> nn.Module:
    register_all_modules(init_default_scope=False)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return build(request.param).train()


# Images of odd index hold no object.
@pytest.mark.parametrize('batches', [[(1, 3)] * 3, [(1, 3), (0, 1), (3, 1)], [(1, )], [(0, 1)]],
                         ids=str)
def test_b36_losses_are_finite_and_every_parameter_learns(detector: nn.Module,
                                                          batches: list[tuple[int, ...]]) -> None:
    """None of a head's parameters may be left out: other ranks would wait for them."""
    dataset = Squares(empty=True)
    optimizer = torch.optim.SGD(detector.parameters(), lr=1e-3)
    for indices in batches:
        batch = pseudo_collate([dataset[index] for index in indices])
        assert sum(len(sample.gt_instances) for sample in batch['data_samples']) == 2 * sum(
            index % 2 == 0 for index in indices)
        batch = detector.data_preprocessor(batch, training=True)
        loss, parts = detector.parse_losses(detector(**batch, mode='loss'))
        optimizer.zero_grad()
        loss.backward()
        assert all(torch.isfinite(value).all() for value in parts.values()), parts
        for name, parameter in detector.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert torch.isfinite(parameter.grad).all(), name
        backbone = [p.grad.abs().sum() for p in detector.backbone.parameters()]
        assert sum(backbone) > 0
        optimizer.step()
