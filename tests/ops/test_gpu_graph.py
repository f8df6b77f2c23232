"""A whole backbone as a CUDA graph at one image size, against eager calls."""

import copy

import pytest
import torch

pytest.importorskip('mmengine', reason='a backbone needs mmengine')
pytest.importorskip('mmcv', reason='a backbone needs mmcv')

pytestmark = pytest.mark.gpu
DEVICE = torch.device('cuda')
amp = pytest.mark.parametrize('amp', [False, True], ids=['float32', 'bfloat16'])


def make_backbone():
    """The tiny one on the device, the same at every call."""
    from mmlaplacian import LaplacianFormer

    torch.manual_seed(0)
    return LaplacianFormer('tiny', init_cfg=None).to(DEVICE)


def make_images(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 96, 128, generator=generator).to(DEVICE)


def autocast(amp):
    """A capture must not meet casts that an earlier call has cached."""
    return torch.autocast('cuda', torch.bfloat16, enabled=amp, cache_enabled=False)


def assert_close(got, expected, amp):
    """The same kernels on the same values; cuBLAS and cuDNN may choose others in a capture."""
    share = 3e-2 if amp else 1e-4
    for x, want in zip(got, expected, strict=True):
        torch.testing.assert_close(x, want, rtol=share, atol=share * want.abs().max().item())


@amp
def test_inference_replays_with_new_images(amp):
    model, static = make_backbone().eval(), make_images(0)

    @torch.no_grad()
    def run(images):
        with autocast(amp):
            return model(images)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    for seed in (1, 2):
        static.copy_(make_images(seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(captured, run(make_images(seed)), amp)


@amp
def test_training_replays_with_new_images_and_weights(amp):
    """Through the graphs of torch's own helper: outputs, and the gradients of all weights."""
    eager = make_backbone().train()
    with autocast(amp):
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(eager), (make_images(0), ))
    weights = list(zip(eager.parameters(), graphed.parameters(), strict=True))
    for seed in (1, 2):
        outputs = []
        for model in (graphed, eager):
            with autocast(amp):
                outputs.append(model(make_images(seed)))
            model.zero_grad(set_to_none=True)
            sum(x.float().square().mean() for x in outputs[-1]).backward()
        torch.cuda.synchronize()
        assert_close(*outputs, amp)
        own, other = zip(*weights, strict=True)
        assert_close([p.grad for p in other], [p.grad for p in own], amp)
        # A graph reads the weights where they are: the next round must see the step.
        with torch.no_grad():
            for ours, theirs in weights:
                ours.add_(ours.grad, alpha=-0.1)
                theirs.copy_(ours)
