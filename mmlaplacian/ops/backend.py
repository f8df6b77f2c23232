"""Which implementation serves an op, and why.

The choice is process state, never part of a model: it must not change results or checkpoints.
``MMLAPLACIAN_BACKEND`` sets it from outside, :func:`use_backend` for a block of code.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor

from .validation import one_of

BACKENDS = ('auto', 'torch', 'cupy')
ENVIRONMENT_VARIABLE = 'MMLAPLACIAN_BACKEND'

_chosen: str | None = None
_warned: set[tuple[str, str]] = set()


class UnsupportedError(ValueError):
    """An implementation cannot take these inputs; the text says why."""


def get_backend() -> str:
    """The backend in force: that of :func:`use_backend`, else the environment's, else auto.

    Raises:
        ValueError: The environment variable names no backend.
    """
    if _chosen is not None:
        return _chosen
    return one_of(ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE, 'auto'), BACKENDS)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Chooses the backend inside a ``with`` block, in all threads.

    Args:
        name: ``'auto'`` takes the CUDA kernels for CUDA tensors where they apply and says once,
            with the reason, where they do not; ``'torch'`` and ``'cupy'`` insist.

    Raises:
        ValueError: ``name`` is no backend.
    """
    global _chosen
    previous = _chosen
    _chosen = one_of('backend', name, BACKENDS)
    try:
        yield
    finally:
        _chosen = previous


def choose(op: str, tensor: Tensor, torch_impl: ModuleType, cupy_impl: ModuleType,
           check: Callable[[], None]) -> ModuleType:
    """The implementation that serves a call.

    Args:
        op: Name of the op, for the warning.
        tensor: One of its tensors: tells the device.
        torch_impl: Runs anywhere.
        cupy_impl: Runs this project's kernels.
        check: Raises :class:`UnsupportedError` or :class:`ImportError` where those cannot run.

    Raises:
        UnsupportedError: The backend ``'cupy'`` is forced and cannot take these inputs.
        ImportError: It is forced and CuPy cannot be imported.
    """
    backend = get_backend()
    if backend == 'torch' or (backend == 'auto' and not tensor.is_cuda):
        return torch_impl
    try:
        check()
    except (UnsupportedError, ImportError) as error:
        if backend == 'cupy':
            raise
        if (op, str(error)) not in _warned:
            _warned.add((op, str(error)))
            warnings.warn(f'{op} runs in plain torch instead of its CUDA kernel: {error}',
                          stacklevel=4)
        return torch_impl
    return cupy_impl
