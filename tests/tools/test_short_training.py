"""The tasks, attentions and trainings that the trained claims share, in ``tools/analysis``."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn


@pytest.fixture(scope='module')
def modules(tool: Callable[[str], ModuleType], module_path) -> Callable[[str], ModuleType]:
    return lambda name: tool(f'analysis/{name}')


@pytest.fixture(scope='module')
def module_path():
    """The modules import each other, as they do beside the command that is run."""
    import sys
    from pathlib import Path
    folder = str(Path(__file__).resolve().parents[2] / 'tools/analysis')
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_token_can_be_told_its_colour_and_only_by_the_carrier(modules, monkeypatch):
    task = modules('recall_task')
    monkeypatch.setattr(task, 'NOISE', 0.)
    for image, wanted in zip(*task.batch(20, generator()), strict=True):
        types, shown = image[..., :task.TYPES].argmax(-1), image[..., task.TYPES:]
        told = {}
        for row, column in shown.sum(-1).nonzero().tolist():
            told.setdefault(types[row, column].item(), []).append(
                (row, column, shown[row, column].argmax().item()))
        assert set(told) == set(range(task.TYPES))
        for kind, patch in told.items():
            (top, left, colour), *_, (bottom, right, _) = patch
            # Two by two tokens in the middle of a region.
            assert (bottom - top, right - left, len(patch)) == (1, 1, 4)
            assert (top % 4, left % 4) == (1, 1) and {c for *_, c in patch} == {colour}
            assert (wanted[types == kind] == colour).all()


@pytest.mark.parametrize('side', [128, 64])
def test_images_show_the_same_layout_as_tokens(modules, side):
    tokens_task, images_task = modules('recall_task'), modules('distant_parts')
    _, of_tokens = tokens_task.batch(3, generator(1))
    images, of_cells = images_task.batch(3, generator(1), side)
    assert images.shape == (3, 3, side, side)
    assert of_cells.repeat_interleave(128 // side, 1).repeat_interleave(128 // side, 2).equal(
        of_tokens)
    width = side // 4
    _, colours, carriers = tokens_task.layout(3, generator(1))
    for image, colour, carrier in zip(images, colours, carriers, strict=True):
        for own, region in zip(colour, carrier, strict=True):
            y, x = (width // 2 + width * place for place in divmod(int(region), 4))
            seen = image[:, y - 2:y + 2, x - 2:x + 2].mean((1, 2)) + .5
            assert (seen - images_task.PALETTE).abs().sum(1).argmin() == own


def test_stripes_tell_the_type(modules):
    task = modules('distant_parts')
    images, _ = task.batch(1, generator(2))
    types, _, _ = modules('recall_task').layout(1, generator(2))
    spectra = {}
    for region, kind in enumerate(types[0].tolist()):
        y, x = 32 * (region // 4), 32 * (region % 4)
        power = torch.fft.fft2(images[0].mean(0)[y:y + 32, x:x + 8]).abs()
        power[0, 0] = 0
        spectra.setdefault(kind, []).append(power / power.norm())
    means = {kind: torch.stack(found).mean(0) for kind, found in spectra.items()}
    for kind, found in spectra.items():
        others = [mean for other, mean in means.items() if other != kind]
        for power in found:
            assert all((power * means[kind]).sum() > (power * mean).sum() for mean in others)


def test_softmax_takes_the_place_of_the_kernel(modules):
    from mmlaplacian.models import LaplacianAttention
    attentions = modules('softmax_attention')
    layer = LaplacianAttention(8, 2)
    x = torch.randn(2, 5, 6, 8)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    outputs = {}
    layer.branch.register_forward_hook(
        lambda module, inputs, output: outputs.update(branch=inputs[0]))
    model = attentions.set_attention(nn.Sequential(layer), 'softmax')
    model(x)
    q, k, v = (part.reshape(2, 30, 2, 4).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    wanted = (q @ k.mT / 2).softmax(-1) @ v
    torch.testing.assert_close(outputs['branch'],
                               wanted.transpose(1, 2).reshape(2, 5, 6, 8))
    assert all(value.equal(before[name]) for name, value in layer.state_dict().items())


def test_the_control_leaves_the_local_context(modules):
    from mmlaplacian.models import LaplacianAttention
    layer = LaplacianAttention(8, 2)
    x = torch.randn(1, 4, 4, 8)
    with_branch = layer(x)
    modules('softmax_attention').set_attention(nn.Sequential(layer), 'none')
    wanted = layer.proj(layer.local(layer.qkv(x).chunk(3, -1)[2]))
    torch.testing.assert_close(layer(x), wanted)
    assert not torch.allclose(with_branch, wanted)


def test_an_unknown_attention_is_refused(modules):
    attentions = modules('softmax_attention')
    with pytest.raises(ValueError, match="'linear'"):
        attentions.set_attention(nn.Identity(), 'linear')
    with pytest.raises(ValueError, match='Identity'):
        attentions.set_attention(nn.Identity(), 'softmax')


def easy(count: int, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.randint(4, (count, 3), generator=source)
    return torch.nn.functional.one_hot(target, 4).float(), target


def test_training_learns_and_repeats(modules):
    train = modules('short_training').train
    seen = []
    settings = dict(steps=60, batch_size=8, learning_rate=.1, looks=3)
    model, curve = train(lambda: nn.Linear(4, 4), easy, seed=1, **settings,
                         watch=lambda model, step: seen.append(model.weight.grad.norm() > 0))
    assert curve.steps == [20, 40, 60] and seen == [True] * 60
    assert curve.accuracy[-1] == 1 and curve.loss[0] > curve.loss[-1] and not model.training
    again, other = (train(lambda: nn.Linear(4, 4), easy, seed=seed, **settings)[1]
                    for seed in (1, 2))
    assert again == curve and other.loss != curve.loss


@pytest.mark.parametrize('task, name', [('recall_task', 'RecallModel'),
                                        ('distant_parts', 'DistantPartsModel')])
def test_models_answer_every_place(modules, task, name):
    task = modules(task)
    inputs, target = task.batch(1, generator())
    model = getattr(task, name)(normalize='row')
    logits = model(inputs)
    assert logits.shape == (*target.shape, modules('recall_task').COLOURS)
    nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
