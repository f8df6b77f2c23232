"""Machine code of the kernels, compiled without a GPU, and the instructions of a launch."""

from __future__ import annotations

import re
import sys
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from kernel_loops import KERNELS, Loop
from launches import KernelLaunch

from mmlaplacian.ops.cupy_runtime import source_text

# The tests of the compiled text bring the compiler and the disassembler.
sys.path.append(str(Path(__file__).resolve().parents[1] / 'tests' / 'cuda_compile'))
import nvrtc  # noqa: E402
from nvrtc import Instruction, Resources  # noqa: E402

Opcodes = Counter[str]


@dataclass(frozen=True)
class Node:
    """A loop, or a whole kernel.

    Args:
        own: Its instructions outside the loops inside it.
        least: Those on the shortest way from its start to its end.
        inner: The loops directly inside it.
    """

    own: tuple[str, ...]
    least: tuple[str, ...]
    inner: tuple[Node, ...]


def missing() -> str | None:
    """Why no kernel can be compiled and read here, or None."""
    if nvrtc.missing_compiler():
        return nvrtc.missing_compiler()
    return None if nvrtc.disassembler() else "cuobjdump is not installed: triton's wheel has it"


def compiler_version() -> str:
    """Version of NVRTC, on which registers and instructions depend."""
    from cuda.bindings import nvrtc as bindings

    return '{}.{}'.format(*bindings.nvrtcVersion()[1:])


def _branch(instruction: Instruction) -> int | None:
    """Address that an instruction may go on at, or None."""
    target = re.search(r'\bBRA\S*\s.*?(0x[0-9a-f]+)', instruction.text)
    return int(target[1], 16) if target else None


def _shortest(own: Sequence[Instruction]) -> tuple[str, ...]:
    """Opcodes on the shortest way through instructions whose branches lead forward."""
    at = [i.address for i in own]
    following: list[tuple[int, int | None]] = [(1, None)] * len(own)
    for index in reversed(range(len(own) - 1)):
        target = _branch(own[index])
        # Into a loop inside means past it: that loop is counted on its own.
        jump = None if target is None else bisect_left(at, target)
        ways = [] if own[index].text.startswith('BRA') and jump is not None else [index + 1]
        if jump is not None and index < jump < len(own):
            ways.append(jump)
        best = min(ways, key=lambda way: following[way][0], default=len(own) - 1)
        following[index] = following[best][0] + 1, best
    path, index = [], 0
    while index is not None:
        path.append(own[index].opcode)
        index = following[index][1]
    return tuple(path)


def _tree(code: Sequence[Instruction], first: int, last: int,
          spans: Sequence[tuple[int, int]]) -> Node:
    """Nests spans of addresses that lie in ``first`` to ``last``."""
    inside = [s for s in spans if first <= s[0] and s[1] <= last and s != (first, last)]
    outermost = [s for s in inside
                 if not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in inside)]
    own = [i for i in code if first <= i.address <= last
           and not any(s[0] <= i.address <= s[1] for s in outermost)]
    return Node(tuple(i.opcode for i in own), _shortest(own),
                tuple(_tree(code, *s, inside) for s in sorted(outermost)))


def loop_tree(code: Sequence[Instruction]) -> Node:
    """Loops are what lies between a branch back and its target."""
    spans = set()
    for instruction in code:
        target = _branch(instruction)
        # A branch to itself only pads the end of the text.
        if target is not None and target < instruction.address:
            spans.add((target, instruction.address))
    return _tree(code, code[0].address, code[-1].address, sorted(spans))


@cache
def _compiled(source: str, macros: tuple[tuple[str, int], ...], arch: int
              ) -> tuple[bytes, dict[str, Resources]]:
    cubin, log = nvrtc.compile_text([source_text(source)], dict(macros), arch)
    return cubin, nvrtc.resources(log)


@cache
def _code(source: str, function: str, macros: tuple[tuple[str, int], ...], arch: int) -> Node:
    with tempfile.TemporaryDirectory() as folder:
        code = nvrtc.disassemble(_compiled(source, macros, arch)[0], function, Path(folder))
    # What only fills the last line of the text, or is called for numbers out of range.
    end = next(at for at, i in enumerate(code) if i.opcode == 'EXIT' and at > len(code) // 2)
    return loop_tree(code[:end + 1])


def resources(launch: KernelLaunch, arch: int) -> Resources:
    """Registers, static shared memory and spills of a launch's kernel."""
    return _compiled(launch.source, launch.macros, arch)[1][launch.function]


def _weigh(node: Node, passes: float, table: list[Loop], least: bool, total: Opcodes,
           function: str) -> None:
    for opcode in node.least if least else node.own:
        total[opcode] += passes
    for inner in node.inner:
        if not table:
            raise ValueError(f'{function} has more loops than the table of kernel_loops.py')
        loop = table.pop(0)
        found = sum(opcode.startswith(loop.opcode) for opcode in inner.own)
        if (own := loop.passes_of(found)) is None:
            raise ValueError(f'{function}: a loop holds {found} {loop.opcode}, and the table of '
                             f'kernel_loops.py says {loop.count}: another compiler or text')
        _weigh(inner, passes * own, table, least, total, function)


@cache
def instructions(launch: KernelLaunch, arch: int, least: bool) -> Mapping[str, float]:
    """Mean instructions of a warp of a launch, by name.

    Loops pass as often as kernel_loops.py says. Which branches are taken outside of them the
    code does not tell, so the truth lies between two counts.

    Args:
        launch: Of a kernel that kernel_loops.py has.
        arch: 80 for sm_80.
        least: The shortest way through each loop, else every instruction in it.

    Raises:
        KeyError: The kernel has no table of loops.
        ValueError: The table does not fit the compiled code.
    """
    table = KERNELS[launch.function](launch)
    total: Opcodes = Counter()
    _weigh(_code(launch.source, launch.function, launch.macros, arch), 1, table, least, total,
           launch.function)
    if table:
        raise ValueError(f'{launch.function} has {len(table)} loops less than its table')
    return MappingProxyType(total)
