"""Frozen stages: nothing of them changes, and nothing of them is random (B27)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mmlaplacian import LaplacianFormer

FROZEN = {
    -1: (),
    0: ('stages.0.patch_embed.', ),
    1: ('stages.0.', ),
    2: ('stages.0.', 'stages.1.'),
    3: ('stages.0.', 'stages.1.', 'stages.2.'),
    4: ('stages.0.', 'stages.1.', 'stages.2.', 'stages.3.'),
}


def step(model: LaplacianFormer) -> None:
    """One step of SGD with momentum and weight decay on all that can be trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.05)
    sum(out.square().mean() for out in model(torch.randn(2, 3, 40, 32))).backward()
    optimizer.step()


@pytest.mark.parametrize('frozen_stages', FROZEN)
def test_b27_frozen_stay_bit_identical(build: Callable[..., LaplacianFormer],
                                       frozen_stages: int) -> None:
    model = build(frozen_stages=frozen_stages, drop_rate=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        assert model.train() is model
        step(model)
    frozen = FROZEN[frozen_stages]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in before if not name.startswith(frozen)}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in trained), name


@pytest.mark.parametrize('frozen_stages', FROZEN)
def test_b27_modes(build: Callable[..., LaplacianFormer], frozen_stages: int) -> None:
    model = build(frozen_stages=frozen_stages)
    for mode in (True, False, True):
        model.train(mode)
        for name, module in model.named_modules():
            frozen = f'{name}.'.startswith(FROZEN[frozen_stages])
            assert module.training == (mode and not frozen), name


def test_b27_drop_path_and_dropout_are_inactive_in_frozen_blocks(
        build: Callable[..., LaplacianFormer]) -> None:
    model = build(frozen_stages=2, drop_path_rate=0.6, drop_rate=0.5).train()
    x = torch.randn(4, 3, 32, 32)
    first, second = model(x), model(x)
    # The output norms of frozen stages train, but are not random.
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])


def test_frozen_stages_past_the_last_built_one(build: Callable[..., LaplacianFormer]) -> None:
    model = build(frozen_stages=4, out_indices=(1, )).train()
    assert {name for name, p in model.named_parameters() if p.requires_grad} \
        == {'norm1.weight', 'norm1.bias'}


@pytest.mark.parametrize(('value', 'error'), [(-2, ValueError), (5, ValueError),
                                              (1.0, TypeError), ('1', TypeError),
                                              (None, TypeError), (True, TypeError)])
def test_b27_bad_values(arch: dict, value: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        LaplacianFormer(arch, frozen_stages=value)
    message = str(caught.value)
    assert 'frozen_stages must be' in message and '-1' in message
    assert f'got {value!r}' in message
