"""mmengine's complexity analysis counts the attention (B41)."""

import pytest
import torch
from mmengine.analysis import FlopAnalyzer, get_model_complexity_info

from mmlaplacian import LaplacianAttention, LaplacianFormer
from mmlaplacian.ops.newton_schulz import default_iters

pytestmark = pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning',
                                        'ignore:`torch.jit:DeprecationWarning')


def count(model, *shape):
    analyzer = FlopAnalyzer(model.eval(), (torch.zeros(1, *shape), ))
    analyzer.unsupported_ops_warnings(False)
    return analyzer.total(), analyzer.unsupported_ops()


def test_b41_one_block_by_hand():
    channels, heads, side, m = 64, 2, 28, 49
    total, unsupported = count(LaplacianAttention(channels, heads), side, side, channels)
    assert not any('mmlaplacian' in name or 'PythonOp' in name for name in unsupported)
    n, d = side * side, channels // heads
    layers = n * channels * (4 * channels + 9)  # qkv, projection, depth-wise 3 x 3
    distances = heads * d * m * (2 * n + m)
    products = heads * (3 * n * m * m + 2 * n * m * d)
    solver = heads * 2 * default_iters(m, 1e-2, torch.float32) * m**3
    pooling = n * channels
    assert total == pytest.approx(layers + distances + products + solver + pooling, rel=1e-2)


def test_b41_backbone_is_linear_in_the_image():
    """But for the solver, whose work depends on the landmarks alone."""
    model = LaplacianFormer(arch='tiny').eval()
    info = [get_model_complexity_info(model, (3, side, side), show_table=False, show_arch=False)
            for side in (224, 448)]
    heads = sum(depth * heads for depth, heads in zip((2, 2, 2, 2), (2, 4, 10, 16), strict=True))
    solver = heads * 2 * default_iters(49, 1e-2, torch.float32) * 49**3
    small, large = (entry['flops'] - solver for entry in info)
    assert 3.95 < large / small < 4.05
    # Pooling to 7 columns and then to 7 rows grows with the side or not at all.
    small, large = (entry['activations'] - sum(
        2 * 7 * (side // stride + 7) * channels
        for stride, channels in zip((4, 8, 16, 32), (64, 128, 320, 512), strict=True))
        for entry, side in zip(info, (224, 448), strict=True))
    assert large == pytest.approx(4 * small, rel=5e-3)
    assert not any('mmlaplacian' in name or 'PythonOp' in name
                   for name in count(model, 3, 64, 64)[1])
