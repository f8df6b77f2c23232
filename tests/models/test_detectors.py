"""mmdet's detectors on the backbone, at reduced size: odd images, multi-scale, batch mates."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.registry import MODELS, TRANSFORMS
from mmdet.structures import DetDataSample
from mmdet.utils import register_all_modules
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmengine.structures import InstanceData
from torch import nn

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
CHANNELS = 16
Build = Callable[..., nn.Module]


@functools.cache
def config(name: str) -> Config:
    return Config.fromfile(CONFIGS / name)


def reduced(name: str, arch: dict) -> ConfigDict:
    """The model of a config with a small backbone, narrow heads and few proposals."""
    model = copy.deepcopy(config(name).model)
    stages = model.backbone.get('out_indices', (0, 1, 2, 3))
    model.backbone.update(arch=arch, drop_path_rate=0.)
    model.neck.update(in_channels=[arch['embed_dims'][i] for i in stages], out_channels=CHANNELS)
    if 'rpn_head' not in model:
        model.bbox_head.update(in_channels=CHANNELS, feat_channels=CHANNELS, stacked_convs=1,
                               num_classes=2)
        model.test_cfg.update(score_thr=0., max_per_img=20)
        return model
    model.rpn_head.update(in_channels=CHANNELS, feat_channels=CHANNELS)
    heads = model.roi_head
    for extractor in (heads.bbox_roi_extractor, heads.mask_roi_extractor):
        extractor.out_channels = CHANNELS
    heads.bbox_head.update(in_channels=CHANNELS, fc_out_channels=32, num_classes=2)
    heads.mask_head.update(in_channels=CHANNELS, conv_out_channels=CHANNELS, num_convs=1,
                           num_classes=2)
    model.train_cfg.rpn_proposal.update(nms_pre=50, max_per_img=20)
    model.train_cfg.rcnn.sampler.num = 16
    model.test_cfg.rpn.update(nms_pre=50, max_per_img=20)
    model.test_cfg.rcnn.update(score_thr=0., max_per_img=10)
    return model


@pytest.fixture(scope='module', autouse=True)
def scope() -> Iterator[None]:
    register_all_modules(init_default_scope=False)
    with DefaultScope.overwrite_default_scope('mmdet'):
        yield


@pytest.fixture
def detector(arch: dict) -> Build:
    """``detector(name)``: the reduced model of a config, the same weights at every call."""

    def detector(name: str) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = MODELS.build(reduced(name, arch))
            model.init_weights()
        return model

    return detector


def image(height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(seed))


def sample(height: int, width: int) -> DetDataSample:
    """One object over the middle half."""
    shapes = ('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape')
    made = DetDataSample(metainfo=dict(**dict.fromkeys(shapes, (height, width)), img_id=0,
                                       scale_factor=(1., 1.)))
    made.gt_instances = InstanceData(
        bboxes=torch.tensor([[width / 4, height / 4, width * 3 / 4, height * 3 / 4]]),
        labels=torch.tensor([1]))
    return made


@pytest.mark.parametrize('size', [(250, 333), (33, 65)])
def test_b11_neck_and_head_on_odd_sizes(detector: Build, size: tuple[int, int]) -> None:
    """Without the preprocessor, which pads to multiples of 32: the maps themselves are odd."""
    model = detector('retinanet_laplacian_t.py').train()
    height, width = size
    pixels = (image(height, width)[None].float() - 128) / 64
    maps = model.extract_feat(pixels)
    expected = [(-(-height // stride), -(-width // stride)) for stride in (8, 16, 32, 64, 128)]
    assert [tuple(out.shape[-2:]) for out in maps] == expected
    losses = model.loss(pixels, [sample(height, width)])
    total = sum(sum(values) for values in losses.values())
    assert 0 < total.item() < 20
    total.backward()
    # A rectified map may be dead where it has 1 x 1 px, but is never without a graph.
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert model.backbone.stages[0].patch_embed.proj.weight.grad.abs().max() > 0

    with torch.no_grad():
        found, = model.eval().predict(pixels, [sample(height, width)])
    boxes = found.pred_instances.bboxes
    assert len(boxes) == 20
    assert (boxes >= 0).all() and (boxes <= torch.tensor([width, height] * 2)).all()


def test_b11_multi_scale_training(detector: Build) -> None:
    """Three iterations through the multi-scale pipeline, its scales made small and odd."""
    name = 'mask_rcnn_laplacian_t_3x_ms.py'
    steps = copy.deepcopy(config(name).train_dataloader.dataset.pipeline[1:])
    resize = next(step for step in steps if step['type'] == 'RandomChoiceResize')
    resize['scales'] = [(65, 97), (81, 118), (99, 150)]
    pipeline = Compose([TRANSFORMS.build(step) for step in steps])
    state = np.random.get_state()
    np.random.seed(3)
    batches = [[pipeline(dict(
        img=image(100, 150, seed).permute(1, 2, 0).numpy(), img_id=seed, img_path='',
        img_shape=(100, 150), ori_shape=(100, 150),
        instances=[dict(bbox=[30, 20, 90, 80], bbox_label=1, ignore_flag=0,
                        mask=[[30, 20, 90, 20, 90, 80, 30, 80]])]))
        for seed in (2 * iteration, 2 * iteration + 1)] for iteration in range(3)]
    np.random.set_state(state)
    sizes = {tuple(entry['inputs'].shape[1:]) for entries in batches for entry in entries}
    assert sizes == {(65, 97), (79, 118), (99, 149)}

    model = detector(name).train()
    wrapper = build_optim_wrapper(model, config(name).optim_wrapper)
    torch.manual_seed(0)
    for entries in batches:
        before = {key: value.clone() for key, value in model.backbone.state_dict().items()}
        losses = model.train_step(dict(inputs=[entry['inputs'] for entry in entries],
                                       data_samples=[entry['data_samples'] for entry in entries]),
                                  wrapper)
        assert {'loss_rpn_cls', 'loss_cls', 'loss_mask'} <= set(losses)
        assert all(math.isfinite(value) for value in losses.values())
        assert not [key for key, value in model.backbone.state_dict().items()
                    if torch.equal(before[key], value)]


def predictions(model: nn.Module, images: list[torch.Tensor]) -> list[InstanceData]:
    samples = [sample(*pixels.shape[1:]) for pixels in images]
    with torch.no_grad():
        return [found.pred_instances
                for found in model.eval().test_step(dict(inputs=images, data_samples=samples))]


@pytest.mark.parametrize('name', ['retinanet_laplacian_t.py', 'mask_rcnn_laplacian_t.py'])
def test_b40_detections_do_not_depend_on_a_mate_of_the_same_size(detector: Build,
                                                                 name: str) -> None:
    model = detector(name)
    head = model.bbox_head.retina_cls if 'retinanet' in name else model.rpn_head.rpn_cls
    # Scores of an untrained head are alike, and rounding would decide their order.
    nn.init.normal_(head.weight)
    one, other = image(96, 128, 1), image(96, 128, 2)
    alone, = predictions(model, [one])
    together, mate = predictions(model, [one, other])
    assert len(alone) == len(together) > 5
    torch.testing.assert_close(together.scores, alone.scores, rtol=0, atol=1e-4)
    torch.testing.assert_close(together.bboxes, alone.bboxes, rtol=0, atol=1e-2)
    assert torch.equal(together.labels, alone.labels)
    assert (mate.scores - alone.scores[:len(mate)]).abs().max() > 1e-3 \
        or (mate.bboxes - alone.bboxes[:len(mate)]).abs().max() > 1


def test_b40_a_larger_mate_changes_detections(detector: Build) -> None:
    """What README says of padding: the reason why shipped loaders evaluate image by image."""
    model = detector('retinanet_laplacian_t.py')
    nn.init.normal_(model.bbox_head.retina_cls.weight)
    one = image(96, 128, 1)
    alone, = predictions(model, [one])
    padded, _ = predictions(model, [one, image(160, 224, 2)])
    assert padded.scores.isfinite().all() and padded.bboxes.isfinite().all()
    assert (padded.scores - alone.scores).abs().max() > 1e-3
