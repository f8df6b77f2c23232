"""Layer-wise decay: the rate of every layer, the default constructor's rules, refusals."""

from __future__ import annotations

import re

import pytest
import torch
from mmengine.optim import OptimWrapper, build_optim_wrapper
from torch import nn

from mmlaplacian import LaplacianFormer, LayerDecayOptimWrapperConstructor

RATE = 0.5
RULES = dict(norm_decay_mult=0., bias_decay_mult=0., dwconv_decay_mult=0.)


class Model(nn.Module):
    """A backbone of 1, 2, 1 and 1 blocks, so of 7 layers, and a head."""

    def __init__(self, frozen_stages: int = -1) -> None:
        super().__init__()
        self.backbone = LaplacianFormer(
            dict(embed_dims=(8, 8, 8, 8), depths=(1, 2, 1, 1), num_heads=(1, 1, 1, 1),
                 mlp_ratios=(1, 1, 1, 1)), frozen_stages=frozen_stages)
        self.head = nn.Linear(8, 2)


def wrap(model: nn.Module, rate: object = RATE, lr: float | None = 1.,
         **options: object) -> OptimWrapper:
    optimizer = dict(type='AdamW', weight_decay=0.05, **({} if lr is None else dict(lr=lr)))
    return build_optim_wrapper(model, dict(
        optimizer=optimizer, constructor='LayerDecayOptimWrapperConstructor',
        paramwise_cfg=dict(layer_decay_rate=rate, **RULES, **options)))


def by_name(model: nn.Module, wrapper: OptimWrapper, key: str) -> dict[str, float]:
    values = {parameter: group[key] for group in wrapper.optimizer.param_groups
              for parameter in group['params']}
    return {name: values[parameter] for name, parameter in model.named_parameters()
            if parameter in values}


def test_rate_of_every_layer() -> None:
    model = Model()
    expected = {
        'backbone.stages.0.patch_embed.': 6, 'backbone.stages.0.blocks.0.': 5,
        'backbone.stages.1.patch_embed.': 4, 'backbone.stages.1.blocks.0.': 4,
        'backbone.stages.1.blocks.1.': 3,
        'backbone.stages.2.patch_embed.': 2, 'backbone.stages.2.blocks.0.': 2,
        'backbone.stages.3.patch_embed.': 1, 'backbone.stages.3.blocks.0.': 1,
        'backbone.norm': 0, 'head.': 0,
    }
    rates = by_name(model, wrap(model), 'lr')
    assert len(rates) == len(list(model.parameters()))
    for name, rate in rates.items():
        exponent, = (value for start, value in expected.items() if name.startswith(start))
        assert rate == RATE ** exponent, name


def test_keeps_the_default_weight_decay() -> None:
    model = Model()
    default = build_optim_wrapper(model, dict(
        optimizer=dict(type='AdamW', lr=1., weight_decay=0.05), paramwise_cfg=RULES))
    own = by_name(model, wrap(model), 'weight_decay')
    assert own == by_name(model, default, 'weight_decay')
    assert set(own.values()) == {0., 0.05}


def test_rate_one_changes_nothing() -> None:
    model = Model()
    assert set(by_name(model, wrap(model, rate=1), 'lr').values()) == {1.}


def test_multipliers_of_custom_keys_multiply() -> None:
    model = Model()
    rates = by_name(model, wrap(model, custom_keys=dict(patch_embed=dict(lr_mult=0.1))), 'lr')
    assert rates['backbone.stages.0.patch_embed.proj.weight'] == pytest.approx(0.1 * RATE ** 6)
    assert rates['backbone.stages.0.blocks.0.norm1.weight'] == RATE ** 5


def test_frozen_stages_are_left_out() -> None:
    model = Model(frozen_stages=1)
    rates = by_name(model, wrap(model), 'lr')
    assert set(rates) == {name for name, parameter in model.named_parameters()
                          if parameter.requires_grad}
    assert not any(name.startswith('backbone.stages.0.') for name in rates)
    assert min(rates.values()) == RATE ** 4


def test_a_wrapped_model_is_unwrapped() -> None:
    model = Model()
    wrapped = nn.Module()
    wrapped.module = model
    assert by_name(model, wrap(wrapped), 'lr') == by_name(model, wrap(model), 'lr')


def test_steps_are_smaller_near_the_image() -> None:
    """AdamW's first step is the learning rate, whatever the gradient."""
    model = Model()
    wrapper = wrap(model, lr=1e-3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = sum(parameter.sum() for parameter in model.parameters())
    wrapper.update_params(loss)
    for name in ('backbone.stages.0.patch_embed.norm.bias', 'head.bias'):
        moved = before[name] - model.get_parameter(name).detach()
        expected = 1e-3 * (1 if name == 'head.bias' else RATE ** 6)
        torch.testing.assert_close(moved, torch.full_like(moved, expected), rtol=1e-2, atol=0)


@pytest.mark.parametrize(('rate', 'error'), [
    (0, ValueError), (1.01, ValueError), (-0.5, ValueError), (float('nan'), ValueError),
    ('0.9', TypeError), (None, TypeError), (True, TypeError)])
def test_refuses_a_rate(rate: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=re.escape(f'a number in (0, 1], got {rate!r}')):
        wrap(Model(), rate=rate)


def test_refuses_an_optimizer_without_lr() -> None:
    with pytest.raises(ValueError, match='needs the lr of the optimizer'):
        wrap(Model(), lr=None)


def test_refuses_missing_options() -> None:
    with pytest.raises(TypeError, match='must have layer_decay_rate'):
        LayerDecayOptimWrapperConstructor(dict(optimizer=dict(type='AdamW', lr=1.)))


@pytest.mark.parametrize('backbone', [None, nn.Linear(2, 2)])
def test_refuses_another_backbone(backbone: nn.Module | None) -> None:
    model = nn.Module()
    model.backbone = backbone
    model.head = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=f'got Module with the backbone {type(backbone).__name__}'):
        wrap(model)
