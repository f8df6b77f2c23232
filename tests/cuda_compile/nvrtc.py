"""Compiles kernel text for a GPU that need not be there, and reads what became of it."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ARCHITECTURES = (75, 80, 86, 90, 100, 120)


@cache
def missing_compiler() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        from cuda.bindings import nvrtc
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        return f'NVRTC does not load ({error}): install cuda-bindings and nvidia-cuda-nvrtc'
    return None


@cache
def disassembler() -> Path | None:
    """The folder of cuobjdump and nvdisasm that triton's wheel brings, or None."""
    spec = find_spec('triton')
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0], 'backends', 'nvidia', 'bin')
    return folder if (folder / 'cuobjdump').exists() else None


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, bytes of shared memory, bytes spilled."""
    registers: int
    shared: int
    spills: int


def compile_text(sources: Sequence[Path | str], macros: Mapping[str, object], arch: int
                 ) -> tuple[bytes, str]:
    """Compile as the runtime does: one text, ``--std=c++17``, no fast mathematics.

    Args:
        sources: Paths, or strings of kernel text, in the order of concatenation.
        macros: ``-D`` definitions.
        arch: 80 for sm_80.

    Returns:
        The cubin and the compiler's log, in which ptxas names registers and spills.
    """
    from cuda.bindings import nvrtc

    def check(result: tuple, *more: object) -> object:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f'NVRTC: {result[0].name} {"".join(map(str, more))}')
        return result[1] if len(result) > 1 else None

    text = '\n'.join(s if isinstance(s, str) else Path(s).read_text() for s in sources)
    program = check(nvrtc.nvrtcCreateProgram(text.encode(), b'kernel.cu', 0, [], []))
    options = ['--std=c++17', f'-arch=sm_{arch}', '-ftz=true', '--ptxas-options=-v',
               *(f'-D{name}={value}' for name, value in macros.items())]
    status, = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = b' ' * check(nvrtc.nvrtcGetProgramLogSize(program))
    check(nvrtc.nvrtcGetProgramLog(program, log))
    log = log.decode(errors='replace').strip('\0 ')
    check((status, ), f'for sm_{arch} with {dict(macros)}:\n{log}')
    cubin = b' ' * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    check(nvrtc.nvrtcDestroyProgram(program))
    return cubin, log


def resources(log: str) -> dict[str, Resources]:
    """Registers, shared memory and spills of each kernel, from the log of ``ptxas -v``."""
    found = {}
    for name, body in re.findall(r"Compiling entry function '(\w+)'.*?\n(.*?)(?=ptxas info\s*: "
                                 r'Compiling entry|\Z)', log, re.DOTALL):
        spilled = re.search(r'(\d+) bytes stack frame, (\d+) bytes spill stores, '
                            r'(\d+) bytes spill loads', body)
        shared = re.search(r'(\d+) bytes smem', body)
        found[name] = Resources(int(re.search(r'Used (\d+) registers', body)[1]),
                                int(shared[1]) if shared else 0, sum(map(int, spilled.groups())))
    return found


@dataclass(frozen=True)
class Instruction:
    """One line of SASS."""
    address: int
    text: str

    @property
    def opcode(self) -> str:
        """Name without the predicate, as ``FADD`` or ``LDS.128``."""
        return re.sub(r'^@!?U?P\w+\s+', '', self.text).split()[0]


def disassemble(cubin: bytes, kernel: str, folder: Path) -> list[Instruction]:
    """The SASS of one kernel; ``folder`` takes the cubin."""
    path = folder / f'{kernel}.cubin'
    path.write_bytes(cubin)
    sass = subprocess.run([disassembler() / 'cuobjdump', '-sass', '-fun', kernel, path],
                          capture_output=True, text=True, check=True).stdout
    return [Instruction(int(address, 16), text.strip())
            for address, text in re.findall(r'/\*([0-9a-f]{4,})\*/\s+([^;]+);', sass)]


def loops(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Bodies of the innermost loops: from the target of a backward branch to the branch."""
    spans = []
    for instruction in instructions:
        target = re.search(r'\bBRA\S*\s.*?(0x[0-9a-f]+)', instruction.text)
        # A branch to itself only pads the end of the text.
        if target and int(target[1], 16) < instruction.address:
            spans.append((int(target[1], 16), instruction.address))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [[i for i in instructions if first <= i.address <= last] for first, last in inner]
