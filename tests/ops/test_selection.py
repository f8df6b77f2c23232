"""How this folder's tests are chosen: with torch and pytest alone, with and without a device."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COLLECT = """
import sys
for name in ('mmengine', 'mmcv', 'mmdet', 'mmpretrain', 'cupy'):
    sys.modules[name] = None  # a package that is not there, for imports and find_spec alike
import pytest
sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', sys.argv[1]]))
"""


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=FOLDER.parents[1], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                          env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''}, timeout=120)


def test_folder_needs_torch_and_pytest_alone():
    result = run('-c', COLLECT, str(FOLDER))
    assert result.returncode == 0, result.stdout
    for path in FOLDER.glob('test_*.py'):
        if 'pytestmark = pytest.mark.gpu' not in path.read_text(encoding='utf-8'):
            assert path.name in result.stdout


def test_what_needs_a_device_is_left_out_with_the_reason():
    result = run('-m', 'pytest', '--collect-only', '-q', '-p', 'no:cacheprovider', str(FOLDER))
    assert result.returncode == 0, result.stdout
    assert 'tests marked gpu: torch' in result.stdout
    assert 'test_gpu.py' not in result.stdout and '[cuda' not in result.stdout


def test_asked_for_without_a_device_it_is_an_error():
    result = run('-m', 'pytest', '-m', 'gpu', '-q', '-p', 'no:cacheprovider', str(FOLDER))
    assert result.returncode != 0
    assert 'selected tests need a CUDA device, but torch' in result.stdout
