"""Compiles the C text of ``cpu_src/`` for this processor and calls it on torch's tensors.

The system's compiler runs once for a text and a processor; a cache on disk serves all later
processes. Nothing is compiled at import.

The threads are those of torch's own OpenMP runtime: the library names none as a dependency, so
its calls reach the one that torch has loaded. A second runtime's idle threads would spin on the
cores of the first.
"""

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .backend import UnsupportedError

CACHE_VARIABLE = 'MMLAPLACIAN_CACHE'
"""Environment variable with the folder of compiled files, by default ``~/.cache/mmlaplacian``."""

_SOURCE_FOLDER = Path(__file__).parents[1] / 'cpu_src'
_OWN_HEADER = re.compile(r'#include "(.+)"')
_FLAGS = ('-std=gnu11', '-O3', '-march=native', '-ffp-contract=fast', '-fPIC')
_COMPILE_SECONDS = 120
# Fewer (query, landmark, channel) triples are done sooner than another thread wakes up.
_LEAST_WORK = 2**18
_DIGEST_BYTES = hashlib.sha256().digest_size


class _Process:
    """Whether this process came from a fork: OpenMP's threads stayed behind in the parent."""

    forked = False

    @classmethod
    def note_fork(cls) -> None:
        cls.forked = True


os.register_at_fork(after_in_child=_Process.note_fork)


@dataclass(frozen=True)
class _Compiler:
    """A C compiler, and what it says of itself and of this processor.

    Args:
        command: The program and its first arguments.
        macros: Its predefined macros: version and instruction sets.
    """

    command: tuple[str, ...]
    macros: str

    @property
    def openmp(self) -> bool:
        """Whether its parallel regions can run on the runtime that is loaded."""
        entry = '__kmpc_fork_call' if '__clang__' in self.macros else 'GOMP_parallel'
        return hasattr(ctypes.CDLL(None), entry)


def _run(command: Sequence[str], text: str = '') -> str:
    """What a compiler prints.

    Raises:
        UnsupportedError: It does not start, fails, or takes too long.
    """
    try:
        result = subprocess.run(command, input=text, capture_output=True, encoding='utf-8',
                                errors='replace', check=False, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f'the C compiler {command[0]} cannot be run: {error}') from error
    if result.returncode:
        said = result.stderr.strip() or f'exit status {result.returncode}'
        first = next((line for line in said.splitlines() if 'error' in line),
                     said.splitlines()[0])
        raise UnsupportedError(f'the C compiler {command[0]} cannot compile for this processor: '
                               f'{first}')
    return result.stdout


def _find_compiler() -> _Compiler:
    try:
        wanted = shlex.split(os.environ.get('CC', ''))
    except ValueError as error:
        raise UnsupportedError("the CPU kernels need a C compiler, but the environment variable "
                               f"CC is {os.environ['CC']!r}: {error}") from error
    for command in ([wanted] if wanted else [['cc'], ['gcc'], ['clang']]):
        if shutil.which(command[0]):
            macros = _run([*command, '-march=native', '-dM', '-E', '-x', 'c', '-'])
            return _Compiler(tuple(command), macros)
    missing = f'{wanted[0]}, from the environment variable CC, is not' if wanted \
        else 'none of cc, gcc and clang is'
    raise UnsupportedError(f'the CPU kernels need a C compiler, but {missing} on PATH: '
                           'install gcc')


def source_text(source: str) -> str:
    """The text of a C file with its own headers, each once, as one translation unit."""
    return _expanded(f'{source}.c', set())


def _expanded(name: str, seen: set[str]) -> str:
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    text = (_SOURCE_FOLDER / name).read_text(encoding='utf-8')
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _OWN_HEADER.fullmatch(line):
            if header[1] not in seen:
                lines.append(_expanded(header[1], seen))
            lines.append(f'#line {number + 1} "{name}"')
        else:
            lines.append(line)
    return '\n'.join(lines) + '\n'


def _cache_folder() -> Path:
    """Where compiled files are kept.

    Raises:
        RuntimeError: There is no home folder.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    general = Path(os.environ.get('XDG_CACHE_HOME', ''))
    if not general.is_absolute():
        general = Path.home() / '.cache'
    return general / 'mmlaplacian'


def _intact(file: Path) -> bool:
    """Whether a file is there and ends in the digest of what comes before."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return False
    library, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(library).digest() == digest


def _build(text: str, compiler: _Compiler, flags: Sequence[str], target: Path) -> None:
    """Compiles ``text`` and puts the library in its place in one step.

    Raises:
        OSError: The folder cannot be written, or has no room.
        UnsupportedError: The compiler fails.
    """
    # Not in the target's folder: where that is full, the compiler would seem to fail.
    with tempfile.TemporaryDirectory(prefix='mmlaplacian-') as folder:
        compiled, linked = (str(Path(folder) / name) for name in ('kernels.o', 'kernels.so'))
        _run([*compiler.command, *flags, '-x', 'c', '-c', '-', '-o', compiled], text)
        # Without -fopenmp, which would name a runtime as a dependency.
        _run([*compiler.command, '-shared', compiled, '-o', linked])
        library = Path(linked).read_bytes()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix='build-') as folder:
        new = Path(folder) / target.name
        # A loader ignores what follows the library's own content.
        new.write_bytes(library + hashlib.sha256(library).digest())
        new.chmod(0o600)
        os.replace(new, target)


def _loaded_from(folder: Path, name: str, text: str, compiler: _Compiler,
                 flags: Sequence[str]) -> ctypes.CDLL:
    """The library in a folder, built where it is missing or damaged.

    Raises:
        OSError: The folder cannot be used.
        UnsupportedError: The compiler fails.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / name
    if not _intact(target):
        _build(text, compiler, flags, target)
    return ctypes.CDLL(str(target))


def _load(source: str) -> ctypes.CDLL:
    text, compiler = source_text(source), _find_compiler()
    flags = (*_FLAGS, '-fopenmp') if compiler.openmp else _FLAGS
    # A home folder is shared by machines with other compilers and processors.
    key = hashlib.sha256('\0'.join((text, *compiler.command, *flags, compiler.macros)).encode())
    name = f'{source}-{key.hexdigest()[:32]}.so'
    try:
        return _loaded_from(_cache_folder(), name, text, compiler, flags)
    except (OSError, RuntimeError):
        # No home, no room, read-only, or mounted without execution: for this process alone.
        pass
    try:
        with tempfile.TemporaryDirectory(prefix='mmlaplacian-') as folder:
            return _loaded_from(Path(folder), name, text, compiler, flags)
    except OSError as error:
        raise UnsupportedError(f'the compiled CPU kernels cannot be loaded: {error}; name a '
                               f'folder that can be written in {CACHE_VARIABLE}') from error


@cache
def _library(source: str) -> ctypes.CDLL | UnsupportedError:
    """The loaded library, or the error of the one attempt."""
    try:
        return _load(source)
    except UnsupportedError as error:
        return error


def library(source: str) -> ctypes.CDLL:
    """The compiled text of ``cpu_src/``; compiled or read from the cache at the first call.

    Args:
        source: File in ``cpu_src/`` without its suffix.

    Raises:
        UnsupportedError: There is no C compiler, or it fails; the text says which. It is not
            tried again.
    """
    loaded = _library(source)
    if isinstance(loaded, UnsupportedError):
        raise UnsupportedError(str(loaded)) from loaded
    return loaded


def check(x: Tensor) -> None:
    """Raises where no compiled text takes tensors like this.

    Raises:
        UnsupportedError: Device or dtype is another.
    """
    if x.device.type != 'cpu':
        raise UnsupportedError(f'the CPU kernels need CPU tensors, got {x.device}')
    if x.dtype != torch.float32:
        raise UnsupportedError(f'the CPU kernels take torch.float32, got {x.dtype}')


def constant(source: str, name: str) -> int:
    """A ``const int`` of the compiled text.

    Args:
        source: File in ``cpu_src/`` without its suffix.
        name: Its name there.
    """
    return ctypes.c_int.in_dll(library(source), name).value


def threads(work: int) -> int:
    """Threads that a call should use: at most torch's own number, and 1 after a fork.

    Args:
        work: (query, landmark, channel) triples of the call.
    """
    if _Process.forked:
        return 1
    return max(1, min(torch.get_num_threads(), work // _LEAST_WORK))


def call(source: str, function: str,
         arguments: Sequence[Tensor | None | ctypes._SimpleCData | ctypes.Array]) -> None:
    """Calls a C function; other Python threads run meanwhile.

    Args:
        source: File in ``cpu_src/`` without its suffix.
        function: Its name there.
        arguments: CPU tensors, None for a null pointer, ctypes arrays, and ctypes scalars of
            the exact type: a Python number would be passed as a C int whatever the type there
            is.

    Raises:
        TypeError: An argument of another type.
        UnsupportedError: See :func:`library`.
    """
    values = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            values.append(ctypes.c_void_p(argument.data_ptr()))
        elif argument is None:
            values.append(ctypes.c_void_p())
        elif isinstance(argument, ctypes._SimpleCData | ctypes.Array):
            values.append(argument)
        else:
            raise TypeError('an argument of a CPU kernel must be a tensor, None or a ctypes '
                            f'scalar, got {argument!r} of type {type(argument).__name__}')
    compiled = library(source)[function]
    compiled.restype = None
    compiled(*values)


def call_with_scratch(source: str, function: str, before: Sequence, after: Sequence) -> None:
    """Calls a C function that needs memory: with None for it, it says how much.

    Args:
        source: File in ``cpu_src/`` without its suffix.
        function: Its name there.
        before: Arguments before the memory and its size, as of :func:`call`.
        after: Those behind.
    """
    floats = torch.empty((), dtype=torch.int64)
    call(source, function, (*before, None, floats, *after))
    scratch = torch.empty(int(floats), dtype=torch.float32)
    call(source, function, (*before, scratch, floats, *after))
