"""Every config block of docs/training_options.md, trained on a CPU or built."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mmdet.utils import register_all_modules
from mmdet.visualization import DetLocalVisualizer
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MessageHub, MMLogger
from mmengine.optim import AmpOptimWrapper, build_optim_wrapper
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmengine.visualization import Visualizer
from two_ranks import REPO, Squares, build

PAGE = (REPO / 'docs' / 'training_options.md').read_text()
BLOCKS = re.findall(r'^```python\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
Train = Callable[[str], tuple[Runner, '_Steps']]


def block(*words: str) -> str:
    """The one block of the page that has all words."""
    found = [text for text in BLOCKS if all(word in text for word in words)]
    assert len(found) == 1, words
    return found[0]


def retinanet() -> torch.nn.Module:
    """The reduced model, with all of mmdet registered."""
    register_all_modules(init_default_scope=False)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return build('retinanet')


class _Steps(Hook):
    """Weights of one layer after each iteration."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def before_train(self, runner: Runner) -> None:
        self.after_train_iter(runner, 0)

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None,
                         outputs: dict | None = None) -> None:
        self.weights.append(runner.model.backbone.norm1.weight.detach().clone())


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """A Runner leaves scope, loggers and visualizers behind, which no other test may inherit."""
    registries = [cls._instance_dict for cls in (
        DefaultScope, MMLogger, MessageHub, Visualizer, DetLocalVisualizer)]
    before = [dict(instances) for instances in registries]
    yield
    for instances, kept in zip(registries, before, strict=True):
        instances.clear()
        instances.update(kept)


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Config]:
    """``config(text)``: the shipped RetinaNet config, extended by a block."""

    def config(text: str) -> Config:
        file = tmp_path / 'my_config.py'
        base = REPO / 'configs' / 'retinanet_laplacian_t.py'
        file.write_text(f'_base_ = {str(base)!r}\n{text}')
        return Config.fromfile(file)

    return config


@pytest.fixture
def train(config: Callable[[str], Config], tmp_path: Path) -> Train:
    """``train(text)``: four iterations of a reduced model with all else of the config."""

    def train(text: str) -> tuple[Runner, _Steps]:
        cfg = config(text)
        steps = _Steps()
        made = Runner(
            model=retinanet(),
            work_dir=str(tmp_path / 'run'),
            train_dataloader=dict(
                batch_size=4, num_workers=0, dataset=Squares(),
                sampler=dict(type='DefaultSampler', shuffle=True),
                collate_fn=dict(type='pseudo_collate')),
            train_cfg=dict(by_epoch=True, max_epochs=2),
            optim_wrapper=cfg.optim_wrapper,
            auto_scale_lr=cfg.auto_scale_lr,
            default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=1)),
            custom_hooks=[*cfg.get('custom_hooks', []), steps],
            visualizer=cfg.visualizer,
            randomness=cfg.get('randomness', dict(seed=0)),
            default_scope='mmdet',
            experiment_name=tmp_path.name)
        made.train()
        assert made.iter == 4
        return made, steps

    return train


def moved(steps: _Steps) -> list[bool]:
    """Whether each iteration moved the weights."""
    return [not torch.equal(before, after)
            for before, after in zip(steps.weights, steps.weights[1:], strict=False)]


def test_no_block_is_forgotten() -> None:
    assert len(BLOCKS) == 7


def test_ema(train: Train) -> None:
    made, _ = train(block('EMAHook'))
    hook = next(hook for hook in made.hooks if type(hook).__name__ == 'EMAHook')
    average = hook.ema_model
    assert (average.steps, average.momentum, average.gamma) == (4, 2e-4, 2000)


def test_gradient_accumulation(train: Train) -> None:
    assert moved(train(block('accumulative_counts'))[1]) == [False, True, False, True]


def test_without_accumulation_every_iteration_steps(train: Train) -> None:
    assert moved(train('')[1]) == [True] * 4


def test_scaled_learning_rate(train: Train) -> None:
    """A batch of 4, where the rate is for 16."""
    made, _ = train(block('auto_scale_lr'))
    rates = {group['lr'] for group in made.optim_wrapper.optimizer.param_groups}
    assert rates == {1e-4 * 4 / 16}


def test_tensorboard(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the writer: tensorboard need not be installed."""
    scalars: list[tuple[str, int]] = []

    class SummaryWriter:

        def __init__(self, log_dir: str) -> None:
            self.log_dir = log_dir

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            scalars.append((tag, step))

        def close(self) -> None:
            pass

    module = ModuleType('torch.utils.tensorboard')
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', module)
    train(block('TensorboardVisBackend'))
    assert [step for tag, step in scalars if tag == 'loss'] == [1, 2, 3, 4]


def test_repeated_random_numbers(train: Train) -> None:
    made, _ = train(block('EpochSeedHook'))
    assert any(type(hook).__name__ == 'EpochSeedHook' for hook in made.hooks)


@pytest.mark.parametrize(('word', 'dtype'), [('bfloat16', torch.bfloat16),
                                             ("'float16'", torch.float16)])
def test_mixed_precision_is_built(config: Callable[[str], Config],
                                  monkeypatch: pytest.MonkeyPatch, word: str,
                                  dtype: torch.dtype) -> None:
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    settings = config(block('AmpOptimWrapper', word)).optim_wrapper
    wrapper = build_optim_wrapper(retinanet(), settings)
    assert isinstance(wrapper, AmpOptimWrapper) and wrapper.cast_dtype == dtype
