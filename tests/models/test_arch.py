"""The sizes of the family, and arch dicts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mmengine.config import ConfigDict
from torch import Tensor, nn

from mmlaplacian import LaplacianFormer
from mmlaplacian.models import attention
from mmlaplacian.models.arch import ARCH_KEYS, ARCHS, resolve_arch

# Millions of parameters with a 1000-way head and GMACs at 224 px, of linear and convolution
# layers; then what arXiv 2604.20368 publishes.
FAMILY = {
    'tiny': (12.16, 2.11, 12.1, 2.1),
    'small': (25.76, 4.75, 25.7, 4.8),
    'medium': (46.53, 7.41, 46.3, 7.43),
    'large': (63.34, 11.15, 63.1, 11.2),
    'huge': (78.51, 15.48, 78.5, 15.5),
}


@pytest.fixture
def only_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves the operator out, which no layer counts: the meta device is slow on it."""
    monkeypatch.setattr(attention, 'nystrom_attention', lambda q, k, v, landmarks, **_: v)


def count_macs(model: nn.Module, x: Tensor) -> int:
    """Multiply-accumulates of the linear and convolution layers in one forward."""
    macs = 0

    def add(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal macs
        # All but the first dimension of a weight is summed over for an output value.
        macs += output.numel() * module.weight[0].numel()

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(add)
    model(x)
    return macs


@pytest.mark.parametrize('arch', FAMILY)
def test_parameters_and_gmacs(arch: str, only_layers: None) -> None:
    with torch.device('meta'):
        backbone = LaplacianFormer(arch, out_indices=(3, ))
        head = nn.Linear(backbone.embed_dims[-1], 1000)
        gmacs = count_macs(backbone, torch.empty(1, 3, 224, 224)) / 1e9
    params = sum(p.numel() for m in (backbone, head) for p in m.parameters()) / 1e6
    own_params, own_gmacs, published_params, published_gmacs = FAMILY[arch]
    assert params == pytest.approx(own_params, rel=0.01)
    assert gmacs == pytest.approx(own_gmacs, rel=0.01)
    assert params == pytest.approx(published_params, rel=0.01)
    assert gmacs == pytest.approx(published_gmacs, rel=0.02)


def test_family_has_heads_of_32_channels() -> None:
    assert set(ARCHS) == set(FAMILY)
    for settings in ARCHS.values():
        assert [c // h for c, h in zip(settings['embed_dims'], settings['num_heads'],
                                       strict=True)] == [32] * 4


@pytest.mark.parametrize('container', [dict, ConfigDict])
@pytest.mark.parametrize('values', [list, tuple])
def test_dict_gives_the_layers_it_names(arch: dict, container: type, values: type) -> None:
    model = LaplacianFormer(container({key: values(arch[key]) for key in arch}))
    for index, stage in enumerate(model.stages):
        channels = arch['embed_dims'][index]
        assert stage.patch_embed.proj.out_channels == channels
        assert len(stage.blocks) == arch['depths'][index]
        for block in stage.blocks:
            assert block.attn.num_heads == arch['num_heads'][index]
            assert block.mlp.fc1.out_features == channels * arch['mlp_ratios'][index]


def test_name_is_a_copy() -> None:
    resolve_arch('tiny')['depths'] = (1, 1, 1, 1)
    assert resolve_arch('tiny')['depths'] == (2, 2, 2, 2)


@pytest.mark.parametrize(('bad', 'error'), [('tyni', ValueError), ('', ValueError),
                                            (None, TypeError), (3, TypeError),
                                            (['tiny'], TypeError)])
def test_bad_arch_names_every_choice(bad: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        LaplacianFormer(arch=bad)
    assert f'got {bad!r}' in str(caught.value)
    for word in (*ARCHS, *ARCH_KEYS):
        assert word in str(caught.value)


@pytest.mark.parametrize('missing', ARCH_KEYS)
def test_missing_key(arch: dict, missing: str) -> None:
    del arch[missing]
    with pytest.raises(ValueError, match='exactly the keys') as caught:
        LaplacianFormer(arch)
    assert str(ARCH_KEYS) in str(caught.value) and str(tuple(arch)) in str(caught.value)


def test_unknown_key(arch: dict) -> None:
    with pytest.raises(ValueError, match="exactly the keys .* got .*'sr_ratios'"):
        LaplacianFormer(dict(arch, sr_ratios=(8, 4, 2, 1)))


@pytest.mark.parametrize('key', ARCH_KEYS)
@pytest.mark.parametrize(('value', 'error'), [
    ((1, 2, 3), ValueError), ((4, ) * 5, ValueError), ('2222', ValueError), (2, ValueError),
    ((8, 8, 8, 0), ValueError), ((8, 8, 8, 8.), TypeError), ((8, 8, True, 8), TypeError),
    ((8, None, 8, 8), TypeError)])
def test_bad_values_of_a_key(arch: dict, key: str, value: object,
                             error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        LaplacianFormer(dict(arch, **{key: value}))
    message = str(caught.value)
    assert f'arch[{key!r}]' in message and '>= 1' in message
    bad = next((v for v in value if not v or type(v) is not int), value) \
        if isinstance(value, tuple) else value
    assert f'got {bad!r}' in message


def test_heads_that_do_not_divide_the_channels(arch: dict) -> None:
    with pytest.raises(ValueError) as caught:
        LaplacianFormer(dict(arch, num_heads=(1, 2, 5, 4)))
    assert str(caught.value) == "arch['num_heads'][2] must divide arch['embed_dims'][2]=24, got 5"
