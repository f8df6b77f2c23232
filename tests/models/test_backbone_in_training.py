"""The backbone under recomputation, autocast, freezing, other layouts and batch padding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from mmengine.runner import set_random_seed
from torch import Tensor

from mmlaplacian import LaplacianFormer

Build = Callable[..., LaplacianFormer]


def image(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: LaplacianFormer, x: Tensor) -> dict[str, Tensor | None]:
    """Gradients of a loss that weighs every entry of every map differently."""
    model.zero_grad()
    sum((out.float() * torch.linspace(-1, 1, out.shape[1:].numel()).view(out.shape[1:])).sum()
        for out in model(x)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor],
                tolerance: float) -> None:
    """Compares every gradient relative to the largest of all."""
    assert actual.keys() == expected.keys() and expected
    scale = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        assert actual[name] is not None, name
        assert (actual[name] - grad).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize('frozen_stages', [-1, 1, 2])
@pytest.mark.filterwarnings('error')
def test_b28_recomputing_under_autocast(build: Build, frozen_stages: int) -> None:
    """The recomputation runs in the dtypes of the forward, though the backward is outside."""
    x = image(2, 3, 64, 64)
    grads = []
    for with_cp in (False, True):
        model = build(frozen_stages=frozen_stages, with_cp=with_cp, drop_path_rate=0.3).train()
        torch.manual_seed(0)
        with torch.autocast('cpu', torch.bfloat16):
            outputs = model(x)
        sum(out.float().square().sum() for out in outputs).backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert_near(grads[1], grads[0], 1e-6)
    exact = build(frozen_stages=frozen_stages, drop_path_rate=0.3).train()
    torch.manual_seed(0)
    sum(out.square().sum() for out in exact(x)).backward()
    # So autocast was on: float32 gives other numbers.
    assert any(not torch.equal(grads[0][name], p.grad)
               for name, p in exact.named_parameters() if p.requires_grad)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """``randomness = dict(seed=0, deterministic=True)``, taken back afterwards."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
              torch.backends.cudnn.benchmark, torch.get_rng_state())
    set_random_seed(0, deterministic=True)
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[1:3]
    torch.set_rng_state(before[3])


@pytest.mark.parametrize('with_cp', [False, True])
def test_deterministic_mode(build: Build, deterministic: None, with_cp: bool) -> None:
    """No operator refuses, and two runs agree bit for bit."""
    assert torch.are_deterministic_algorithms_enabled()
    model = build(with_cp=with_cp, drop_path_rate=0.3).train()
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        runs.append(copy.deepcopy(gradients(model, image(2, 3, 45, 70))))
    assert all(torch.equal(runs[0][name], grad) for name, grad in runs[1].items())


@pytest.mark.parametrize('size', [(64, 96), (33, 65)])
def test_channels_last(build: Build, size: tuple[int, int]) -> None:
    model = build().train()
    x = image(2, 3, *size)
    expected, grads = model(x), copy.deepcopy(gradients(model, x))
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x = x.to(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    for out, map_ in zip(other(x), expected, strict=True):
        torch.testing.assert_close(out, map_, rtol=1e-4, atol=1e-5)
    assert_near(gradients(other, x), grads, 1e-5)


@pytest.mark.parametrize('sizes', [((250, 333), (33, 65)), ((33, 65), (250, 333))])
def test_b11_two_sizes_in_a_row_train(build: Build, sizes: tuple) -> None:
    """The gradients at a size do not depend on the size before."""
    model = build().train()
    gradients(model, image(1, 3, *sizes[0]))
    after = gradients(model, image(1, 3, *sizes[1]))
    fresh = gradients(build().train(), image(1, 3, *sizes[1]))
    assert all(torch.equal(after[name], grad) for name, grad in fresh.items())


@torch.no_grad()
def test_b40_same_size_batch_mates_change_nothing(build: Build) -> None:
    model = build()
    x = image(2, 3, 200, 300)
    for both, alone in zip(model(x), model(x[:1]), strict=True):
        torch.testing.assert_close(both[:1], alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_b40_padding_shows_and_stays_finite(build: Build) -> None:
    """What README says of padding, and that more than 80 % of it gives no NaN."""
    model = build()
    x = image(1, 3, 64, 64)
    padded = torch.zeros(1, 3, 160, 160)
    padded[..., :64, :64] = x
    assert 64 * 64 < 0.2 * 160 * 160
    outputs = model(padded)
    assert all(out.isfinite().all() for out in outputs)
    assert (outputs[0][..., :16, :16] - model(x)[0]).abs().max() > 1e-3


@torch.no_grad()
def test_b40_image_of_one_colour(build: Build) -> None:
    """Nothing but padding: all tokens but the border's are equal, the worst case of the solver."""
    for out in build()(torch.zeros(1, 3, 96, 96)):
        assert out.isfinite().all()
