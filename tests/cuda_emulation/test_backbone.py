"""The tiny backbone through the kernels' text, by the dispatch that a CUDA tensor takes."""

import torch

from mmlaplacian import LaplacianFormer
from mmlaplacian.ops import use_backend


def run(model, image):
    model.zero_grad()
    outputs = model(image)
    sum((x * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).sum() for x in outputs).backward()
    return [x.detach() for x in outputs], {name: p.grad.clone()
                                           for name, p in model.named_parameters()}


def test_tiny_backbone_runs_on_the_kernels(launches):
    """Equal to the torch form at 64 x 64, and every distance and inverse is launched."""
    torch.manual_seed(0)
    model = LaplacianFormer(arch='tiny').eval()
    image = torch.randn(1, 3, 64, 64)
    outputs, gradients = run(model, image)
    blocks = sum(len(stage.blocks) for stage in model.stages)
    assert launches == {
        **{f'nystrom_attention_{name}': blocks for name in (
            'landmarks', 'statistics', 'merge_statistics', 'keys', 'output', 'grad_context',
            'grad_factors', 'grad_values', 'merge_grad_covariance', 'grad_keys', 'grad_queries',
            'grad_landmarks', 'merge_landmarks')},
        'nystrom_attention_merge_keys': 2 * blocks, 'newton_schulz_inverse': blocks}

    with use_backend('torch'):
        expected_outputs, expected_gradients = run(model, image)
    for got, want in zip(outputs, expected_outputs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    for name, want in expected_gradients.items():
        torch.testing.assert_close(gradients[name], want, rtol=1e-3,
                                   atol=1e-3 * want.abs().max().item(),
                                   msg=lambda text, name=name: f'{name}: {text}')
