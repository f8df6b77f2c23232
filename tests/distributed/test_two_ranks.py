"""Two processes train as one would on both batches: every gradient is averaged (B28, B31)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmdet.utils import register_all_modules
from mmengine.registry import DefaultScope
from two_ranks import (
    CASES,
    ITERATIONS,
    Gradients,
    backbone_and_images,
    gradients,
    smooth_loss,
    train_alone,
)

SCRIPT = Path(__file__).with_name('two_ranks.py')


@pytest.fixture(scope='module')
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of the two processes left."""
    folder = tmp_path_factory.mktemp('ranks')
    environment = dict(os.environ, RANK='0', WORLD_SIZE='2', LOCAL_RANK='0', OMP_NUM_THREADS='1',
                       CUDA_VISIBLE_DEVICES='')
    logs = [folder / f'log{rank}.txt' for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open('w') as stream:
            processes.append(subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(folder)], stdout=stream,
                stderr=subprocess.STDOUT, env=dict(environment, RANK=str(rank))))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], '\n'.join(log.read_text()[-3000:] for log in logs)
    return [torch.load(folder / f'rank{rank}.pth', weights_only=True) for rank in range(2)]


def distance(actual: Gradients, expected: Gradients) -> float:
    """Largest difference over all parameters, relative to the largest gradient of each."""
    assert actual.keys() == expected.keys()
    return max(((actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-6)).item()
               for name, value in expected.items())


@pytest.mark.parametrize('case', CASES, ids=lambda case: f'{case[0]}-cp{case[1]}-empty{case[2]}')
def test_b28_b31_gradients_are_the_mean_over_ranks(ranks: list[dict], case: tuple) -> None:
    with DefaultScope.overwrite_default_scope('mmdet'):
        register_all_modules(init_default_scope=False)
        alone = train_alone(*case)
    together = [rank['detectors'][case] for rank in ranks]
    assert len(together[0]) == len(together[1]) == len(alone) == ITERATIONS
    for first, second, own in zip(*together, alone, strict=True):
        mean = {name: (own[0][name] + value) / 2 for name, value in own[1].items()}
        assert distance(first, second) == 0
        assert distance(first, mean) < 1e-3
        # The ranks have different batches, so no rank's own gradient would pass.
        assert min(distance(mean, gradient) for gradient in own) > 0.1


def test_smooth_loss_of_the_backbone_gives_the_gradients_of_the_joint_batch(
        ranks: list[dict]) -> None:
    model, images = backbone_and_images()
    smooth_loss(model, images).backward()
    for rank in ranks:
        assert distance(rank['backbone'], gradients(model)) < 1e-4
