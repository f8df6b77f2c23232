"""Training resumed at an epoch's end equals training that was never interrupted (B33)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.utils import register_all_modules
from mmengine.hooks import Hook
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmengine.visualization import Visualizer
from torch import Tensor
from two_ranks import Squares, build

from mmlaplacian.hooks import EpochSeedHook


class Dimmed(Squares):
    """Images whose brightness is drawn by torch, NumPy and Python, in whichever process loads."""

    def __getitem__(self, index: int) -> dict:
        item = super().__getitem__(index)
        factor = (torch.rand(()).item() + np.random.rand() + random.random()) / 3
        item['inputs'] = (item['inputs'] * factor).to(torch.uint8)
        return item


class Kill(KeyboardInterrupt):
    """Ends a run like a signal does."""


class _Watch(Hook):

    priority = 'VERY_LOW'

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.losses: dict[int, float] = {}

    def before_train_iter(self, runner: Runner, batch_idx: int,
                          data_batch: dict | None = None) -> None:
        if runner.iter == self.kill_at:
            raise Kill

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None,
                         outputs: dict[str, Tensor] | None = None) -> None:
        self.losses[runner.iter] = outputs['loss'].item()


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """A Runner leaves scope, loggers and visualizers behind, which no other test may inherit."""
    registries = [cls._instance_dict for cls in (DefaultScope, MMLogger, MessageHub, Visualizer)]
    before = [dict(instances) for instances in registries]
    yield
    for instances, kept in zip(registries, before, strict=True):
        instances.clear()
        instances.update(kept)


def runner(work_dir: Path, name: str, hooks: list, kill_at: int | None = None,
           resume: bool = False, train_cfg: dict | None = None, randomness: dict | None = None,
           **loader: object) -> tuple[Runner, _Watch]:
    watch = _Watch(kill_at)
    register_all_modules(init_default_scope=False)
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = build('retinanet', with_cp=False)
    return Runner(
        model=model,
        work_dir=str(work_dir),
        train_dataloader={
            **dict(batch_size=4, num_workers=0, dataset=Dimmed(),
                   sampler=dict(type='DefaultSampler', shuffle=True),
                   collate_fn=dict(type='pseudo_collate')), **loader},
        train_cfg=train_cfg or dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)),
        param_scheduler=[dict(type='LinearLR', start_factor=0.1, end=6, by_epoch=False)],
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1)),
        custom_hooks=[dict(type='EMAHook'), watch, *hooks],
        randomness=randomness or dict(seed=3),
        resume=resume,
        default_scope='mmdet',
        experiment_name=name), watch


def state(made: Runner) -> dict[str, Tensor]:
    """Weights and their moving average."""
    average = next(hook for hook in made.hooks if type(hook).__name__ == 'EMAHook').ema_model
    return {**made.model.state_dict(),
            **{f'average.{name}': value for name, value in average.state_dict().items()}}


def interrupted_and_not(tmp_path: Path, hooks: list,
                        num_workers: int) -> tuple[Runner, _Watch, Runner, _Watch]:
    """Three epochs of two iterations, and the same killed in the second epoch and resumed."""
    whole, expected = runner(tmp_path / 'whole', 'whole', hooks, num_workers=num_workers)
    whole.train()
    killed, _ = runner(tmp_path / 'part', 'killed', hooks, kill_at=3, num_workers=num_workers)
    with pytest.raises(Kill):
        killed.train()
    resumed, actual = runner(tmp_path / 'part', 'resumed', hooks, resume=True,
                             num_workers=num_workers)
    resumed.train()
    assert sorted(expected.losses) == [0, 1, 2, 3, 4, 5]
    assert sorted(actual.losses) == [2, 3, 4, 5]
    return whole, expected, resumed, actual


@pytest.mark.parametrize('num_workers', [0, 1])
def test_b33_resumed_losses_are_those_of_the_uninterrupted_run(tmp_path: Path,
                                                               num_workers: int) -> None:
    whole, expected, resumed, actual = interrupted_and_not(
        tmp_path, [dict(type='EpochSeedHook')], num_workers)
    for iteration, loss in actual.losses.items():
        assert loss == pytest.approx(expected.losses[iteration], rel=1e-5)
    assert resumed.optim_wrapper.get_lr() == whole.optim_wrapper.get_lr()
    weights = state(resumed)
    for name, value in state(whole).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_without_the_hook_they_are_not(tmp_path: Path) -> None:
    _, expected, _, actual = interrupted_and_not(tmp_path, [], 0)
    assert actual.losses[3] != pytest.approx(expected.losses[3], rel=1e-3)


def test_epochs_and_ranks_draw_different_numbers() -> None:
    class Loader:
        num_workers = 2
        worker_init_fn = None

    class Fake:
        seed = 0
        epoch = 0
        rank = 0
        train_loop = type('Loop', (), dict(dataloader=Loader()))()

    def drawn(**changed: int) -> tuple:
        fake = Fake()
        for name, value in changed.items():
            setattr(fake, name, value)
        EpochSeedHook().before_train_epoch(fake)
        own = torch.rand(()).item(), np.random.rand(), random.random()
        workers = []
        for worker in range(2):
            fake.train_loop.dataloader.worker_init_fn(worker)
            workers.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return own, *workers

    python, numpy_, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        runs = [drawn(), drawn(epoch=1), drawn(rank=1), drawn(seed=1), drawn(epoch=1, rank=1)]
        assert drawn() == runs[0]
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)
        torch.set_rng_state(torch_)
    # Each of the three generators, in each process of each run, draws a number of its own.
    numbers = [number for run in runs for process in run for number in process]
    assert len(set(numbers)) == len(numbers) == 45


@pytest.mark.parametrize(('changed', 'message'), [
    (dict(train_cfg=dict(by_epoch=False, max_iters=2)),
     'EpochSeedHook needs train_cfg.by_epoch=True, got IterBasedTrainLoop'),
    (dict(randomness=dict(seed=None)),
     'EpochSeedHook needs an integer randomness.seed, got None'),
    (dict(num_workers=1, persistent_workers=True),
     'EpochSeedHook needs train_dataloader.persistent_workers=False, got True')])
def test_refuses_what_it_cannot_seed(tmp_path: Path, changed: dict, message: str) -> None:
    made, _ = runner(tmp_path, 'refused', [dict(type='EpochSeedHook')], **changed)
    with pytest.raises(ValueError, match=message):
        made.train()
