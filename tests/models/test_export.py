"""The backbone under ``torch.export`` and ``torch.compile``, with open sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

ARCH = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4),
            mlp_ratios=(2, 2, 2, 1))
# With a batch of one and of several torch makes two graphs.
SIZES = [(2, 3, 250, 333), (2, 3, 224, 224), (3, 3, 225, 417)]


@pytest.mark.parametrize('strict', [False, True], ids=['non-strict', 'strict'])
def test_one_exported_program_serves_all_sizes(build, strict):
    model = build(arch=ARCH)
    size = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        model, (torch.rand(*SIZES[0]), ), strict=strict,
        dynamic_shapes=({0: size, 2: size, 3: size}, )).module()
    for shape in (*SIZES, (1, 3, 193, 260)):
        image = torch.rand(*shape)
        for got, want in zip(program(image), model(image), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def assert_compiled_is_eager(model: nn.Module, compiled: Callable[[Tensor], Sequence[Tensor]],
                             train: bool) -> None:
    """Maps and, in training, gradients at every size."""
    for shape in SIZES:
        image = torch.rand(*shape)
        results = []
        for function in (compiled, model):
            model.zero_grad()
            with torch.set_grad_enabled(train):
                maps = function(image)
            if train:
                sum(x.square().mean() for x in maps).backward()
            results.append([*(x.detach() for x in maps),
                            *(p.grad for p in model.parameters() if train)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


# The last two stages are traced like the first two, and tracing is what takes the time.
@pytest.mark.parametrize('train', [False, True], ids=['inference', 'training'])
def test_compiled_once_for_all_sizes(build, train):
    """One graph without a break; AOT autograd traces the backward too."""
    model = build(arch=ARCH, out_indices=(0, 1)).train(train)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend='aot_eager')
    assert_compiled_is_eager(model, compiled, train)
    assert counters['stats']['unique_graphs'] == 1


@pytest.mark.soak
@pytest.mark.parametrize('train', [False, True], ids=['inference', 'training'])
def test_inductor_serves_all_sizes(build, train):
    """In training with the option that docs/deploy.md names."""
    model = build(arch=ARCH).train(train)
    torch._dynamo.reset()
    options = {'layout_optimization': False} if train else None
    compiled = torch.compile(model, fullgraph=True, dynamic=True, options=options)
    assert_compiled_is_eager(model, compiled, train)


def test_landmark_counts_are_numbers_in_a_graph(build):
    """Below seven tokens a side another graph follows, with fewer landmarks."""
    model = build(arch=ARCH, out_indices=(0, ))
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend='eager')
    for side, graphs in ((44, 1), (28, 1), (64, 1), (25, 1), (24, 2), (21, 2), (17, 3)):
        image = torch.rand(2, 3, side, 40)
        torch.testing.assert_close(compiled(image), model(image))
        assert counters['stats']['unique_graphs'] == graphs, side


def test_tensor_mode_of_a_detector_is_one_graph():
    """Backbone, neck and head of a RetinaNet, as ``model(images, mode='tensor')``."""
    from mmdet.registry import MODELS
    from mmengine.registry import DefaultScope
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(dict(
            type='RetinaNet',
            backbone=dict(type='LaplacianFormer', arch=ARCH, out_indices=(1, 2, 3)),
            neck=dict(type='FPN', in_channels=[16, 24, 32], out_channels=8, num_outs=3),
            bbox_head=dict(
                type='RetinaHead', num_classes=2, in_channels=8, feat_channels=8, stacked_convs=1,
                anchor_generator=dict(type='AnchorGenerator', scales=[4], ratios=[1.],
                                      strides=[8, 16, 32]),
                bbox_coder=dict(type='DeltaXYWHBBoxCoder')))).eval()
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend='eager')
    for shape in ((2, 3, 256, 320), (2, 3, 224, 352)):
        image = torch.rand(*shape)
        torch.testing.assert_close(compiled(image, mode='tensor'), model(image, mode='tensor'))
    assert counters['stats']['unique_graphs'] == 1
