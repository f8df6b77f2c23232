"""What an import of the package needs and touches, in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

OPS_ALONE = """
import sys
for name in ('mmengine', 'mmcv', 'mmdet', 'mmpretrain', 'cupy'):
    sys.modules[name] = None  # a package that is not there, for imports and find_spec alike

import torch
import mmlaplacian
import mmlaplacian.ops

assert not torch.cuda.is_initialized()
assert mmlaplacian.__all__ == ['__version__'], mmlaplacian.__all__
assert not [name for name in sys.modules if name.startswith('mmlaplacian.models')]

generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 30, 8, generator=generator, requires_grad=True).unbind()
out = mmlaplacian.ops.nystrom_attention(q, k, v, k[:, :, ::5])
out.square().sum().backward()
assert out.shape == (1, 2, 30, 8) and out.isfinite().all()
assert mmlaplacian.ops.laplacian_kernel(q, k, 4.0).shape == (1, 2, 30, 30)
assert not torch.cuda.is_initialized()
print('ops run alone')

# Installed but broken: its own error is what the user sees.
del sys.modules['mmengine'], sys.modules['mmlaplacian']
sys.path.insert(0, sys.argv[1])
try:
    import mmlaplacian
except RuntimeError as error:
    print('error:', error)
"""

DETECTOR = """
import sys
from mmdet.apis import init_detector

assert 'mmlaplacian' not in sys.modules
model = init_detector(sys.argv[1], device='cpu', palette='coco')
print('built', type(model.backbone).__module__)
import torch
assert not torch.cuda.is_initialized()
"""


def run(program: str, argument: Path, cwd: Path) -> str:
    """Runs a program away from the repository; returns all that it printed."""
    result = subprocess.run([sys.executable, '-c', program, str(argument)], cwd=cwd, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                            timeout=120)
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_b23_b26_ops_need_torch_alone(tmp_path: Path) -> None:
    broken = tmp_path / 'broken' / 'mmengine'
    broken.mkdir(parents=True)
    (broken / '__init__.py').write_text("raise RuntimeError('broken on purpose')\n")
    output = run(OPS_ALONE, broken.parent, tmp_path)
    assert output.splitlines() == ['ops run alone', 'error: broken on purpose']


def test_b32_detector_where_only_mmdet_is_imported(tmp_path: Path) -> None:
    output = run(DETECTOR, ROOT / 'configs' / 'retinanet_laplacian_t.py', tmp_path)
    assert 'built mmlaplacian.models.laplacian_former' in output
    assert 'ailed to search registry' not in output
