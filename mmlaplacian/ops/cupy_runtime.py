"""Compiles the CUDA text of ``cuda/`` and launches it on torch's tensors.

The only importer of CuPy. Nothing here touches CUDA before the first launch.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

# Inside the installed package, or beside it in a checkout.
_SOURCE_FOLDERS = (Path(__file__).parents[1] / 'cuda_src', Path(__file__).parents[2] / 'cuda')
_OWN_HEADER = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_MAX_BLOCKS = 2**31 - 1
_SHARED_WITHOUT_OPT_IN = 48 * 1024


class KernelCompileError(RuntimeError):
    """A kernel's text could not be compiled for this device."""


@dataclass(frozen=True)
class Kernel:
    """A compiled variant of a kernel.

    Args:
        source: File in ``cuda/`` without its suffix.
        function: Name of the ``__global__`` function.
        macros: ``-D`` definitions, name and value, in a fixed order.
    """

    source: str
    function: str
    macros: tuple[tuple[str, int], ...]


@cache
def _import_cupy() -> ModuleType | Exception:
    try:
        import cupy
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return error
    return cupy


def require_cupy() -> ModuleType:
    """CuPy, imported at the first call.

    Raises:
        ImportError: It is not installed or broken; its own error is the cause.
    """
    cupy = _import_cupy()
    if isinstance(cupy, Exception):
        raise ImportError(
            f'CuPy cannot be imported ({type(cupy).__name__}: {cupy}); install the extra that '
            "fits torch's CUDA, mmlaplacian[cuda13] or mmlaplacian[cuda12]") from cupy
    return cupy


def _expanded(folder: Path, name: str) -> str:
    text = (folder / name).read_text(encoding='utf-8')
    return _OWN_HEADER.sub(lambda header: _expanded(folder, header[1]), text)


@cache
def source_text(source: str) -> str:
    """The text of ``common.cuh`` and of a kernel file as one translation unit.

    CuPy's cache key does not see included files, so a file's own headers stand in its text.

    Raises:
        FileNotFoundError: The text is in neither of the two places.
    """
    for folder in _SOURCE_FOLDERS:
        if (folder / 'common.cuh').is_file():
            return '\n'.join(_expanded(folder, name) for name in ('common.cuh', f'{source}.cu'))
    raise FileNotFoundError(f'{source}.cu was not found in '
                            + ' or '.join(map(str, _SOURCE_FOLDERS)))


@cache
def _compiled(kernel: Kernel, device: int) -> object:
    """A launchable kernel, or the error of its one compilation."""
    cupy = require_cupy()
    options = ('--std=c++17', *(f'-D{name}={value}' for name, value in kernel.macros))
    raw = cupy.RawKernel(source_text(kernel.source), kernel.function, options, backend='nvrtc')
    try:
        raw.compile()
    except cupy.cuda.compiler.CompileException as error:
        return error
    except OSError as error:
        raise KernelCompileError(
            "CuPy cannot keep compiled kernels: name a folder that can be written in "
            'CUPY_CACHE_DIR, or set CUPY_CACHE_IN_MEMORY=1') from error
    return raw


@dataclass(frozen=True)
class _Stream:
    """What CuPy needs of torch's stream; an object of its own would change CuPy's state."""

    ptr: int


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of dynamic shared memory that a block can have on a CUDA device."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def launch(kernel: Kernel, blocks: int, threads: int,
           arguments: Sequence[Tensor | ctypes._SimpleCData], device: torch.device,
           shared_bytes: int = 0) -> None:
    """Launches a kernel on torch's current stream of ``device``.

    torch's current device is what it was afterwards, also after an error.

    Args:
        kernel: What to launch; compiled at its first launch on a device.
        blocks: Blocks that are meant, at least 1; a kernel steps over its tiles, so more than
            2^31 - 1 are cut to that.
        threads: Threads a block.
        arguments: Tensors on ``device``, contiguous or of strides that the kernel is told, and
            ctypes scalars of the exact type. A Python number would reach the kernel with eight
            bytes whatever the type there is.
        device: The CUDA device.
        shared_bytes: Dynamic shared memory a block, at most :func:`shared_memory_limit`.

    Raises:
        TypeError: An argument of another type.
        ImportError: CuPy cannot be imported.
        KernelCompileError: The text does not compile here; it is not tried again.
    """
    import numpy as np  # comes with CuPy; the torch forms do without

    values = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            values.append(np.uint64(argument.data_ptr()))
        elif isinstance(argument, ctypes._SimpleCData):
            values.append(np.dtype(type(argument)).type(argument.value))
        else:
            raise TypeError('a kernel argument must be a tensor or a ctypes scalar, got '
                            f'{argument!r} of type {type(argument).__name__}')
    with torch.cuda.device(device):
        compiled = _compiled(kernel, torch.cuda.current_device())
        if isinstance(compiled, Exception):
            raise KernelCompileError(
                f'{kernel.function} does not compile for {torch.cuda.get_device_name()} with '
                "this NVRTC: update CuPy and its CUDA wheels, or set MMLAPLACIAN_BACKEND=torch"
            ) from compiled
        if shared_bytes > max(_SHARED_WITHOUT_OPT_IN, compiled.max_dynamic_shared_size_bytes):
            compiled.max_dynamic_shared_size_bytes = shared_bytes
        compiled((min(max(blocks, 1), _MAX_BLOCKS), ), (threads, ), tuple(values),
                 shared_mem=shared_bytes,
                 stream=_Stream(torch.cuda.current_stream(device).cuda_stream))
