"""Every shipped config: it parses, builds, and trains each of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, nn

from mmlaplacian import LaplacianFormer

CONFIGS = Path(__file__).resolve().parents[1] / 'configs'
FILES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob('*.py'))
# What lies in _base_ is a part, not a config to run.
COMPLETE = [name for name in FILES if not name.startswith('_base_')]


@cache
def load(name: str) -> Config:
    return Config.fromfile(CONFIGS / name)


@cache
def build(name: str) -> nn.Module:
    """The detector in training mode, built once a config."""
    from mmdet.registry import MODELS as DETECTORS
    with DefaultScope.overwrite_default_scope('mmdet'):
        return DETECTORS.build(load(name).model).train()


def dense_head(model: nn.Module) -> nn.Module:
    """The head on the neck's maps: the RPN of a two-stage detector."""
    return model.rpn_head if hasattr(model, 'rpn_head') else model.bbox_head


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with DefaultScope.overwrite_default_scope('mmdet'):
        yield


@pytest.mark.parametrize('name', FILES)
def test_parses(name: str) -> None:
    assert load(name).optim_wrapper.optimizer.type == 'AdamW'


def test_there_are_configs() -> None:
    assert {'mask_rcnn_laplacian_t.py', 'retinanet_laplacian_t.py',
            'demo/mask_rcnn_laplacian_shapes.py'} <= set(COMPLETE)


@pytest.mark.parametrize('name', COMPLETE)
def test_b32_carries_its_imports_and_builds_through_the_registry(name: str) -> None:
    config = load(name)
    assert config.custom_imports == dict(imports=['mmlaplacian'], allow_failed_imports=False)
    assert config.default_scope == 'mmdet'
    assert config.model.backbone.type == 'LaplacianFormer'
    assert type(build(name).backbone) is LaplacianFormer


@pytest.mark.parametrize('name', COMPLETE)
def test_backbone_is_ready_for_a_checkpoint(name: str) -> None:
    """One --cfg-options entry names the file; None trains from scratch."""
    config = copy.deepcopy(load(name))
    assert config.model.backbone.init_cfg == dict(type='Pretrained', checkpoint=None)
    config.merge_from_dict({'model.backbone.init_cfg.checkpoint': 'missing.pth'})
    with pytest.raises(FileNotFoundError, match='missing.pth'):
        MODELS.build(config.model.backbone).init_weights()


@pytest.mark.parametrize('name', COMPLETE)
def test_weight_decay(name: str) -> None:
    """None on norms, biases and depth-wise weights, 0.05 on the rest; all are optimised."""
    model = build(name)
    groups = build_optim_wrapper(model, load(name).optim_wrapper).optimizer.param_groups
    decay = {}
    for group in groups:
        for parameter in group['params']:
            assert parameter not in decay
            decay[parameter] = group['weight_decay']
    counts = dict(norm=0, bias=0, depthwise=0, decayed=0)
    for module_name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm | nn.modules.batchnorm._BatchNorm | nn.GroupNorm):
                kind = 'norm'
            elif own_name == 'bias':
                kind = 'bias'
            elif isinstance(module, nn.Conv2d) and module.groups == module.in_channels > 1:
                kind = 'depthwise'
            else:
                kind = 'decayed'
            counts[kind] += 1
            assert decay.pop(parameter) == (0.05 if kind == 'decayed' else 0.), \
                f'{module_name}.{own_name}'
    assert not decay and all(counts.values())


@pytest.mark.parametrize('name', COMPLETE)
def test_b31_every_parameter_gets_a_gradient(name: str) -> None:
    model = build(name)
    torch.manual_seed(0)
    maps = model.neck(model.backbone(torch.randn(2, 3, 64, 64)))
    outputs: list[Tensor] = [out for outs in dense_head(model)(maps) for out in outs]
    sum(out.square().sum() for out in outputs).backward()
    parts = dict(backbone=model.backbone, neck=model.neck, dense_head=dense_head(model))
    unused = [f'{part}.{name}' for part, module in parts.items()
              for name, parameter in module.named_parameters() if parameter.grad is None]
    assert unused == []


@pytest.mark.parametrize('name', COMPLETE)
def test_anchors_fit_the_maps(name: str) -> None:
    """One anchor stride for each map of the neck, and the one the map has."""
    model = build(name)
    with torch.no_grad():
        maps = model.neck(model.backbone(torch.randn(1, 3, 128, 128)))
    strides = [stride for stride, _ in dense_head(model).prior_generator.strides]
    assert [out.shape[-1] for out in maps] == [-(-128 // stride) for stride in strides]
