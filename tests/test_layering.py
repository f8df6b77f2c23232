"""Who may import whom inside the package, and what no module of it does."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / 'mmlaplacian'
MODULES = sorted(PACKAGE.rglob('*.py'))

# By folder of the package: what it may import besides the standard library and itself.
# 'mmlaplacian' stands for the package's root, whose __init__ registers the rest.
ALLOWED = {
    'ops': {'torch'},
    'models': {'torch', 'mmengine', 'mmcv', 'mmlaplacian.ops'},
    'hooks': {'torch', 'mmengine', 'mmlaplacian.models'},
    'optim': {'torch', 'mmengine'},
    'export': {'torch', 'onnxscript', 'mmlaplacian.ops'},
    # What it examines it imports by name, as none of it may work.
    'doctor': {'torch', 'mmlaplacian.ops', 'mmlaplacian.version'},
    # The one importer of CuPy, and of NumPy, which comes with it.
    'ops.cupy_runtime': {'torch', 'cupy', 'numpy'},
    '': {'mmlaplacian.hooks', 'mmlaplacian.models', 'mmlaplacian.optim', 'mmlaplacian.version'},
}


def imports(source: str, package: str) -> Iterator[tuple[str, int]]:
    """Full names of the modules that a file imports, anywhere in it, with their lines.

    Args:
        source: The file's text.
        package: Full name of the package that holds the file, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split('.')[:len(package.split('.')) - node.level + 1] \
                if node.level else []
            name = '.'.join([*base, *([node.module] if node.module else [])])
            if name in ('mmlaplacian', '') or (node.level and not node.module):
                # The names are modules themselves, as in ``from .. import validation``.
                yield from ((f'{name}.{alias.name}', node.lineno) for alias in node.names)
            else:
                yield name, node.lineno


def violations(source: str, package: str, module: str = '') -> list[str]:
    """Imports of a file that the layer it lies in may not have."""
    layer = package.split('.')[1] if '.' in package else ''
    own = f'mmlaplacian.{layer}' if layer else 'mmlaplacian.version'
    allowed = ALLOWED.get(f'{layer}.{module}', ALLOWED[layer]) | {own}
    return [f'line {line}: {name}' for name, line in imports(source, package)
            if name.split('.')[0] not in sys.stdlib_module_names
            and not any(f'{name}.'.startswith(f'{start}.') for start in allowed)]


def package_of(path: Path) -> str:
    return '.'.join(path.relative_to(PACKAGE.parent).parent.parts)


def calls_and_keywords(source: str) -> list[str]:
    """``print`` calls, and functions that take ``**kwargs``, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) \
                and node.func.id == 'print':
            found.append(f'line {node.lineno}: print')
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg:
            found.append(f'line {node.lineno}: {node.name}(**{node.args.kwarg.arg})')
    return found


@pytest.mark.parametrize('path', MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_layers(path: Path) -> None:
    assert violations(path.read_text(), package_of(path), path.stem) == []


@pytest.mark.parametrize('path', MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_print_and_no_open_keywords(path: Path) -> None:
    found = calls_and_keywords(path.read_text())
    if package_of(path).startswith('mmlaplacian.ops'):
        # The checks take tensors by name and hand nothing on.
        found = [entry for entry in found if entry.endswith('print')]
    assert found == []


def test_every_layer_is_there() -> None:
    assert {package_of(path).partition('.')[2].partition('.')[0] for path in MODULES} \
        == {layer for layer in ALLOWED if '.' not in layer}


@pytest.mark.parametrize(('package', 'source'), [
    ('mmlaplacian.ops', 'import mmengine'),
    ('mmlaplacian.ops', 'import numpy'),
    ('mmlaplacian.ops', 'import cupy'),
    ('mmlaplacian.ops', 'from ..models import LaplacianFormer'),
    ('mmlaplacian.ops', 'from .. import models'),
    ('mmlaplacian.ops.newton_schulz', 'from ...models.arch import ARCHS'),
    ('mmlaplacian.ops', 'from mmlaplacian import LaplacianFormer'),
    ('mmlaplacian.ops', 'def f():\n    import mmlaplacian.models'),
    ('mmlaplacian.models', 'from mmdet.registry import MODELS'),
    ('mmlaplacian.models', 'import mmpretrain.models as m'),
    ('mmlaplacian.models', 'from ..hooks import ZeroAttentionHook'),
    ('mmlaplacian.hooks', 'from mmdet.apis import init_detector'),
    ('mmlaplacian', 'import mmdet'),
])
def test_the_check_sees(package: str, source: str) -> None:
    assert len(violations(source, package)) == 1


@pytest.mark.parametrize(('package', 'source'), [
    ('mmlaplacian.ops', 'import math\nimport torch.nn.functional as F\nfrom . import validation'),
    ('mmlaplacian.ops.newton_schulz', 'from .. import validation\nfrom ..precision import x'),
    ('mmlaplacian.models', 'from ..ops import nystrom_attention\nfrom .arch import ARCHS'),
    ('mmlaplacian', 'from .version import __version__\nfrom .models import LaplacianFormer'),
])
def test_the_check_lets_through(package: str, source: str) -> None:
    assert violations(source, package) == []


def test_the_check_sees_calls_and_keywords() -> None:
    source = 'def f(x, **kwargs):\n    print(x)\n'
    assert calls_and_keywords(source) == ['line 1: f(**kwargs)', 'line 2: print']
