"""The backbone as a detector uses it."""

from __future__ import annotations

import copy
import importlib
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mmlaplacian
from mmlaplacian import LaplacianFormer

Build = Callable[..., LaplacianFormer]


def image(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """A loss that weighs every entry of every map differently."""
    return sum((out * torch.linspace(-1, 1, out.shape[1:].numel()).view(out.shape[1:])).sum()
               for out in outputs)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss(model(x)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_all_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...],
                     tolerance: float) -> None:
    """Compares each map relative to its largest value."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        error = (one - other).abs().max() / other.abs().max()
        assert error <= tolerance, f'relative error {error:.1e}'


# Input sizes


@pytest.mark.parametrize('size', [
    (112, 112), (244, 244), (460, 460), (250, 333), (33, 65), (224, 224), (800, 1333), (1, 1),
    (1, 40), (40, 1), (5, 3), (32, 31)])
@torch.no_grad()
def test_b11_any_size(build: Build, arch: dict, size: tuple[int, int]) -> None:
    outputs = build()(image(1, 3, *size))
    assert isinstance(outputs, tuple)
    assert [tuple(out.shape) for out in outputs] == [
        (1, channels, math.ceil(size[0] / stride), math.ceil(size[1] / stride))
        for channels, stride in zip(arch['embed_dims'], (4, 8, 16, 32), strict=True)]
    assert all(out.isfinite().all() and out.is_contiguous() for out in outputs)


@torch.no_grad()
def test_b11_no_state_between_sizes(build: Build) -> None:
    model = build()
    before = copy.deepcopy(model.__dict__)
    first = model(image(1, 3, 64, 96))
    model(image(2, 3, 33, 65))
    model(image(1, 3, 1, 1))
    assert_all_close(model(image(1, 3, 64, 96)), first, 0)
    assert model.__dict__.keys() == before.keys()


@torch.no_grad()
def test_published_pool_ratio_is_the_default_grid_at_224_px(build: Build) -> None:
    x = image(1, 3, 224, 224)
    grid, ratio = build(), build(pool_ratio=(8, 4, 2, 1))
    assert_all_close(ratio(x), grid(x), 1e-5)
    assert (ratio(x[..., :192])[0] - grid(x[..., :192])[0]).abs().max() > 1e-4


def test_b43_empty_batch(build: Build) -> None:
    model = build()
    x = torch.zeros(0, 3, 64, 64, requires_grad=True)
    outputs = model(x)
    loss(outputs).backward()
    assert [tuple(out.shape) for out in outputs] \
        == [(0, 8, 16, 16), (0, 16, 8, 8), (0, 24, 4, 4), (0, 32, 2, 2)]
    assert x.grad.shape == x.shape
    assert not any(p.grad.any() for p in model.parameters())


def test_integers_are_refused(build: Build) -> None:
    with pytest.raises(TypeError, match='floating-point dtype, got torch.uint8'):
        build()(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))


@pytest.mark.parametrize('shape', [(3, 32, 32), (1, 1, 32, 32), (1, 32, 32, 3), (1, 3, 0, 32),
                                   (1, 3, 32, 0), (1, 1, 3, 32, 32)])
def test_bad_shape(build: Build, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        build()(torch.zeros(shape))
    assert str(caught.value) == f'x must have shape (B, 3, H, W) with H, W >= 1, got {shape}'


@torch.no_grad()
def test_in_channels(build: Build) -> None:
    assert len(build(in_channels=5)(image(1, 5, 32, 32))) == 4


# Batch mates


@pytest.mark.parametrize('normalize', ['whiten', 'row', 'none'])
@torch.no_grad()
def test_b02_batch_mates_change_nothing(build: Build, normalize: str) -> None:
    model = build(normalize=normalize)
    own = image(1, 3, 96, 128)
    flat = torch.full_like(own, 0.3)
    bright = 100 * image(1, 3, 96, 128, seed=1)
    alone, flat_alone = model(own), model(flat)
    together = model(torch.cat([own, flat, bright]))
    assert_all_close(tuple(out[:1] for out in together), alone, 3e-6)
    assert_all_close(tuple(out[1:2] for out in together), flat_alone, 3e-6)


@torch.no_grad()
def test_b02_reported_case(build: Build) -> None:
    model = build(arch='tiny')
    images = torch.cat([image(1, 3, 224, 224), torch.full((1, 3, 224, 224), 0.3)])
    together = model(images)
    for index in range(2):
        for out, alone in zip(together, model(images[index:index + 1]), strict=True):
            torch.testing.assert_close(out[index], alone[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_nan_stays_in_its_image(build: Build) -> None:
    model = build()
    x = image(2, 3, 64, 64)
    expected = model(x[:1])
    x[1, 0, 5, 5] = torch.nan
    outputs = model(x)
    assert_all_close(tuple(out[:1] for out in outputs), expected, 1e-6)
    assert all(out[1].isnan().any() for out in outputs)


# Precision and cost


@torch.no_grad()
def test_autocast_bfloat16_is_close_to_float32(build: Build) -> None:
    model = build()
    x = image(1, 3, 96, 128)
    expected = model(x)
    with torch.autocast('cpu', torch.bfloat16):
        outputs = model(x)
    for out, other in zip(outputs, expected, strict=True):
        assert (out.float() - other).norm() / other.norm() < 2e-2


def test_autocast_bfloat16_gives_gradients(build: Build) -> None:
    model = build()
    x = image(1, 3, 64, 64)
    expected = gradients(model, x)
    with torch.autocast('cpu', torch.bfloat16):
        own = gradients(model, x)
    assert all(grad.dtype == torch.float32 for grad in own.values())
    own, expected = (torch.cat([grad.flatten() for grad in grads.values()])
                     for grads in (own, expected))
    assert (own - expected).norm() / expected.norm() < 0.1


@torch.no_grad()
def test_float64(build: Build) -> None:
    model = build()
    x = image(1, 3, 64, 96)
    outputs = model(x)
    exact = copy.deepcopy(model).double()(x.double())
    assert all(out.dtype == torch.float64 for out in exact)
    assert_all_close(tuple(out.double() for out in outputs), exact, 1e-4)


def test_builds_on_the_meta_device(arch: dict) -> None:
    with torch.device('meta'):
        model = LaplacianFormer(arch, drop_path_rate=0.3)
    assert all(p.is_meta for p in model.parameters())
    assert model.stages[3].blocks[0].drop_path.drop_prob == pytest.approx(0.3)


# Recomputing and data-parallel training


@pytest.mark.parametrize('frozen_stages', [-1, 0, 1, 2])
@pytest.mark.parametrize('drop_path_rate', [0., 0.3])
@pytest.mark.filterwarnings('error')
def test_b28_recomputing_gives_the_same_gradients(build: Build, frozen_stages: int,
                                                  drop_path_rate: float) -> None:
    x = image(3, 3, 32, 32)
    grads = []
    for with_cp in (False, True):
        model = build(frozen_stages=frozen_stages, drop_path_rate=drop_path_rate,
                      with_cp=with_cp).train()
        torch.manual_seed(0)
        grads.append(gradients(model, x))
    scale = max(grad.abs().max() for grad in grads[0].values())
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        assert grad is not None, name
        assert (grad - grads[0][name]).abs().max() <= 1e-6 * scale, name


def test_b28_recomputing_happens_once_in_training_alone(build: Build) -> None:
    calls = []
    model = build(with_cp=True)
    for stage in model.stages:
        for block in stage.blocks:
            block.attn.register_forward_hook(lambda *_: calls.append(1))
    x = image(1, 3, 32, 32)
    loss(model(x)).backward()
    assert len(calls) == 5
    calls.clear()
    loss(model.train()(x)).backward()
    assert len(calls) == 10


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A gloo group of one: the reducer checks each parameter as it does with more ranks."""
    store = distributed.FileStore(str(tmp_path / 'store'), 1)
    distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize('arguments', [
    dict(with_cp=True), dict(with_cp=True, frozen_stages=1, drop_path_rate=0.3),
    dict(out_indices=(1, 2, 3)), dict(out_indices=(0, ), with_cp=True)])
@pytest.mark.parametrize('find_unused_parameters', [False, True])
def test_b28_b31_trains_in_data_parallel(build: Build, one_rank: None, arguments: dict,
                                         find_unused_parameters: bool) -> None:
    model = build(**arguments).train()
    parallel = DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
    x = image(2, 3, 32, 32)
    for iteration in range(3):
        torch.manual_seed(iteration)
        grads = gradients(parallel, x)
        assert all(grad is not None for grad in grads.values())
    torch.manual_seed(2)
    expected = gradients(copy.deepcopy(model), x)
    assert len(expected) == len(grads)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[f'module.{name}'], grad)


# Output stages


@pytest.mark.parametrize('out_indices', [(0, 1, 2, 3), (1, 2, 3), (0, 2), (3, ), (0, ), [1, 3]])
def test_b31_every_parameter_is_used(build: Build, arch: dict,
                                     out_indices: tuple[int, ...]) -> None:
    model = build(out_indices=out_indices).train()
    x = image(1, 3, 64, 64)
    outputs = model(x)
    assert isinstance(outputs, tuple)
    assert [out.shape[1] for out in outputs] == [arch['embed_dims'][i] for i in out_indices]
    assert [out.shape[2] for out in outputs] == [16 >> i for i in out_indices]
    grads = gradients(model, x)
    assert [name for name, grad in grads.items() if grad is None or not grad.any()] == []


@torch.no_grad()
def test_b31_stages_give_the_same_maps_whatever_else_is_returned(build: Build) -> None:
    every, some = build(), build(out_indices=(0, 2))
    some.load_state_dict({name: value for name, value in every.state_dict().items()
                          if name in some.state_dict()})
    x = image(1, 3, 64, 64)
    maps = every(x)
    assert_all_close(some(x), (maps[0], maps[2]), 0)


@pytest.mark.parametrize(('value', 'error'), [
    ((4, ), ValueError), ((-1, ), ValueError), ((2, 1), ValueError), ((), ValueError),
    ((1, 1), ValueError), ((0, 1, 2, 3, 4), ValueError), (2, TypeError), ('0123', TypeError),
    (None, TypeError), ((0, '1'), TypeError), ((1., 2.), TypeError), ((True, ), TypeError)])
def test_b31_bad_out_indices(arch: dict, value: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        LaplacianFormer(arch, out_indices=value)
    assert str(caught.value) == ('out_indices must be increasing stages from 0 to 3, at least '
                                 f'one, got {value!r}')


# Other arguments


@pytest.mark.parametrize(('arguments', 'error', 'message'), [
    (dict(in_channels=0), ValueError, 'in_channels must be an integer >= 1, got 0'),
    (dict(in_channels='3'), TypeError, "in_channels must be an integer >= 1, got '3'"),
    (dict(landmark_grid=0), ValueError, 'landmark_grid must be an integer >= 1, got 0'),
    (dict(pool_ratio=8), ValueError,
     'pool_ratio must be 4 integers >= 1, one for each stage, got 8'),
    (dict(pool_ratio=(8, 4, 2)), ValueError,
     'pool_ratio must be 4 integers >= 1, one for each stage, got (8, 4, 2)'),
    (dict(pool_ratio=(8, 4, 2, 0)), ValueError, 'pool_ratio[3] must be an integer >= 1, got 0'),
    (dict(pool_ratio=(8, 4, 2, None)), TypeError, 'pool_ratio[3] must be an integer >= 1'),
    (dict(init_cfg='a.pth'), TypeError, "init_cfg must be None, a dict with the key type"),
    (dict(init_cfg=dict(checkpoint='a.pth')), TypeError, 'a dict with the key type'),
    (dict(init_cfg=dict(type='Pretrained')), ValueError, 'must have the key checkpoint'),
    (dict(init_cfg=dict(type='Pretrained', checkpoint='a', prefx='b')), ValueError, 'prefx'),
    (dict(kernel='rbf'), ValueError,
     "kernel must be one of ('laplacian', 'gaussian'), got 'rbf'"),
    (dict(kernel_scale=0), ValueError, 'kernel_scale must be positive and finite, got 0'),
    (dict(ridge=-1e-2), ValueError, 'ridge must be positive and finite, got -0.01'),
    (dict(whiten_eps='tiny'), TypeError, "whiten_eps must be a positive number, got 'tiny'"),
    (dict(solver_iters=0), ValueError, 'solver_iters must be an integer >= 1, got 0'),
    (dict(normalize='softmax'), ValueError,
     "normalize must be one of ('whiten', 'row', 'none'), got 'softmax'"),
    *((dict([(name, value)]), error, f'{name} must be {accepted}, got {value!r}')
      for name in ('drop_rate', 'drop_path_rate')
      for value, error, accepted in (
          (-0.1, ValueError, 'in [0, 1)'), (1., ValueError, 'in [0, 1)'),
          (float('nan'), ValueError, 'in [0, 1)'), ('0.1', TypeError, 'a number in [0, 1)'),
          (None, TypeError, 'a number in [0, 1)'), (True, TypeError, 'a number in [0, 1)'))),
])
def test_bad_arguments(arch: dict, arguments: dict, error: type[Exception],
                       message: str) -> None:
    with pytest.raises(error) as caught:
        LaplacianFormer(arch, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize('keyword', ['pretrained', 'norm_eval', 'qkv_bias', 'img_size'])
def test_unknown_keyword_is_refused(arch: dict, keyword: str) -> None:
    with pytest.raises(TypeError, match=keyword):
        LaplacianFormer(arch, **{keyword: True})


@torch.no_grad()
def test_every_argument_reaches_the_layers(build: Build) -> None:
    x = image(1, 3, 64, 64)
    default = build()(x)
    for change in (dict(landmark_grid=2), dict(pool_ratio=(3, 3, 2, 2)), dict(kernel='gaussian'),
                   dict(kernel_scale=1.), dict(ridge=1.), dict(whiten_eps=1.),
                   dict(solver_iters=1), dict(normalize='row'), dict(normalize='none')):
        for stage, changed in zip(default, build(**change)(x), strict=True):
            assert (changed - stage).abs().max() > 1e-5, change


def test_construction_is_silent(arch: dict, capfd: pytest.CaptureFixture) -> None:
    LaplacianFormer(arch).init_weights()
    assert capfd.readouterr() == ('', '')


# Stochastic depth


@pytest.mark.parametrize('rate', [0., 0.3])
def test_drop_path_rates_rise_linearly(arch: dict, rate: float) -> None:
    model = LaplacianFormer(arch, drop_path_rate=rate)
    rates = [block.drop_path.drop_prob for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([rate * i / 4 for i in range(5)])


def test_drop_path_and_dropout_act_in_training_alone(build: Build) -> None:
    x = image(2, 3, 32, 32)
    expected = build()(x)
    for change in (dict(drop_path_rate=0.5), dict(drop_rate=0.5)):
        model = build(**change)
        assert_all_close(model(x), expected, 0)
        torch.manual_seed(0)
        assert (model.train()(x)[3] - expected[3]).abs().max() > 1e-3


# Initialisation


def test_drawn_weights() -> None:
    torch.manual_seed(0)
    model = LaplacianFormer(dict(embed_dims=(32, 64, 64, 64), depths=(1, 1, 1, 1),
                                 num_heads=(1, 1, 1, 1), mlp_ratios=(8, 4, 4, 4)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    model.init_weights()
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all(), name
            seen.add('norm')
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if isinstance(module, nn.Linear):
                std = 0.02
            elif module.groups == module.in_channels:
                std = math.sqrt(2 / 9)  # one 3 x 3 window a channel
            else:
                std = math.sqrt(2 / (module.kernel_size[0]**2 * module.out_channels))
            weight = module.weight.detach()
            # Five standard errors of the estimates.
            tolerance = 5 / math.sqrt(2 * weight.numel())
            assert float(weight.std()) == pytest.approx(std, rel=tolerance), name
            assert abs(weight.mean()) < 5 * std / math.sqrt(weight.numel()), name
            assert (module.bias == 0).all(), name
            seen.add(type(module).__name__)
    assert seen == {'norm', 'Linear', 'Conv2d', 'DepthwiseConv'}


def test_second_init_weights_draws_nothing(arch: dict) -> None:
    model = LaplacianFormer(arch)
    model.init_weights()
    assert model.is_init
    before = copy.deepcopy(model.state_dict())
    model.init_weights()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_other_init_cfg(arch: dict) -> None:
    init_cfg = [dict(type='Constant', layer='Linear', val=0.5, bias=0.25)]
    model = LaplacianFormer(arch, init_cfg=init_cfg)
    model.init_weights()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert all((m.weight == 0.5).all() and (m.bias == 0.25).all() for m in linear)
    assert model.init_cfg == init_cfg


# Layer-wise decay


@pytest.mark.parametrize('prefix', ['', 'backbone.', 'model.backbone.'])
def test_layer_depth_of_every_parameter(build: Build, prefix: str) -> None:
    # Depths 1, 2, 1, 1: the stem, five blocks, the rest.
    expected = {
        'stages.0.patch_embed': 0, 'stages.0.blocks.0': 1,
        'stages.1.patch_embed': 2, 'stages.1.blocks.0': 2, 'stages.1.blocks.1': 3,
        'stages.2.patch_embed': 4, 'stages.2.blocks.0': 4,
        'stages.3.patch_embed': 5, 'stages.3.blocks.0': 5,
        'norm0': 6, 'norm1': 6, 'norm2': 6, 'norm3': 6,
    }
    model = build()
    for name, _ in model.named_parameters():
        key = next(key for key in expected if name.startswith(f'{key}.'))
        assert model.get_layer_depth(prefix + name, prefix) == (expected[key], 7), name
    assert model.get_layer_depth('neck.lateral_convs.0.conv.weight', 'backbone.') == (6, 7)


@pytest.mark.parametrize('out_indices', [(0, 1, 2, 3), (0, 1), (0, )])
def test_layer_depths_have_no_gap(build: Build, out_indices: tuple[int, ...]) -> None:
    model = build(out_indices=out_indices)
    depths = [model.get_layer_depth(name) for name, _ in model.named_parameters()]
    layers = [depth for depth, _ in depths]
    assert layers == sorted(layers)
    assert set(layers) == set(range(depths[0][1]))
    assert {number for _, number in depths} == {max(layers) + 1}


def test_mmpretrain_decays_by_layer(build: Build) -> None:
    from mmpretrain.engine.optimizers import LearningRateDecayOptimWrapperConstructor
    model = build()
    constructor = LearningRateDecayOptimWrapperConstructor(
        dict(optimizer=dict(type='AdamW', lr=1., weight_decay=0.05)),
        paramwise_cfg=dict(layer_decay_rate=0.5))
    groups = constructor(model).optimizer.param_groups
    rates = {group['param_name']: group['lr'] for group in groups}
    assert rates['stages.0.patch_embed.proj.weight'] == 0.5**6
    assert rates['stages.3.blocks.0.mlp.fc1.weight'] == 0.5
    assert rates['norm3.weight'] == 1


# Registry


@pytest.mark.parametrize('name', ['LaplacianFormer', 'mmlaplacian.LaplacianFormer'])
@pytest.mark.parametrize('scope', [None, 'mmengine', 'mmdet'])
def test_b32_both_names_in_every_registry(arch: dict, name: str, scope: str | None,
                                          logged: list, recwarn: pytest.WarningsRecorder) -> None:
    from mmdet.registry import MODELS as MMDET_MODELS
    logged.clear()
    with DefaultScope.overwrite_default_scope(scope):
        for registry in (MODELS, MMDET_MODELS):
            assert type(registry.build(dict(type=name, arch=arch))) is LaplacianFormer
    assert [record.getMessage() for record in logged
            if record.levelno >= logging.WARNING] == []
    assert [w for w in recwarn if 'registry' in str(w.message)] == []


def test_b32_reload() -> None:
    for _ in range(2):
        assert importlib.reload(mmlaplacian).LaplacianFormer is LaplacianFormer
    assert MODELS.get('LaplacianFormer') is LaplacianFormer


# Copies and checkpoints


@pytest.mark.parametrize('used', [False, True])
@pytest.mark.parametrize('clone', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_b33_copies_give_the_same_output(build: Build, used: bool,
                                         clone: Callable[[nn.Module], nn.Module]) -> None:
    model = build(with_cp=True, frozen_stages=1)
    x = image(1, 3, 32, 32)
    if used:
        loss(model.train()(x)).backward()
        model.eval()
    with torch.no_grad():
        assert_all_close(clone(model)(x), model(x), 0)


def test_b33_state_dict_holds_the_parameters_alone(build: Build, tmp_path: Path) -> None:
    model = build()
    loss(model.train()(image(1, 3, 32, 32))).backward()
    model.eval()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    torch.save(model.state_dict(), tmp_path / 'model.pth')
    other = build(drop_path_rate=0.2, kernel_scale=2., solver_iters=3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(tmp_path / 'model.pth', weights_only=True))
    assert all(torch.equal(value, model.state_dict()[name])
               for name, value in other.state_dict().items())
