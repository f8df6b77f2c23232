"""Where the contract tests run: on the CPU and, marked ``gpu``, on a CUDA device.

This folder needs torch and pytest alone, on a CUDA device CuPy too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from mmlaplacian.ops import use_backend

_LEFT_OUT = pytest.StashKey[str]()


def _why_no_device() -> str | None:
    """Why no test can run on a CUDA device here, or None."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f'torch {torch.__version__} is built without CUDA'
    return f'torch {torch.__version__} sees no CUDA device'


# After pytest's own selection by -m and -k.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs a CUDA device where there is none; asked for alone, it is an error.

    Raises:
        pytest.UsageError: Every selected test needs a device.
    """
    needs_device = [item for item in items if item.get_closest_marker('gpu')]
    if not needs_device or (reason := _why_no_device()) is None:
        return
    if len(needs_device) == len(items):
        raise pytest.UsageError(f'the {len(items)} selected tests need a CUDA device, but '
                                f'{reason}')
    items[:] = [item for item in items if not item.get_closest_marker('gpu')]
    config.hook.pytest_deselected(items=needs_device)
    config.stash[_LEFT_OUT] = f'left out {len(needs_device)} tests marked gpu: {reason}'


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """The one line that says so."""
    return config.stash.get(_LEFT_OUT, '')


@pytest.fixture(params=['torch', 'cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def form(request: pytest.FixtureRequest) -> str:
    """Every form of the contract in turn: plain torch, the C text, the CUDA text."""
    return request.param


@pytest.fixture
def device(form: str) -> torch.device:
    """Where a form runs."""
    return torch.device('cuda' if form == 'cuda' else 'cpu')


class Precision(NamedTuple):
    """A dtype, and how near the float64 reference the ops come in it."""
    dtype: torch.dtype
    rtol: float
    atol: float
    """Times the largest entry."""


@pytest.fixture
def precision(form: str) -> Precision:
    """Of the widest dtype that a form computes in."""
    if form == 'torch':
        return Precision(torch.float64, 1e-10, 1e-12)
    return Precision(torch.float32, 1e-3, 1e-5)


@pytest.fixture(autouse=True)
def _backend_of_the_form(request: pytest.FixtureRequest,
                                  monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The form's backend. On a CUDA device an op that leaves the kernels fails, and what they do
    not write is NaN."""
    if request.node.get_closest_marker('gpu') is None:
        plain = 'form' in request.fixturenames and request.getfixturevalue('form') == 'torch'
        with use_backend('torch') if plain else nullcontext():
            yield
        return
    # cuBLAS, in the references and around the kernels, is deterministic with this alone.
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    monkeypatch.setattr(torch.utils.deterministic, 'fill_uninitialized_memory', True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with use_backend('cupy'):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
