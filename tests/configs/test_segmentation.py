"""The segmentation configs train an iteration and predict, where mmsegmentation is installed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.optim import build_optim_wrapper

pytest.importorskip(
    'mmseg', reason='mmsegmentation is not installed: pip install onedl-mmsegmentation')


def batch(config: Config, root: Path, split: str) -> dict:
    """The two images of a split through the config's own pipeline, at a quarter of the size."""
    from mmseg.registry import DATASETS

    settings = copy.deepcopy(config[f'{split}_dataloader'].dataset)
    settings.data_root = str(root)
    for step in settings.pipeline:
        if 'scale' in step:
            step.scale = (512, 128)
        if 'crop_size' in step:
            step.crop_size = (128, 128)
    dataset = DATASETS.build(settings)
    assert len(dataset) == 2
    return pseudo_collate([dataset[0], dataset[1]])


@pytest.mark.parametrize('size', 'ts')
def test_segmentor_trains_and_predicts(
        size: str, load: Callable[[str], Config], ade20k: Path) -> None:
    from mmseg.registry import MODELS
    from mmseg.utils import register_all_modules

    config = load(f'segmentation/upernet_laplacian_{size}_ade20k.py')
    register_all_modules(init_default_scope=False)
    config.model.data_preprocessor.size = (128, 128)
    # No block is left out by chance.
    config.model.backbone.drop_path_rate = 0.
    model = MODELS.build(config.model)
    model.init_weights()
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    # A step of AdamW that is not lost in float32 beside a norm's weight.
    for group in wrapper.param_groups:
        group['lr'] = 1e-3
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = {name: value.item() for name, value in model.train().train_step(
        batch(config, ade20k, 'train'), wrapper).items()}
    # About the logarithm of the classes before training, and 0.4 of it.
    assert losses['decode.loss_ce'] == pytest.approx(math.log(150), rel=0.3)
    assert losses['aux.loss_ce'] == pytest.approx(0.4 * math.log(150), rel=0.3)
    still = [name for name, parameter in model.named_parameters()
             if torch.equal(before[name], parameter)]
    assert still == []

    with torch.no_grad():
        samples = model.eval().test_step(batch(config, ade20k, 'val'))
    for sample in samples:
        assert sample.pred_sem_seg.data.shape == sample.gt_sem_seg.data.shape == (1, 128, 160)
        assert sample.seg_logits.data.shape == (150, 128, 160)
        assert set(sample.gt_sem_seg.data.unique().tolist()) == {0, 149, 255}
