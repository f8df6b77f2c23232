"""NaN and infinite pixels: batch mates are unchanged, and training stops with the file's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mmdet.utils import register_all_modules
from mmengine.dataset import pseudo_collate
from mmengine.hooks import Hook
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmengine.visualization import Visualizer
from torch import nn
from two_ranks import DETECTORS, Squares, build

BROKEN = [float('nan'), float('inf'), float('-inf')]


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """A Runner leaves scope, loggers and visualizers behind, which no other test may inherit."""
    registries = [cls._instance_dict for cls in (DefaultScope, MMLogger, MessageHub, Visualizer)]
    before = [dict(instances) for instances in registries]
    yield
    for instances, kept in zip(registries, before, strict=True):
        instances.clear()
        instances.update(kept)


def detector(kind: str) -> nn.Module:
    register_all_modules(init_default_scope=False)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return build(kind)


class Photographs(Squares):
    """With file names, as floats; one pixel of one image is set."""

    def __init__(self, broken: int | None = None, value: float = 0.) -> None:
        super().__init__()
        self.broken, self.value = broken, value

    def __getitem__(self, index: int) -> dict:
        item = super().__getitem__(index)
        item['inputs'] = item['inputs'].float()
        item['data_samples'].set_metainfo(dict(img_path=f'photographs/{index}.tif'))
        if index == self.broken:
            item['inputs'][1, 30, 40] = self.value
        return item


@pytest.mark.parametrize('value', BROKEN)
@pytest.mark.parametrize('kind', DETECTORS)
def test_batch_mates_of_a_broken_image_are_unchanged(kind: str, value: float) -> None:
    """Of a two-stage detector the features alone: mmdet's RoI extractor adds 0 times a sum over
    the maps of the whole batch."""
    model = detector(kind).eval()
    if kind == 'retinanet':
        # Untrained, it is sure of nothing.
        model.bbox_head.test_cfg.score_thr = 0.
    results = []
    for broken in (None, 1):
        dataset = Photographs(broken, value)
        batch = model.data_preprocessor(pseudo_collate([dataset[i] for i in range(3)]), False)
        with torch.no_grad():
            maps = model.backbone(batch['inputs'])
            predictions = model(**batch, mode='predict')
        results.append((maps, [sample.pred_instances for sample in predictions]))
    (whole, expected), (maps, predictions) = results
    assert any(not x[1].isfinite().all() for x in maps)
    for a, b in zip(maps, whole, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    for index in (0, 2) if kind == 'retinanet' else ():
        assert len(expected[index].scores) > 0
        assert torch.equal(predictions[index].bboxes, expected[index].bboxes)
        assert torch.equal(predictions[index].scores, expected[index].scores)


class Steps(Hook):
    """Counts the optimizer's steps."""

    def before_train(self, runner: Runner) -> None:
        self.count = 0

        def add(*_: object) -> None:
            self.count += 1

        runner.optim_wrapper.optimizer.register_step_pre_hook(add)


def train(folder: Path, dataset: Squares, hooks: list, weight: float | None = None) -> Runner:
    """One epoch; ``weight`` is set in the head."""
    model = detector('retinanet')
    if weight is not None:
        model.bbox_head.retina_reg.weight.data[0, 0, 0, 0] = weight
    runner = Runner(
        model=model, work_dir=str(folder), train_dataloader=dict(
            batch_size=2, num_workers=0, dataset=dataset,
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate')),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=1e-4)),
        default_hooks=dict(checkpoint=None), custom_hooks=hooks, default_scope='mmdet',
        experiment_name=folder.name)
    runner.train()
    return runner


@pytest.mark.parametrize('value', BROKEN)
@pytest.mark.parametrize('index', [0, 3])
def test_training_stops_with_the_name_before_the_step(tmp_path: Path, value: float,
                                                      index: int) -> None:
    steps = Steps()
    with pytest.raises(FloatingPointError) as error:
        train(tmp_path, Photographs(index, value), [dict(type='FiniteLossHook'), steps])
    assert f'iteration {index // 2 + 1}, before its step' in str(error.value)
    assert str(error.value).endswith(f'the pixels of photographs/{index}.tif are not')
    assert steps.count == index // 2


@pytest.mark.parametrize('value', BROKEN)
def test_finite_pixels_and_a_broken_weight(tmp_path: Path, value: float) -> None:
    steps = Steps()
    with pytest.raises(FloatingPointError) as error:
        train(tmp_path, Photographs(), [dict(type='FiniteLossHook'), steps], value)
    assert 'loss_bbox not finite, although the pixels are' in str(error.value)
    assert str(error.value).endswith('photographs/0.tif, photographs/1.tif')
    assert steps.count == 0


def test_nothing_is_left_on_the_model(tmp_path: Path) -> None:
    steps = Steps()
    runner = train(tmp_path, Photographs(), [dict(type='FiniteLossHook'), steps])
    assert steps.count == 4
    assert not runner.model._forward_hooks
