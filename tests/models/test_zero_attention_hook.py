"""ZeroAttentionHook in MMEngine's own loops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from mmengine.dataset import DefaultSampler
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn

from mmlaplacian import LaplacianAttention, ZeroAttentionHook


class Probe(BaseModel):
    """One attention layer that keeps its branch's last output by mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = LaplacianAttention(8, 2)
        self.seen: dict[str, Tensor] = {}

    def forward(self, inputs: Tensor | list[Tensor], mode: str) -> object:
        x = torch.stack(inputs) if isinstance(inputs, list) else inputs
        handle = self.attention.branch.register_forward_hook(
            lambda module, args, out: self.seen.update({mode: out.detach()}))
        out = self.attention(x)
        handle.remove()
        return dict(loss=out.square().mean()) if mode == 'loss' else [out]


class NoMetric(BaseMetric):

    def process(self, data_batch: object, data_samples: object) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list) -> dict:
        return {}


class Maps(torch.utils.data.Dataset):
    metainfo: dict = {}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict:
        return dict(inputs=torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(index)))


def loader() -> dict:
    return dict(dataset=Maps(), sampler=dict(type=DefaultSampler, shuffle=False), batch_size=2,
                num_workers=0)


@pytest.mark.parametrize('zero', [True, False])
def test_silences_training_validation_and_test(tmp_path: Path, zero: bool) -> None:
    model = Probe()
    runner = Runner(
        model, work_dir=str(tmp_path), experiment_name=f'zero_attention_{zero}',
        train_dataloader=loader(), val_dataloader=loader(), test_dataloader=loader(),
        train_cfg=dict(by_epoch=True, max_epochs=1), val_cfg={}, test_cfg={},
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.)), val_evaluator=[NoMetric()],
        test_evaluator=[NoMetric()], log_level='WARNING',
        custom_hooks=[dict(type='ZeroAttentionHook')] if zero else None)
    runner.train()
    assert set(model.seen) == {'loss', 'predict'}
    assert all((out == 0).all() == zero for out in model.seen.values())
    model.seen.clear()
    runner.test()
    assert set(model.seen) == {'predict'}
    assert (model.seen['predict'] == 0).all() == zero
    # Given back after the run.
    assert not model.attention.branch._forward_hooks
    model(torch.randn(1, 5, 6, 8), 'tensor')
    assert model.seen['tensor'].abs().max() > 0


def run(model: nn.Module) -> SimpleNamespace:
    return SimpleNamespace(model=model, logger=SimpleNamespace(info=lambda text: None))


def test_leaves_local_context_and_gives_every_parameter_a_gradient() -> None:
    torch.manual_seed(0)
    layer = LaplacianAttention(8, 2)
    x = torch.randn(2, 5, 6, 8)
    ZeroAttentionHook().before_run(run(nn.Sequential(layer)))
    out = layer(x)
    v = layer.qkv(x)[..., 16:].permute(0, 3, 1, 2)
    local = F.conv2d(v, layer.local.weight, layer.local.bias, padding=1, groups=8)
    torch.testing.assert_close(out, layer.proj(local.permute(0, 2, 3, 1)))
    out.square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    grad_q, grad_k, grad_v = layer.qkv.weight.grad.chunk(3)
    assert not grad_q.any() and not grad_k.any() and grad_v.any()


def test_counts_every_layer() -> None:
    messages: list[str] = []
    runner = run(nn.Sequential(*(LaplacianAttention(8, 2) for _ in range(3))))
    runner.logger.info = messages.append
    hook = ZeroAttentionHook()
    hook.before_run(runner)
    assert messages == ['attention branch set to zero in 3 layers']
    assert all(layer.branch._forward_hooks for layer in runner.model)
    hook.after_run(runner)
    assert not any(layer.branch._forward_hooks for layer in runner.model)


def test_model_without_attention() -> None:
    with pytest.raises(ValueError) as caught:
        ZeroAttentionHook().before_run(run(nn.Sequential(nn.Linear(2, 2))))
    assert str(caught.value) == ('ZeroAttentionHook needs a model with LaplacianAttention, got '
                                 'Sequential without one')


def test_registered() -> None:
    assert HOOKS.get('ZeroAttentionHook') is ZeroAttentionHook
