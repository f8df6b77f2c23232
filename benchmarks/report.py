"""The record of a run: where it ran, every figure, and the same as a table."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch
from op_cases import OWN, Case
from timing import NotTimed, Outcome, Timing

from mmlaplacian.ops.cupy_runtime import require_cupy

# float32 additions that a multiprocessor starts in one cycle, by compute capability.
_ADD_LANES = {(7, 0): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128, (8, 9): 128,
              (9, 0): 128, (10, 0): 128, (10, 3): 128, (12, 0): 128}


def add_floor(device: torch.device) -> float | None:
    """Elements/s at which two float32 additions an element fill a GPU; None where unknown.

    An element is a (query, landmark, channel) triple: a difference, and the sum of its absolute
    value. No tensor core does either. The clock is the highest that the device names.
    """
    if device.type == 'cpu':
        return None
    properties = torch.cuda.get_device_properties(device)
    lanes = _ADD_LANES.get((properties.major, properties.minor))
    if lanes is None:
        return None
    return properties.multi_processor_count * lanes * properties.clock_rate * 1e3 / 2


def _output(*command: str, cwd: Path) -> str | None:
    """What a program prints, None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def processor() -> str:
    """The processor's name."""
    names = Path('/proc/cpuinfo')
    lines = names.read_text(encoding='utf-8').splitlines() if names.exists() else []
    return next((line.partition(':')[2].strip() for line in lines
                 if line.startswith('model name')), platform.machine())


def environment(device: torch.device, root: Path) -> dict[str, object]:
    """Processor, threads, device, date, commit and versions."""
    on_gpu = device.type == 'cuda'
    commit = _output('git', 'rev-parse', 'HEAD', cwd=root)
    if commit and _output('git', 'status', '--porcelain', '--untracked-files=no', cwd=root):
        commit += ', modified'
    return {
        'processor': processor(),
        'threads': torch.get_num_threads(),
        'device': torch.cuda.get_device_name(device) if on_gpu else 'CPU',
        'date': datetime.now(timezone.utc).isoformat(timespec='seconds'),
        'commit': commit,
        'torch': torch.__version__,
        'cuda': torch.version.cuda,
        'cupy': require_cupy().__version__ if on_gpu else None,
        'driver': _output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader',
                          f'--id={device.index or 0}', cwd=root) if on_gpu else None,
        'add_floor_elements_per_s': add_floor(device),
    }


def row(case: Case, outcomes: Mapping[str, Outcome], floor: float | None,
        errors: Mapping[str, float] | None = None) -> dict[str, object]:
    """One case as it goes into the JSON file, ``errors`` beside the outcomes where measured.

    ``speedup`` is a peer's median over the op's own. ``elements_per_s`` and ``share_of_floor``
    are given for the forward pass of the kernel, the one that the floor is made for.
    """
    own = outcomes.get(OWN)
    result: dict[str, object] = {
        **asdict(case), 'dtype': str(case.dtype).removeprefix('torch.'),
        'outcomes': {name: asdict(outcome) for name, outcome in outcomes.items()}}
    if errors is not None:
        result['errors'] = dict(errors)
    if isinstance(own, Timing):
        result['speedup'] = {
            name: outcome.milliseconds / own.milliseconds for name, outcome in outcomes.items()
            if name != OWN and isinstance(outcome, Timing)}
        if case.op == 'laplacian_kernel' and case.mode == 'forward':
            rate = case.elements / (own.milliseconds * 1e-3)
            result['elements_per_s'] = rate
            result['share_of_floor'] = rate / floor if floor else None
    return result


def refused(case: Case, reason: str) -> dict[str, object]:
    """A case that is not timed at all."""
    return row(case, {OWN: NotTimed(reason)}, None)


def _three_digits(value: float) -> str:
    return f'{value:.0f}' if value >= 1000 else f'{value:.3g}'


def cell(outcome: Mapping[str, object] | None, ratio: float | None,
         error: float | None = None) -> str:
    """A median, with what is known beside it: memory, times the op's own, error."""
    if outcome is None:
        return ''
    if 'reason' in outcome:
        return outcome['reason'].replace('|', '/')
    text = f'{_three_digits(outcome["milliseconds"])} ms'
    if outcome['peak_bytes'] is not None:
        text += f', {_three_digits(outcome["peak_bytes"] / 2**20)} MiB'
    text += f' ({_three_digits(ratio)}x)' if ratio is not None else ''
    return text + (f', {error:.0e}' if error else ', 0' if error is not None else '')


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a markdown table."""
    return ['| ' + ' | '.join(cells) + ' |' for cells in
            (header, ['---'] * len(header), *rows)]


def op_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """All rows of one op."""
    names = list(dict.fromkeys(name for row in rows for name in row['outcomes']))
    with_rate = any('elements_per_s' in row for row in rows)
    header = ['B·h', 'N', 'M', 'd', 'dtype', 'pass', *names]
    if with_rate:
        with_floor = any(row.get('share_of_floor') is not None for row in rows)
        header.append('elements/s (of the floor)' if with_floor else 'elements/s')
    lines = []
    for row in rows:
        cells = [str(row[key] or '') for key in ('groups', 'n', 'm', 'd', 'dtype', 'mode')]
        ratios, errors = row.get('speedup', {}), row.get('errors', {})
        cells += [cell(row['outcomes'].get(name), ratios.get(name), errors.get(name))
                  for name in names]
        if with_rate:
            rate, share = row.get('elements_per_s'), row.get('share_of_floor')
            cells.append(('' if rate is None else f'{rate:.3g}')
                         + ('' if share is None else f' ({share:.0%})'))
        lines.append(cells)
    return table(header, lines)


def place(where: Mapping[str, object]) -> str:
    """The line above a CPU's tables."""
    return (f'{where["processor"]}, threads: {where["threads"]}, {where["date"]}, commit '
            f'{where["commit"] or "unknown"}, torch {where["torch"]}.')


def gpu_place(where: Mapping[str, object]) -> str:
    """The line above a GPU's tables."""
    return (f'{where["device"]}, {where["date"]}, commit {where["commit"] or "unknown"}, torch '
            f'{where["torch"]}, CuPy {where["cupy"]}, driver {where["driver"] or "unknown"}.')


def markdown(record: Mapping[str, object]) -> str:
    """The record as tables, one for each op.

    A cell holds the median time, the peak memory beside the inputs, and in brackets how many
    times slower than the op a peer is.
    """
    where = record['environment']
    lines = [gpu_place(where)]
    floor = where['add_floor_elements_per_s']
    if floor is not None:
        lines.append(f'The floor of two float32 additions an element is {floor:.3g} elements/s.')
    for op in dict.fromkeys(row['op'] for row in record['rows']):
        rows = [row for row in record['rows'] if row['op'] == op]
        lines += ['', f'### {op}', '', *op_table(rows)]
    return '\n'.join(lines) + '\n'
