"""Computes what the attention's kernels can reach, and writes the tables of docs/performance.md.

::

    python benchmarks/roofline.py docs/performance.md

Needs no GPU: NVRTC compiles, and what is read is the machine code. The tables stand between two
comments of the page; the text around them is kept.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import kernel_code
from gpu_model import (
    DEVICES,
    Device,
    Floor,
    cycles,
    kernel_floor,
    lane_instructions,
    occupancy,
    shared_cycles,
    torch_floor,
)
from launches import PASSES, KernelLaunch, Launch, attention_launches
from report import table

from mmlaplacian.ops.laplacian_kernel.tiling import ceil_div

GROUPS = (4, 16, 128, 1024)
TOKENS = (3136, 12544, 66800)
HEAD_DIM, LANDMARKS = 32, 49
FORMS = ('fused', 'unfused')
LAUNCH_SECONDS = 3e-6
"""Assumed: a GPU's pause between two launches, 2 to 4 µs in a stream that never runs dry."""
BEGIN, END = '<!-- roofline: written by benchmarks/roofline.py -->', '<!-- /roofline -->'
_WARP = 32


@cache
def launches(fused: bool, which: str, groups: int, n: int) -> list[Launch]:
    """Launches of a case at the page's head dim and landmarks."""
    return attention_launches(fused, which, groups, n, HEAD_DIM, LANDMARKS)


def own_backward() -> bool:
    """Whether the backward has kernels of its own."""
    return launches(True, 'backward', GROUPS[0], TOKENS[0]) != launches(
        False, 'backward', GROUPS[0], TOKENS[0])


@cache
def floor(launch: Launch, device: Device) -> Floor:
    """The least time of a launch."""
    if not isinstance(launch, KernelLaunch):
        return torch_floor(launch, device)
    resident = occupancy(launch, kernel_code.resources(launch, device.arch), device)
    return kernel_floor(launch, kernel_code.instructions(launch, device.arch, True), resident,
                        device)


def warp_instructions(listed: Iterable[Launch], arch: int, least: bool) -> float:
    """Of all launches: counted for kernels, for products of torch the multiply-adds alone."""
    total = 0.0
    for launch in listed:
        if isinstance(launch, KernelLaunch):
            counted = kernel_code.instructions(launch, arch, least)
            total += sum(counted.values()) * launch.blocks * ceil_div(launch.threads, _WARP)
        else:
            total += launch.multiply_adds / _WARP
    return total


def counted(listed: Sequence[Launch], arch: int, tokens: int) -> str:
    """Warp instructions of a token, from the least to the most."""
    bounds = [warp_instructions(listed, arch, least) / tokens for least in (True, False)]
    return '{} to {}'.format(*(f'{x:.0f}' if x >= 100 else f'{x:.1f}' for x in bounds))


def time_of(seconds: float) -> str:
    """Three digits, in µs or ms."""
    value, unit = (seconds * 1e6, 'µs') if seconds < 1e-3 else (seconds * 1e3, 'ms')
    return f'{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}'


def device_table() -> list[str]:
    """The peak figures."""
    return table(['', 'compute capability', 'multiprocessors', 'clock', 'warp instructions',
                  'float32 lanes a multiprocessor', 'memory'],
                 [[d.name, f'{d.arch / 10}', str(d.processors), f'{d.clock / 1e9:.2f} GHz',
                   f'{4e-12 * d.processors * d.clock:.2f}e12/s', str(d.lanes),
                   f'{d.bandwidth / 1e12:.2f} TB/s'] for d in DEVICES])


def kernel_rows(which: str, device: Device, groups: int, n: int) -> list[list[str]]:
    """A row for every kernel of the fused form."""
    rows = []
    for launch in launches(True, which, groups, n):
        if not isinstance(launch, KernelLaunch):
            continue
        counts = kernel_code.instructions(launch, device.arch, True)
        resources = kernel_code.resources(launch, device.arch)
        held = occupancy(launch, resources, device)
        every, busy = sum(counts.values()), cycles(counts, device)
        shared = [shared_cycles(counts, wide) / busy for wide in (1, 4)]
        rows.append([
            f'`{launch.function}`', str(resources.registers), str(launch.threads),
            f'{(resources.shared + launch.shared_bytes) / 1e3:.1f} kB',
            f'{held.blocks} ({held.warps} warps), {held.limit}',
            counted([launch], device.arch, groups * n), f'{lane_instructions(counts) / every:.0%}',
            '{:.0%} to {:.0%}'.format(*shared), f'{launch.bytes / (groups * n):.0f}',
            floor(launch, device).limit])
    return rows


def token_rows(which: str) -> list[list[str]]:
    """Launches, instructions and bytes of a token by case."""
    rows = []
    for groups, n in product(GROUPS, TOKENS):
        row = [str(groups), str(n)]
        for fused in (True, False):
            listed = launches(fused, which, groups, n)
            row += [str(len(listed)), *(counted(listed, d.arch, groups * n) for d in DEVICES),
                    f'{sum(launch.bytes for launch in listed) / (groups * n):.0f}']
        rows.append(row)
    return rows


def pass_floor(listed: Sequence[Launch], device: Device) -> tuple[float, float, str]:
    """Least seconds of the kernels one after another and of the pauses between them, and what
    limits most of it."""
    by_limit: dict[str, float] = defaultdict(float)
    for launch in listed:
        least = floor(launch, device)
        by_limit[least.limit] += least.seconds
    kernels, pauses = sum(by_limit.values()), len(listed) * LAUNCH_SECONDS
    limit = max(by_limit, key=by_limit.__getitem__)
    return kernels, pauses, limit if kernels > pauses else 'launches'


def case_rows(which: str, device: Device) -> list[list[str]]:
    """Least times by case."""
    rows = []
    for groups, n in product(GROUPS, TOKENS):
        forms = [launches(fused, which, groups, n) for fused in (True, False)]
        least = [pass_floor(listed, device) for listed in forms]
        widest = max(x.blocks for x in forms[0] if isinstance(x, KernelLaunch)
                     and x.shared_bytes and x.function.startswith('nystrom_attention'))
        fused, unfused = (max(kernels, pauses) for kernels, pauses, _ in least)
        rows.append([str(groups), str(n), f'{widest / device.processors:.1f}',
                     *(text for kernels, pauses, limit in least
                       for text in (time_of(kernels), time_of(pauses), limit)),
                     f'{unfused / fused:.2f}'])
    return rows


def tables() -> list[str]:
    """Everything between the page's two comments."""
    groups, n = 16, 12544
    lines = [f'Compiled by NVRTC {kernel_code.compiler_version()}. Computed, not measured.', '',
             '### Devices', '', *device_table()]
    for which in PASSES:
        if which == 'backward' and not own_backward():
            lines += ['', 'The backward has no fused kernels yet: it is the unfused one.']
            continue
        for device in DEVICES:
            lines += ['', f'### Kernels of the {which} on an {device.name}, B·h = {groups}, '
                      f'N = {n}', '',
                      *table(['kernel', 'registers', 'threads', 'shared', 'blocks at once, limit',
                              'instructions a token', 'of them float32', 'shared memory busy',
                              'bytes a token', 'limit'],
                             kernel_rows(which, device, groups, n))]
        lines += ['', f'### A token of the {which}', '',
                  *table(['B·h', 'N', *(f'{form}: {what}' for form in FORMS for what in (
                      'launches', *(f'instructions, {d.name}' for d in DEVICES), 'bytes'))],
                         token_rows(which))]
        for device in DEVICES:
            lines += ['', f'### Least time of the {which} on an {device.name}', '',
                      *table(['B·h', 'N', 'blocks a multiprocessor',
                              *(f'{form}: {what}' for form in FORMS
                                for what in ('kernels', 'launches', 'limit')),
                              'unfused / fused'],
                             case_rows(which, device))]
    return lines


def around(page: str) -> tuple[str, str]:
    """A page's text up to its tables and from their end on.

    Raises:
        ValueError: The page lacks one of the two comments.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f'the page must hold {BEGIN} and {END}')
    return before + BEGIN, END + after


def written(page: str) -> str:
    """A page with new tables."""
    before, after = around(page)
    return '\n'.join([before, '', *tables(), '', after])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the tables; 2 where nothing can be compiled."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('page', type=Path, metavar='FILE', help='Markdown page to write into')
    options = parser.parse_args(arguments)
    if reason := kernel_code.missing():
        print(f'roofline.py needs a compiler: {reason}.', file=sys.stderr)
        return 2
    try:
        page = options.page.read_text(encoding='utf-8')
        around(page)
    except (OSError, ValueError) as error:
        parser.error(f'argument FILE: {error}')
    options.page.write_text(written(page), encoding='utf-8')
    print(f'{options.page} written')
    return 0


if __name__ == '__main__':
    sys.exit(main())
