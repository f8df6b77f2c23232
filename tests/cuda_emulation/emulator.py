"""Compiles unmodified CUDA text for the host and launches its kernels.

::

    emulator = Emulator(directory)            # compiled programs are kept there, by content
    out = np.full((n, m), np.nan, np.float32)
    emulator.launch([CUDA / 'common.cuh', CUDA / 'laplacian_kernel.cu'], {'HEAD_DIM': 32},
                    'laplacian_kernel_forward', grid=8, block=224,
                    args=[q, k, out, np.float32(-0.25), np.int64(n), np.int64(m)], seed=1)

``args`` are numpy arrays for pointers and numpy scalars of the exact type for values: a Python
number is refused, as it is by a raw launch. Arrays behind pointers that are not ``const`` are
written in place. The program runs as a child process under the address and the undefined
behaviour sanitizer; their report, a barrier that not all threads reach, and a write through a
``const`` pointer raise `EmulationError`. ``cuda_emulation.h`` says what a kernel may use.

`Emulator.library` compiles the same text without sanitizers into this process, for callers that
hold raw addresses.
"""

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
COMPILER = shutil.which('g++')
MISSING = None if COMPILER else 'g++ is not installed: the CUDA text cannot be run on the host'

_FLAGS = ['-std=c++17', '-O1', '-g1', '-fno-strict-aliasing', '-ffp-contract=off', '-Wall',
          '-Wno-unknown-pragmas', '-Wno-unused-function', '-Wno-unused-variable',
          '-Wno-unused-but-set-variable']
_SANITIZERS = ['-fsanitize=address,undefined', '-fno-sanitize-recover=all',
               '-fno-omit-frame-pointer', '-no-pie']
_ENVIRONMENT = {'ASAN_OPTIONS': 'detect_leaks=0:detect_stack_use_after_return=0',
                'UBSAN_OPTIONS': 'print_stacktrace=0'}
_SEED = 0x9e3779b9

Macros = Mapping[str, object]
Size = int | tuple[int, ...]


class EmulationError(RuntimeError):
    """The text did not compile, or the launch did something that a GPU would not allow."""


@dataclass
class Offset:
    """An array whose address lies ``nbytes`` past a 16-byte boundary (4: float32 cannot be
    loaded in fours)."""
    array: np.ndarray
    nbytes: int


@dataclass
class Sparse:
    """A buffer too large to allocate: ``nbytes`` of zero pages, of which some are given and read.

    Args:
        nbytes: Size of the buffer.
        pieces: Byte offset -> array that lies there; written back for pointers that are not const.
    """
    nbytes: int
    pieces: dict[int, np.ndarray] = field(default_factory=dict)


def _three(size: Size) -> tuple[int, int, int]:
    sizes = (size, ) if isinstance(size, int) else tuple(size)
    return (*sizes, *(1, ) * (3 - len(sizes)))


def kernel_names(text: str) -> list[str]:
    """Names of the ``__global__`` functions in preprocessed text."""
    return re.findall(r'__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(', text)


def _compile(arguments: list[str], text: str) -> str:
    result = subprocess.run([COMPILER, *arguments], input=text, capture_output=True, text=True)
    if result.returncode:
        raise EmulationError(f'g++ refuses the kernel text:\n{result.stderr}')
    return result.stdout


def _run(command: list[Path | str], stdin: bytes = b'', timeout: float = 60) -> bytes:
    result = subprocess.run(command, input=stdin, capture_output=True, timeout=timeout,
                            env={**os.environ, **_ENVIRONMENT})
    if result.returncode:
        report = result.stderr.decode(errors='replace').splitlines(keepends=True)
        report = ''.join(line for line in report if 'makecontext' not in line)
        raise EmulationError(report or f'{command}: exit status {result.returncode}')
    return result.stdout


class Emulator:
    """Builds programs into ``directory`` and runs them."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._programs: dict[tuple, Path] = {}
        self._kinds: dict[tuple[Path, str], str] = {}
        self._shared: dict[Path, bytes] = {}

    def build(self, sources: Sequence[Path | str], macros: Macros, *,
              executable: bool = True) -> Path:
        """Compile ``sources`` (files, or text itself) as one translation unit.

        Args:
            sources: Paths, or strings of kernel text, in the order of concatenation.
            macros: ``-D`` definitions.
            executable: A program with sanitizers, or a plain shared library.

        Returns:
            The compiled file. The same text, macros and flags are compiled once.
        """
        parts = [('text', s) if isinstance(s, str) else (Path(s).name, Path(s).read_text())
                 for s in sources]
        key = (tuple(parts), tuple(sorted(macros.items())), executable)
        if key not in self._programs:
            self._programs[key] = self._build(parts, macros, executable)
        return self._programs[key]

    def _build(self, parts: list[tuple[str, str]], macros: Macros, executable: bool) -> Path:
        defines = [f'-D{name}={value}' for name, value in macros.items()]
        # The names of the kernels that these macros leave in the text.
        seen = _compile(['-E', '-P', '-x', 'c++', '-', '-DCUDA_EMULATION=1', *defines],
                        '\n'.join(text for _, text in parts))
        table = ', '.join(f'CUDA_EMULATION_KERNEL({name})' for name in kernel_names(seen))
        unit = '\n'.join([
            f'#include "{HERE / "cuda_emulation.h"}"',
            *(f'#line 1 "{name}"\n{text}' for name, text in parts),
            f'namespace cuda_emulation {{ static const Kernel kernels[] = {{{table}}}; }}',
            f'#include "{HERE / "cuda_emulation_main.h"}"', ''])
        flags = [*_FLAGS, *(_SANITIZERS + ['-DCUDA_EMULATION_EXECUTABLE'] if executable
                            else ['-O2', '-shared', '-fPIC']), *defines]
        headers = [(HERE / name).read_text()
                   for name in ('cuda_emulation.h', 'cuda_emulation_main.h')]
        digest = hashlib.sha256('\0'.join([unit, *headers, *flags]).encode()).hexdigest()[:24]
        target = self.directory / (digest + ('' if executable else '.so'))
        if not target.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f'{digest}.{os.getpid()}')
            _compile(['-x', 'c++', '-', '-o', str(partial), *flags], unit)
            partial.rename(target)
        return target

    def launch(self, sources: Sequence[Path | str], macros: Macros, kernel: str, grid: Size,
               block: Size, args: Sequence[object], *, seed: int = 0, shared_bytes: int = 0,
               blocks: Sequence[int] = (), timeout: float = 300) -> None:
        """Run one launch; see the module docstring.

        Args:
            sources, macros: As in `build`.
            kernel: Name of a ``__global__`` function.
            grid, block: Sizes, x first.
            args: numpy arrays, `Offset`, `Sparse`, numpy scalars.
            seed: Order of blocks and threads.
            shared_bytes: Dynamic shared memory.
            blocks: Linear indices of the blocks to run; all when empty.
            timeout: Seconds.
        """
        program = self.build(sources, macros)
        pointers = [a for a in args if isinstance(a, np.ndarray | Offset | Sparse)]
        record = [struct.pack('I', len(kernel)), kernel.encode(),
                  struct.pack('6I', *_three(grid), *_three(block)),
                  struct.pack(f'3Q{len(blocks)}Q', shared_bytes, seed ^ _SEED, len(blocks),
                              *blocks),
                  self._shared_arrays(program), struct.pack('I', len(args)), *map(_record, args)]
        writable = self._writable(program, kernel, args)
        outputs = [_pieces(a) for a, w in zip(pointers, writable, strict=True) if w]
        for pieces in outputs:
            record.append(struct.pack('Q', len(pieces)))
            record += [struct.pack('2Q', at, array.nbytes) for at, array in pieces]
        output = _run([program], b''.join(record), timeout)
        at = 0
        for pieces in outputs:
            for _, array in pieces:
                data = np.frombuffer(output, array.dtype, array.size, at)
                array[...] = data.reshape(array.shape)
                at += array.nbytes

    def _shared_arrays(self, program: Path) -> bytes:
        """Addresses and sizes of the static arrays inside functions: ``__shared__``."""
        if program not in self._shared:
            symbols = subprocess.run(['nm', '--print-size', program], capture_output=True,
                                     text=True, check=True).stdout
            spans = re.findall(r'^(\w+) (\w+) [bBdD] _ZZ', symbols, re.MULTILINE)
            self._shared[program] = struct.pack(f'Q{2 * len(spans)}Q', len(spans), *(
                int(value, 16) for span in spans for value in span))
        return self._shared[program]

    def _writable(self, program: Path, kernel: str, args: Sequence[object]) -> list[bool]:
        """Which pointer arguments the kernel does not take as const."""
        if (program, kernel) not in self._kinds:
            self._kinds[program, kernel] = _run([program, kernel]).decode()
        kinds = self._kinds[program, kernel]
        if len(kinds) != len(args):
            raise EmulationError(f'{kernel}: {len(args)} arguments given, '
                                 f'the kernel takes {len(kinds)}')
        return [k == 'p' for k in kinds if k in 'pc']

    def library(self, sources: Sequence[Path | str], macros: Macros) -> 'Library':
        """The same text in this process, without sanitizers."""
        return Library(self.build(sources, macros, executable=False))


def _pieces(argument: object) -> list[tuple[int, np.ndarray]]:
    if isinstance(argument, Sparse):
        return sorted(argument.pieces.items())
    return [(0, argument.array if isinstance(argument, Offset) else argument)]


def _record(argument: object) -> bytes:
    if isinstance(argument, np.ndarray):
        argument = Offset(argument, 0)
    if isinstance(argument, Offset):
        array = argument.array
        if not array.flags.c_contiguous:
            raise TypeError(f'an array argument must be contiguous, got strides {array.strides}')
        return struct.pack('<cIcQQ', b'p', 8, b'd', argument.nbytes, array.nbytes
                           ) + array.tobytes()
    if isinstance(argument, Sparse):
        pieces = b''.join(struct.pack('<QQ', at, array.nbytes) + array.tobytes()
                          for at, array in _pieces(argument))
        return struct.pack('<cIcQQQ', b'p', 8, b'z', 0, argument.nbytes,
                           len(argument.pieces)) + pieces
    if isinstance(argument, np.generic) and argument.dtype.kind in 'fiu':
        return struct.pack('<cI', argument.dtype.kind.encode(), argument.nbytes
                           ) + argument.tobytes()
    raise TypeError('an argument must be a numpy array or a numpy scalar, got '
                    f'{type(argument).__name__} {argument!r}')


class Library:
    """Kernels that take raw addresses, launched in this process without sanitizers."""

    def __init__(self, path: Path) -> None:
        self._launch = ctypes.CDLL(str(path)).cuda_emulation_launch
        self._launch.restype = ctypes.c_char_p

    def launch(self, kernel: str, grid: Size, block: Size, args: Sequence[object], *,
               seed: int = 0, shared_bytes: int = 0) -> None:
        """Run one launch.

        Args:
            kernel: Name of a ``__global__`` function.
            grid, block: Sizes, x first.
            args: ``int`` for an address (as ``tensor.data_ptr()``), numpy scalars for values.
            seed: Order of blocks and threads.
            shared_bytes: Dynamic shared memory.
        """
        kinds, values = b'', []
        for argument in args:
            if type(argument) is int:
                kinds += b'p'
                values.append(ctypes.create_string_buffer(struct.pack('Q', argument), 8))
            elif isinstance(argument, np.generic) and argument.dtype.kind in 'fiu':
                kinds += argument.dtype.kind.encode()
                values.append(ctypes.create_string_buffer(argument.tobytes(), argument.nbytes))
            else:
                raise TypeError('an argument must be an address or a numpy scalar, got '
                                f'{type(argument).__name__} {argument!r}')
        count = len(values)
        error = self._launch(
            kernel.encode(), (ctypes.c_uint * 3)(*_three(grid)), (ctypes.c_uint * 3)(
                *_three(block)), ctypes.c_uint64(shared_bytes), ctypes.c_uint64(seed ^ _SEED),
            count, (ctypes.c_void_p * count)(*map(ctypes.addressof, values)), kinds,
            (ctypes.c_uint * count)(*map(ctypes.sizeof, values)))
        if error:
            raise EmulationError(error.decode())
