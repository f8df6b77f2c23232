"""Shared fixtures of the model tests: a small backbone and the messages MMEngine logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from mmengine.logging import MMLogger

from mmlaplacian import LaplacianFormer


@pytest.fixture
def arch() -> dict[str, tuple[int, ...]]:
    """An arch that costs next to nothing, with a number of its own at every place."""
    return dict(embed_dims=(8, 16, 24, 32), depths=(1, 2, 1, 1), num_heads=(1, 2, 3, 4),
                mlp_ratios=(3, 2, 2, 1))


@pytest.fixture
def build(arch: dict) -> Callable[..., LaplacianFormer]:
    """``build(**arguments)``: a small backbone with drawn weights, the same at every call.

    In eval mode; the biases are drawn too, so that a wrong one shows.
    """

    def build(**arguments: object) -> LaplacianFormer:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LaplacianFormer(**{'arch': arch, **arguments})
            model.init_weights()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith('bias'):
                        parameter.normal_(std=0.1)
        return model.eval()

    return build


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """Records of MMEngine's current logger, which does not pass them on to ``logging``."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)
