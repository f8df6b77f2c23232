"""Every shipped config: it parses, builds, and trains each of its parameters.

Models are built and run on the meta device: shapes and graphs without numbers. What trains on
numbers lies in tests/configs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, PARAM_SCHEDULERS, DefaultScope
from torch import Tensor, nn

from mmlaplacian import LaplacianFormer

CONFIGS = Path(__file__).resolve().parents[1] / 'configs'
FILES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob('*.py'))
# What lies in _base_ is a part, not a config to run.
COMPLETE = [name for name in FILES if not name.startswith('_base_')]
# tests/configs/test_segmentation.py builds the others, where mmsegmentation is installed.
BUILT = [name for name in COMPLETE if not name.startswith('segmentation/')]
# Of those, the ones with a model of their own: a longer schedule has the model of the shorter.
MODELLED = [name for name in BUILT if '3x_ms' not in name]
DETECTORS = [name for name in BUILT if 'rcnn' in name or 'retinanet' in name]

SIZES = dict(t='tiny', s='small', m='medium', l='large', h='huge')
# This project's choice, the same in every task.
DROP_PATH_RATES = dict(tiny=0.1, small=0.2, medium=0.3, large=0.4, huge=0.5)
SHIPPED = {
    *(f'{family}_laplacian_{size}.py' for size in SIZES for family in ('mask_rcnn', 'retinanet')),
    *(f'mask_rcnn_laplacian_{size}_3x_ms.py' for size in SIZES),
    *(f'classification/laplacian_{size}_in1k.py' for size in SIZES),
    *(f'cascade_mask_rcnn_laplacian_{size}.py' for size in 'ts'),
    *(f'segmentation/upernet_laplacian_{size}_ade20k.py' for size in 'ts'),
    'mask_rcnn_laplacian_t_gaussian.py',
    'mask_rcnn_laplacian_t_layer_decay.py',
    'classification/laplacian_t_gaussian_in1k.py',
}


@cache
def load(name: str) -> Config:
    return Config.fromfile(CONFIGS / name)


@cache
def build(name: str) -> nn.Module:
    """The model in training mode on the meta device, built once a config."""
    config = load(name)
    registry = import_module(f'{config.default_scope}.registry').MODELS
    with DefaultScope.overwrite_default_scope(config.default_scope), torch.device('meta'):
        return registry.build(config.model).train()


def head(model: nn.Module) -> nn.Module:
    """The head on the neck's maps: the RPN of a two-stage detector."""
    for name in ('rpn_head', 'bbox_head'):
        if hasattr(model, name):
            return getattr(model, name)
    return model.head


def leaves(outputs: Tensor | tuple | list) -> Iterator[Tensor]:
    """The tensors of a nest of sequences."""
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        for output in outputs:
            yield from leaves(output)


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with DefaultScope.overwrite_default_scope('mmdet'):
        yield


@pytest.mark.parametrize('name', FILES)
def test_parses(name: str) -> None:
    assert load(name).optim_wrapper.optimizer.type == 'AdamW'


def test_there_are_configs() -> None:
    assert SHIPPED == {name for name in COMPLETE if not name.startswith('demo/')}


@pytest.mark.parametrize('name', sorted(SHIPPED))
def test_size_and_drop_path(name: str) -> None:
    """The name says the size, and the last block of that size has its rate."""
    letter = name.rpartition('laplacian_')[2].partition('_')[0].removesuffix('.py')
    settings = load(name).model.backbone
    assert settings.arch == SIZES[letter]
    assert settings.get('kernel', 'laplacian') == (
        'gaussian' if 'gaussian' in name else 'laplacian')
    with torch.device('meta'):
        backbone = MODELS.build(settings)
    rates = [block.drop_path.drop_prob for stage in backbone.stages for block in stage.blocks]
    assert rates == pytest.approx(
        [DROP_PATH_RATES[settings.arch] * i / (len(rates) - 1) for i in range(len(rates))])


@pytest.mark.parametrize('name', COMPLETE)
def test_b32_carries_its_imports_and_builds_through_the_registry(name: str) -> None:
    config = load(name)
    assert config.custom_imports == dict(imports=['mmlaplacian'], allow_failed_imports=False)
    assert config.default_scope == (
        'mmdet' if name in DETECTORS else 'mmpretrain' if name in BUILT else 'mmseg')
    assert config.model.backbone.type == 'LaplacianFormer'
    if name in BUILT:
        assert type(build(name).backbone) is LaplacianFormer


@pytest.mark.parametrize('name', COMPLETE)
def test_backbone_is_ready_for_a_checkpoint(name: str) -> None:
    """One --cfg-options entry names the file; None trains from scratch."""
    config = copy.deepcopy(load(name))
    assert config.model.backbone.init_cfg == dict(type='Pretrained', checkpoint=None)
    config.merge_from_dict({'model.backbone.init_cfg.checkpoint': 'missing.pth'})
    with pytest.raises(FileNotFoundError, match='missing.pth'), torch.device('meta'):
        MODELS.build(config.model.backbone).init_weights()


def parameter_groups(name: str) -> list[dict]:
    """The groups of the config's optimizer over the model of :func:`build`."""
    wrapper = copy.deepcopy(load(name).optim_wrapper)
    # torch has no fused step on the meta device.
    wrapper.optimizer.pop('fused', None)
    return build_optim_wrapper(build(name), wrapper).optimizer.param_groups


@pytest.mark.parametrize('name', BUILT)
def test_weight_decay(name: str) -> None:
    """None on norms, biases and depth-wise weights; all are optimised."""
    model = build(name)
    groups = parameter_groups(name)
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


@pytest.mark.parametrize('name', sorted(SHIPPED - set(BUILT)))
def test_weight_decay_of_segmentation(name: str) -> None:
    wrapper = load(name).optim_wrapper
    assert wrapper.paramwise_cfg == load('_base_/adamw_1x.py').optim_wrapper.paramwise_cfg
    assert wrapper.optimizer.weight_decay == 0.01


def test_layer_decay() -> None:
    """The tiny size has a patch embedding, 8 blocks, and what follows: 10 layers."""
    name = 'mask_rcnn_laplacian_t_layer_decay.py'
    rates = {parameter: group['lr'] for group in parameter_groups(name)
             for parameter in group['params']}
    model = build(name)
    for part, exponent in ((model.backbone.stages[0].patch_embed, 9),
                           (model.backbone.stages[0].blocks[0], 8),
                           (model.backbone.stages[1].patch_embed, 6),
                           (model.backbone.stages[3].blocks[1], 1),
                           (model.backbone.norm0, 0), (model.neck, 0), (model.roi_head, 0)):
        own = [rates[parameter] for parameter in part.parameters()]
        assert own == pytest.approx([1e-4 * 0.9 ** exponent] * len(own))


@pytest.mark.parametrize(('name', 'epoch_length', 'rates'), [
    ('mask_rcnn_laplacian_t.py', 600, {0: 1e-7, 1: 1e-4, 7: 1e-4, 8: 1e-5, 11: 1e-6}),
    ('mask_rcnn_laplacian_t_3x_ms.py', 600, {0: 1e-7, 1: 1e-4, 26: 1e-4, 27: 1e-5, 33: 1e-6}),
    ('classification/laplacian_t_in1k.py', 20,
     {0: 1e-6, 5: 5.03e-4, 10: 1e-3, 155: 5.05e-4, 299: 1e-5}),
])
def test_schedule(name: str, epoch_length: int, rates: dict[int, float]) -> None:
    """The learning rate of an epoch's first iteration."""
    config = load(name)
    optimizer = torch.optim.SGD(
        [nn.Parameter(torch.zeros(()))], lr=config.optim_wrapper.optimizer.lr)
    epochs = config.train_cfg.max_epochs
    schedulers = [
        PARAM_SCHEDULERS.build(
            dict(end=epochs, **settings) if 'end' not in settings else settings,
            default_args=dict(optimizer=optimizer, epoch_length=epoch_length))
        for settings in copy.deepcopy(config.param_scheduler)]
    seen = []
    for _ in range(epochs):
        seen.append(optimizer.param_groups[0]['lr'])
        for iteration in range(epoch_length):
            optimizer.step()
            for scheduler in schedulers:
                if not scheduler.by_epoch or iteration == epoch_length - 1:
                    scheduler.step()
    assert {epoch: seen[epoch] for epoch in rates} == pytest.approx(rates, rel=0.01)


@pytest.mark.parametrize('size', SIZES)
def test_3x_trains_the_model_of_1x(size: str) -> None:
    assert load(f'mask_rcnn_laplacian_{size}_3x_ms.py').model == load(
        f'mask_rcnn_laplacian_{size}.py').model


def test_batch_sizes() -> None:
    """8 GPUs are what the learning rates are for."""
    for name in SHIPPED:
        config = load(name)
        assert 8 * config.train_dataloader.batch_size == config.auto_scale_lr.base_batch_size


@pytest.mark.parametrize('name', MODELLED)
def test_b31_every_parameter_gets_a_gradient(name: str) -> None:
    model = build(name)
    maps = model.neck(model.backbone(torch.empty(2, 3, 64, 64, device='meta')))
    sum(out.square().sum() for out in leaves(head(model)(maps))).backward()
    parts = dict(backbone=model.backbone, neck=model.neck, head=head(model))
    unused = [f'{part}.{name}' for part, module in parts.items()
              for name, parameter in module.named_parameters() if parameter.grad is None]
    assert unused == []


@pytest.mark.parametrize('name', [name for name in MODELLED if name in DETECTORS])
def test_anchors_fit_the_maps(name: str) -> None:
    """One anchor stride for each map of the neck, and the one the map has."""
    model = build(name)
    with torch.no_grad():
        maps = model.neck(model.backbone(torch.empty(1, 3, 128, 128, device='meta')))
    strides = [stride for stride, _ in head(model).prior_generator.strides]
    assert [out.shape[-1] for out in maps] == [-(-128 // stride) for stride in strides]


@pytest.mark.parametrize('arch', DROP_PATH_RATES)
def test_every_size_runs(arch: str) -> None:
    """With numbers, not on the meta device: what the deepest size returns is finite."""
    torch.manual_seed(0)
    with torch.device('meta'):
        backbone = LaplacianFormer(arch).eval()
    backbone = backbone.to_empty(device='cpu')
    backbone.init_weights()
    with torch.no_grad():
        maps = backbone(torch.randn(1, 3, 64, 48))
    assert [tuple(out.shape) for out in maps] == [
        (1, 64, 16, 12), (1, 128, 8, 6), (1, 320, 4, 3), (1, 512, 2, 2)]
    for out in maps:
        # A LayerNorm closes every map.
        assert out.mean(1).abs().max() < 1e-4
        assert out.var(1, correction=0).sub(1).abs().max() < 0.1
