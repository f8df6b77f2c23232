"""Which distributions provide the packages of the stack, and whether they work together."""

import importlib
import pickle
import platform
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from .finding import Finding

SECTION = 'packages'
# The maintained fork that provides each import name.
FORKS = {'mmengine': 'onedl-mmengine', 'mmcv': 'onedl-mmcv', 'mmdet': 'onedl-mmdetection',
         'mmpretrain': 'onedl-mmpretrain', 'mmseg': 'onedl-mmsegmentation'}
_OLDEST_PYTHON = (3, 10)
# What an import of a package that does not fit its neighbours raises.
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, AssertionError, TypeError,
                 ValueError, SyntaxError)


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0]}' if lines else type(error).__name__


@cache
def _distributions(path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """What :func:`packages_distributions` finds on a search path; a fifth of a second."""
    return packages_distributions()


def providers(package: str) -> list[str]:
    """Names of the distributions that hold a package of this import name."""
    return sorted(set(_distributions(tuple(sys.path)).get(package, ())))


def provided_by(package: str) -> str:
    """The same with versions, for the report."""
    return ' and '.join(f'{name} {version(name)}' for name in providers(package))


def imported(package: str) -> ModuleType | str:
    """The module, or what its import raised."""
    try:
        return importlib.import_module(package)
    except IMPORT_ERRORS as error:
        return first_line(error)


def check_base() -> list[Finding]:
    """Python, torch and NumPy, which CuPy and OpenMMLab need."""
    found = []
    current = platform.python_version()
    if sys.version_info[:2] < _OLDEST_PYTHON:
        found.append(Finding(SECTION, 'Python', current, 'wrong',
                             f'use Python {".".join(map(str, _OLDEST_PYTHON))} or later'))
    else:
        found.append(Finding(SECTION, 'Python', current))
    cuda = f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'
    found.append(Finding(SECTION, 'torch', f'{torch.__version__}, built for {cuda}'))
    numpy = imported('numpy')
    if isinstance(numpy, ModuleType):
        found.append(Finding(SECTION, 'NumPy', numpy.__version__))
    elif find_spec('numpy') is None:
        found.append(Finding(SECTION, 'NumPy', 'not installed', 'note',
                             'CuPy and OpenMMLab need it: pip install numpy'))
    else:
        found.append(Finding(SECTION, 'NumPy', f'does not import ({numpy})', 'wrong',
                             'pip install --force-reinstall numpy'))
    return found


def check_openmmlab() -> list[Finding]:
    """Every package of OpenMMLab, its providers, and this project on top of them."""
    found = [_check_package(package) for package in FORKS]
    if find_spec('mmengine') is None:
        return found
    found += [*_check_ops(), *_check_checkpoints()]
    for name in ('models', 'hooks', 'optim'):
        module = imported(f'mmlaplacian.{name}')
        if isinstance(module, str):
            return [*found, Finding(
                SECTION, f'mmlaplacian.{name}', f'does not import ({module})', 'wrong',
                'mend the packages above; mmlaplacian.ops alone needs torch alone')]
    return [*found, Finding(SECTION, 'mmlaplacian', 'models, hooks and optim import')]


def _check_package(package: str) -> Finding:
    names, fork = providers(package), FORKS[package]
    if find_spec(package) is None:
        if package == 'mmcv' and find_spec('mmengine') is not None:
            return Finding(SECTION, package, 'not installed', 'wrong',
                           f'the models need it: pip install --no-build-isolation {fork}')
        if package == 'mmengine':
            return Finding(SECTION, package, 'not installed: the operators alone work', 'note',
                           "for the models: pip install 'mmlaplacian[openmmlab]'")
        return Finding(SECTION, package, 'not installed; its own configs alone need it')
    if len(names) > 1:
        return Finding(SECTION, package, f'provided by {provided_by(package)}', 'wrong',
                       'one overwrote files of the other: pip uninstall '
                       f'{" ".join(names)}, then install {fork} alone')
    value = provided_by(package) or f'from {find_spec(package).origin}'
    module = imported(package)
    if isinstance(module, str):
        remedy = f'install {fork}, whose versions fit each other and current torch' \
            if fork not in names else f'pip install --force-reinstall {fork}'
        return Finding(SECTION, package, f'{value} does not import ({module})', 'wrong', remedy)
    return Finding(SECTION, package, value)


def _check_ops() -> list[Finding]:
    """mmcv's compiled ops, by one NMS on every device."""
    if find_spec('mmcv') is None or isinstance(imported('mmcv'), str):
        return []
    build = ('build mmcv again with torch, ninja, setuptools and wheel installed first: '
             'MMCV_WITH_OPS=1 {cuda}pip install --no-build-isolation --no-binary :all: --no-deps '
             '--force-reinstall onedl-mmcv')
    ops = imported('mmcv.ops')
    if isinstance(ops, str):
        return [Finding(SECTION, 'mmcv.ops', f'does not import ({ops})', 'wrong',
                        build.format(cuda=''))]
    boxes = torch.tensor([[0., 0., 10., 10.], [1., 1., 11., 11.], [20., 20., 30., 30.]])
    works = []
    for device in ['cpu', *(f'cuda:{i}' for i in range(torch.cuda.device_count()))]:
        cuda = '' if device == 'cpu' else 'FORCE_CUDA=1 '
        try:
            kept = ops.nms(boxes.to(device), torch.tensor([.9, .8, .7], device=device), 0.5)[1]
        except RuntimeError as error:
            return [Finding(SECTION, 'mmcv.ops', f'NMS fails on {device} ({first_line(error)})',
                            'wrong', build.format(cuda=cuda))]
        # The second box overlaps the first by an IoU of 0.68.
        if kept.tolist() != [0, 2]:
            return [Finding(SECTION, 'mmcv.ops', f'NMS on {device} keeps boxes {kept.tolist()} '
                            'instead of [0, 2]', 'wrong', build.format(cuda=cuda))]
        works.append(device)
    return [Finding(SECTION, 'mmcv.ops', f'NMS works on {", ".join(works)}')]


def _check_checkpoints() -> list[Finding]:
    """Whether mmengine reads what it writes: torch 2.6 changed what torch.load accepts."""
    mmengine = imported('mmengine.runner')
    logging = imported('mmengine.logging')
    if isinstance(mmengine, str) or isinstance(logging, str):
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'checkpoint.pth'
        torch.save(dict(message_hub=dict(log=logging.HistoryBuffer([1.], [1]))), path)
        try:
            mmengine.CheckpointLoader.load_checkpoint(str(path), map_location='cpu',
                                                      logger='silent')
        except (pickle.UnpicklingError, AttributeError, RuntimeError, TypeError) as error:
            return [Finding(SECTION, 'checkpoints', 'mmengine cannot read its own checkpoints '
                            f'with torch {torch.__version__} ({first_line(error)})', 'wrong',
                            'install onedl-mmengine in the place of mmengine')]
    return [Finding(SECTION, 'checkpoints', 'mmengine reads what it writes')]
