"""Tiny and small configs train an iteration and predict, on generated data at reduced size.

Images come through each config's own pipeline; image size and the number of proposals shrink,
the model does not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmdet.registry import DATASETS as DETECTION_DATASETS
from mmdet.registry import MODELS as DETECTORS
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.runner import Runner
from torch import nn

CLASSES = ('n01440764', 'n01443537')
RESIZES = ('Resize', 'RandomChoiceResize')
DETECTION = [
    'mask_rcnn_laplacian_t.py', 'mask_rcnn_laplacian_s.py', 'mask_rcnn_laplacian_t_gaussian.py',
    'mask_rcnn_laplacian_t_layer_decay.py',
    'cascade_mask_rcnn_laplacian_t.py',
    pytest.param('cascade_mask_rcnn_laplacian_s.py', marks=pytest.mark.soak),
    'retinanet_laplacian_t.py', 'retinanet_laplacian_s.py',
]


def detection_batch(config: Config, root: Path, split: str, side: int | None = None) -> dict:
    """Two images through the pipeline of ``train`` or ``val``.

    Args:
        config: The config.
        root: A folder in COCO's layout.
        split: ``'train'`` or ``'val'``.
        side: Side of the box that images are scaled into. Default None: the pipeline's own.
    """
    settings = copy.deepcopy(config[f'{split}_dataloader'].dataset)
    settings.data_root = str(root)
    if side is not None:
        settings.pipeline = [
            dict(type='Resize', scale=(side, side), keep_ratio=True)
            if step['type'] in RESIZES else step for step in settings.pipeline]
    dataset = DETECTION_DATASETS.build(settings)
    return pseudo_collate([dataset[0], dataset[1]])


def build_detector(config: Config) -> nn.Module:
    """The detector with drawn weights, few proposals, and no block left out by chance."""
    settings = copy.deepcopy(config.model)
    settings.backbone.drop_path_rate = 0.
    if 'rpn_head' in settings:
        stages = settings.train_cfg.rcnn
        for stage in stages if isinstance(stages, list) else [stages]:
            stage.sampler.num = 16
        settings.train_cfg.rpn_proposal.update(nms_pre=50, max_per_img=20)
        settings.test_cfg.rpn.update(nms_pre=50, max_per_img=20)
        # Without training, no score is high.
        settings.test_cfg.rcnn.update(score_thr=0., max_per_img=5)
    else:
        settings.test_cfg.update(score_thr=0., max_per_img=5)
    model = DETECTORS.build(settings)
    model.init_weights()
    return model


def train_step(model: nn.Module, wrapper: OptimWrapper, batch: dict) -> dict[str, float]:
    """One iteration; its losses by name. Every part of the backbone must have moved."""
    before = {name: parameter.detach().clone()
              for name, parameter in model.backbone.named_parameters()}
    losses = {name: value.item() for name, value in
              model.train().train_step(batch, wrapper).items() if 'loss' in name}
    still = [name for name, parameter in model.backbone.named_parameters()
             if torch.equal(before[name], parameter)]
    assert still == []
    return losses


@pytest.mark.parametrize('name', DETECTION)
def test_detector_trains_and_predicts(
        name: str, load: Callable[[str], Config], coco: Path) -> None:
    config = load(name)
    model = build_detector(config)
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    losses = train_step(model, wrapper, detection_batch(config, coco, 'train', side=96))
    masks = 'retinanet' not in name
    assert any('loss_mask' in key for key in losses) == masks
    assert any('s2.loss_mask' == key for key in losses) == ('cascade' in name)
    assert all(math.isfinite(value) and value >= 0 for value in losses.values())
    assert losses['loss'] == pytest.approx(
        sum(value for key, value in losses.items() if key != 'loss'))

    with torch.no_grad():
        samples = model.eval().test_step(detection_batch(config, coco, 'val', side=96))
    assert [sample.img_id for sample in samples] == [0, 1]
    for sample in samples:
        predicted = sample.pred_instances
        assert len(predicted) == 5
        assert ((predicted.scores > 0) & (predicted.scores < 1)).all()
        x1, y1, x2, y2 = predicted.bboxes.unbind(1)
        assert ((x1 >= 0) & (x1 <= x2) & (x2 <= 96) & (y1 >= 0) & (y1 <= y2) & (y2 <= 64)).all()
        if masks:
            assert predicted.masks.shape == (5, 64, 96)


@pytest.mark.parametrize('name', ['mask_rcnn_laplacian_t.py', 'retinanet_laplacian_t.py'])
def test_1x_image_size(name: str, load: Callable[[str], Config], coco: Path) -> None:
    config = load(name)
    for split in ('train', 'val'):
        for inputs in detection_batch(config, coco, split)['inputs']:
            assert tuple(inputs.shape) == (3, 800, 1200)


def test_3x_image_sizes(load: Callable[[str], Config], coco: Path) -> None:
    """Training draws the shorter side from 480, 512, ... 800 px, validation takes 800."""
    config = load('mask_rcnn_laplacian_t_3x_ms.py')
    settings = copy.deepcopy(config.train_dataloader.dataset)
    settings.data_root = str(coco)
    dataset = DETECTION_DATASETS.build(settings)
    shapes = {tuple(dataset[0]['inputs'].shape) for _ in range(12)}
    assert len(shapes) > 3
    assert shapes <= {(3, side, side * 3 // 2) for side in range(480, 801, 32)}
    for inputs in detection_batch(config, coco, 'val')['inputs']:
        assert tuple(inputs.shape) == (3, 800, 1200)


@pytest.mark.parametrize('name', [
    'laplacian_t_in1k.py', 'laplacian_s_in1k.py', 'laplacian_t_gaussian_in1k.py'])
def test_classifier_trains_and_predicts(
        name: str, load: Callable[[str], Config], imagenet: Path, tmp_path: Path) -> None:
    """Two epochs of one iteration with every hook, then the accuracy of the averaged weights."""
    config = load(f'classification/{name}')
    for split in ('train', 'val', 'test'):
        loader = config[f'{split}_dataloader']
        loader.update(batch_size=4, num_workers=0, persistent_workers=False)
        loader.dataset.update(data_root=str(imagenet), metainfo=dict(classes=CLASSES))
        for step in loader.dataset.pipeline:
            for key in ('scale', 'crop_size'):
                if key in step:
                    step[key] = 64
    config.train_cfg.update(max_epochs=2, val_interval=2)
    # Its cosine begins where this training has long ended.
    config.param_scheduler = None
    config.default_hooks.checkpoint.interval = 3
    config.default_hooks.logger.interval = 1
    config.work_dir = str(tmp_path)
    config.experiment_name = name.removesuffix('.py')
    runner = Runner.from_cfg(config)
    model = runner.train()
    assert runner.iter == 2
    scalars = runner.message_hub.log_scalars
    assert 0 < scalars['train/loss'].current() < 20
    assert 0 <= scalars['val/accuracy/top1'].current() <= 100
    # The average begins as a copy after the first iteration and hardly follows the second.
    average = next(hook for hook in runner.hooks if type(hook).__name__ == 'EMAHook').ema_model
    assert average.steps == 2
    step = [(own - averaged).abs().max().item() for own, averaged in
            zip(model.head.parameters(), average.module.head.parameters(), strict=True)]
    assert step == pytest.approx([1e-3] * len(step), rel=0.2)
