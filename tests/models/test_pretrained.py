"""Pretrained files: what matches is loaded, what does not is said (B30)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.registry import DefaultScope
from torch import Tensor, nn

from mmlaplacian import LaplacianFormer

HEAD = {'head.fc.weight': torch.ones(10, 32), 'head.fc.bias': torch.ones(10)}


@pytest.fixture
def weights(build: Callable[..., LaplacianFormer]) -> dict[str, Tensor]:
    """The tensors of a backbone that the tests save and look for."""
    return build().state_dict()


@pytest.fixture
def save(tmp_path: Path) -> Callable[[object], str]:
    def save(content: object) -> str:
        torch.save(content, tmp_path / 'weights.pth')
        return str(tmp_path / 'weights.pth')

    return save


@pytest.fixture
def retinanet(arch: dict) -> Callable[..., nn.Module]:
    """``retinanet(**init_cfg)``: a detector whose ``init_weights`` loads the file."""
    from mmdet.registry import MODELS

    config = dict(
        type='RetinaNet',
        backbone=dict(type='LaplacianFormer', arch=arch, out_indices=(1, 2, 3)),
        neck=dict(type='FPN', in_channels=[16, 24, 32], out_channels=8, num_outs=5),
        bbox_head=dict(
            type='RetinaHead', num_classes=2, in_channels=8, feat_channels=8, stacked_convs=1))

    def build(**init_cfg: object) -> nn.Module:
        backbone = dict(config['backbone'], init_cfg=dict(type='Pretrained', **init_cfg))
        with DefaultScope.overwrite_default_scope('mmdet'):
            return MODELS.build(dict(config, backbone=backbone))

    return build


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


CONTENTS: dict[str, Callable[[dict], object]] = {
    'bare': lambda w: w,
    'state_dict, prefix, head': lambda w: dict(
        meta={}, state_dict={**prefixed('backbone.', w), **HEAD}),
    'model': lambda w: dict(model=w, epoch=3),
    'wrapper and prefix': lambda w: dict(state_dict=prefixed('module.backbone.', w)),
    'wrapper': lambda w: dict(state_dict=prefixed('module.', w)),
    'prefix, bare': lambda w: {**prefixed('backbone.', w), **HEAD},
}


@pytest.mark.parametrize(('content', 'prefix'), [
    *((content, None) for content in CONTENTS),
    ('bare', ''),
    ('state_dict, prefix, head', 'backbone.'),
    ('state_dict, prefix, head', 'backbone'),
    ('wrapper and prefix', 'backbone.'),
    ('wrapper and prefix', 'module.backbone.'),
    ('prefix, bare', 'backbone.'),
])
def test_b30_loads_every_shared_tensor(retinanet: Callable[..., nn.Module], weights: dict,
                                       save: Callable[[object], str], content: str,
                                       prefix: str | None) -> None:
    init_cfg = dict(checkpoint=save(CONTENTS[content](weights)))
    if prefix is not None:
        init_cfg['prefix'] = prefix
    model = retinanet(**init_cfg)
    model.init_weights()
    loaded = model.backbone.state_dict()
    assert len(loaded) > 90 and 'norm0.weight' not in loaded
    for name, value in loaded.items():
        assert torch.equal(value, weights[name]), name
    # The second call neither draws nor loads.
    with torch.no_grad():
        model.backbone.norm1.weight.fill_(5)
    model.init_weights()
    model.backbone.init_weights()
    assert (model.backbone.norm1.weight == 5).all()
    assert torch.equal(model.backbone.norm2.weight, weights['norm2.weight'])


@pytest.mark.parametrize('prefix', ['encoder.', 'back', 'backbone.stages'])
def test_b30_wrong_prefix(retinanet: Callable[..., nn.Module], weights: dict,
                          save: Callable[[object], str], prefix: str) -> None:
    path = save(dict(state_dict=prefixed('backbone.', weights)))
    with pytest.raises(ValueError) as caught:
        retinanet(checkpoint=path, prefix=prefix).init_weights()
    message = str(caught.value)
    assert f'no tensor of {path!r} matches LaplacianFormer under the prefix {prefix!r}' in message
    assert 'it has backbone.stages.0.patch_embed.proj.weight' in message
    assert 'the model has stages.0.patch_embed.proj.weight' in message


@pytest.mark.parametrize('content', [{}, {'state_dict': {}}, {'layer1.0.conv1.weight': HEAD},
                                     dict(HEAD), {'state_dict': prefixed('backbone.', HEAD)}])
def test_b30_nothing_matches(arch: dict, save: Callable[[object], str], content: dict) -> None:
    path = save(content)
    model = LaplacianFormer(arch, init_cfg=dict(type='Pretrained', checkpoint=path))
    with pytest.raises(ValueError, match=f'no tensor of {re.escape(repr(path))} matches'):
        model.init_weights()


def test_b30_other_shapes_are_listed(build: Callable[..., LaplacianFormer], arch: dict,
                                     save: Callable[[object], str]) -> None:
    other = build(arch=dict(arch, embed_dims=(8, 16, 24, 64)))
    path = save(other.state_dict())
    model = build(init_cfg=None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = LaplacianFormer(arch, init_cfg=dict(type='Pretrained', checkpoint=path))
    with pytest.raises(ValueError) as caught:
        model.init_weights()
    message = str(caught.value)
    assert f'{path!r} was made for another LaplacianFormer' in message
    assert 'stages.3.patch_embed.proj.weight (64, 24, 3, 3) in the file, (32, 24, 3, 3) here' \
        in message
    assert re.search(r' and \d+ more$', message)
    # Not half of it: the stages that do fit are not loaded either.
    name = 'stages.0.blocks.0.attn.qkv.weight'
    assert not torch.equal(model.state_dict()[name], before[name])


def test_b30_missing_file(arch: dict, tmp_path: Path) -> None:
    path = str(tmp_path / 'absent.pth')
    model = LaplacianFormer(arch, init_cfg=dict(type='Pretrained', checkpoint=path))
    with pytest.raises(FileNotFoundError, match='absent.pth'):
        model.init_weights()


@pytest.mark.parametrize('content', [[1, 2], torch.ones(3)])
def test_b30_no_state_dict(arch: dict, save: Callable[[object], str], content: object) -> None:
    path = save(content)
    model = LaplacianFormer(arch, init_cfg=dict(type='Pretrained', checkpoint=path))
    with pytest.raises(ValueError) as caught:
        model.init_weights()
    assert str(caught.value) == f'{path!r} must hold a state dict, got {type(content).__name__}'


@pytest.mark.parametrize('complete', [True, False])
def test_b30_says_what_was_loaded(arch: dict, weights: dict, save: Callable[[object], str],
                                  logged: list[logging.LogRecord], complete: bool) -> None:
    if not complete:
        weights = {name: value for name, value in weights.items()
                   if not name.startswith('norm')}
    model = LaplacianFormer(arch, init_cfg=dict(type='Pretrained', checkpoint=save(weights)))
    model.init_weights()
    record = next(record for record in logged if record.getMessage().startswith('loaded'))
    total = len(model.state_dict())
    assert f'loaded {len(weights)} of {total} tensors of LaplacianFormer' in record.getMessage()
    assert (record.levelno >= logging.WARNING) == (not complete)
    assert ('not in the file: norm0.weight, norm0.bias' in record.getMessage()) == (not complete)
    # What the file lacks has drawn weights.
    assert (model.norm3.weight == 1).all() or complete


def test_pretrained_goes_last_in_a_list(arch: dict, weights: dict,
                                        save: Callable[[object], str]) -> None:
    part = {name: value for name, value in weights.items() if name.startswith('stages.0.')}
    model = LaplacianFormer(arch, init_cfg=[
        dict(type='Pretrained', checkpoint=save(part)),
        dict(type='Constant', layer='Linear', val=0.5)])
    model.init_weights()
    own = model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in part.items())
    assert (own['stages.1.blocks.0.mlp.fc1.weight'] == 0.5).all()
