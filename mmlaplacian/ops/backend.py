"""Which implementation serves an op, and why.

The choice is process state, never part of a model: it must not change results or checkpoints.
``MMLAPLACIAN_BACKEND`` sets it from outside, :func:`use_backend` for a block of code.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor

from .validation import one_of

BACKENDS = ('auto', 'torch', 'cpu', 'cupy')
ENVIRONMENT_VARIABLE = 'MMLAPLACIAN_BACKEND'

# What auto takes for tensors of a device.
_FAST = {'cpu': 'cpu', 'cuda': 'cupy'}

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

    A backward follows the backend in force when it runs.

    Args:
        name: ``'auto'`` takes the compiled C text for CPU tensors and the CUDA kernels for CUDA
            tensors where they apply, and says once, with the reason, where the CUDA kernels do
            not; ``'torch'``, ``'cpu'`` and ``'cupy'`` insist.

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


def choose(op: str, tensor: Tensor, implementations: Mapping[str, ModuleType]) -> ModuleType:
    """The implementation that serves a call.

    Args:
        op: Name of the op, for the warning.
        tensor: The tensor that decides: its device, dtype and shape.
        implementations: By backend name; ``'torch'`` runs anywhere. The others have
            ``check(tensor)``, which raises :class:`UnsupportedError` or :class:`ImportError`
            where they cannot run. A backend that is not among them leaves the op to torch.

    Raises:
        UnsupportedError: A backend is forced and cannot take these inputs.
        ImportError: ``'cupy'`` is forced and CuPy cannot be imported.
    """
    backend = get_backend()
    name = _FAST.get(tensor.device.type, 'torch') if backend == 'auto' else backend
    if name == 'torch' or name not in implementations:
        return implementations['torch']
    try:
        implementations[name].check(tensor)
    except (UnsupportedError, ImportError) as error:
        if backend != 'auto':
            raise
        # Worth a word on a GPU only: there the difference is large and the remedy short.
        if tensor.is_cuda and (op, str(error)) not in _warned:
            _warned.add((op, str(error)))
            warnings.warn(f'{op} runs in plain torch instead of its CUDA kernel: {error}',
                          stacklevel=2)
        return implementations['torch']
    return implementations[name]
