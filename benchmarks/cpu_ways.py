"""Compares ways of building the Laplacian kernel for a CPU: time per call, and of a first call.

::

    python benchmarks/cpu_ways.py --threads 2 --out cpu_ways.json

Needs Numba and a C++ compiler for torch.compile; the package on the module path.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numba
import numba_kernel
import torch
from op_cases import BROADCAST, CDIST, KERNEL_SCALE, MODES, Case, functions
from report import environment
from timing import Timing, time_in_turn
from torch import Tensor

from mmlaplacian.ops.laplacian_kernel import cpu_impl

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device('cpu')
C_TEXT, NUMBA = 'C text', 'Numba'
SIZES = ((2, 66800, 32), (2, 66800, 64), (8, 3136, 32))
# Where each way keeps what it compiled.
CACHES = {C_TEXT: 'MMLAPLACIAN_CACHE', NUMBA: 'NUMBA_CACHE_DIR',
          BROADCAST: 'TORCHINDUCTOR_CACHE_DIR'}
_SECONDS_EACH, _MOST_REPEATS = 2.0, 15


def _c_forward(q: Tensor, k: Tensor) -> Tensor:
    return cpu_impl.kernel_matrix(q, k, KERNEL_SCALE, 'laplacian')


def _c_both(q: Tensor, k: Tensor, grad: Tensor) -> None:
    cpu_impl.kernel_matrix_backward(grad, q, k, _c_forward(q, k), KERNEL_SCALE, 'laplacian', True,
                                    True)


def _numba_forward(q: Tensor, k: Tensor) -> Tensor:
    return numba_kernel.forward(q, k, KERNEL_SCALE)


def _numba_both(q: Tensor, k: Tensor, grad: Tensor) -> None:
    numba_kernel.backward(grad, q, k, _numba_forward(q, k), KERNEL_SCALE)


def ways(case: Case) -> dict[str, Callable[[], object]]:
    """What to time, by the way's name."""
    q, k, grad = (torch.randn(case.groups, 1, rows, columns) * 0.3 for rows, columns in (
        (case.n, case.d), (case.m, case.d), (case.n, case.m)))
    by_torch = functions(case, CPU)
    if case.mode == 'forward':
        own = {C_TEXT: partial(_c_forward, q, k), NUMBA: partial(_numba_forward, q, k)}
    else:
        own = {C_TEXT: partial(_c_both, q, k, grad), NUMBA: partial(_numba_both, q, k, grad)}
    return {**own, CDIST: by_torch[CDIST], BROADCAST: by_torch[BROADCAST]}


def small_case(mode: str) -> Case:
    """One at which a call takes no time beside its compilation."""
    return Case('laplacian_kernel', mode, 2, 200, 32, torch.float32)


def first_call(way: str) -> float:
    """Seconds of the first forward and backward in this process."""
    call = ways(small_case(MODES[1]))[way]
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def first_calls(way: str) -> dict[str, float]:
    """Seconds of a first call in two new processes: with an empty cache, then from it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, '--first-call', way]
        variables = {**os.environ, CACHES[way]: folder}
        return {state: float(subprocess.run(command, env=variables, check=True, text=True,
                                            stdout=subprocess.PIPE).stdout)
                for state in ('compiled', 'cached')}


def measure(sizes: Sequence[tuple[int, int, int]],
            say: Callable[[str], None] = print) -> dict[str, object]:
    """Times every way at every size, ready for JSON."""
    rows = []
    for groups, n, d in sizes:
        for mode in MODES:
            case = Case('laplacian_kernel', mode, groups, n, d, torch.float32)
            outcomes = time_in_turn(ways(case), CPU, _SECONDS_EACH, _MOST_REPEATS)
            rows.append({
                'mode': mode, 'groups': groups, 'n': n, 'm': case.m, 'd': d,
                'milliseconds': {name: outcome.milliseconds if isinstance(outcome, Timing)
                                 else outcome.reason for name, outcome in outcomes.items()},
                'repeats': {name: outcome.repeats for name, outcome in outcomes.items()
                            if isinstance(outcome, Timing)},
                'elements_per_s': case.elements / outcomes[C_TEXT].milliseconds * 1e3})
            say(_row(rows[-1]))
    return {'environment': {**environment(CPU, ROOT), 'processor': _processor(),
                            'threads': torch.get_num_threads(), 'numba': numba.__version__},
            'rows': rows}


def _processor() -> str:
    """The processor's name, and the widest vectors that the C text uses on it."""
    names = Path('/proc/cpuinfo')
    found = next((line.split(':')[1].strip() for line in names.read_text().splitlines()
                  if line.startswith('model name')), '') if names.exists() else ''
    lanes = cpu_impl.cpu_runtime.constant('laplacian_kernel', 'lanes')
    return f'{found or platform.machine()}, vectors of {lanes} float32'


def _row(row: Mapping[str, object]) -> str:
    own = row['milliseconds'][C_TEXT]
    cells = [str(row[key]) for key in ('groups', 'n', 'm', 'd', 'mode')]
    for name, value in row['milliseconds'].items():
        if isinstance(value, str):
            cells.append(value)
        else:
            ratio = '' if name == C_TEXT else f' ({value / own:.1f}x)'
            cells.append(f'{value:.3g} ms{ratio}')
    return '| ' + ' | '.join(cells) + ' |'


def markdown(record: Mapping[str, object]) -> str:
    """The record as two tables."""
    where = record['environment']
    header = ['B·h', 'N', 'M', 'd', 'pass', C_TEXT, NUMBA, CDIST, BROADCAST]
    lines = [f'{where["processor"]}, threads: {where["threads"]}, {where["date"]}, commit '
             f'{where["commit"] or "unknown"}, torch {where["torch"]}, Numba {where["numba"]}.',
             '',
             '| ' + ' | '.join(header) + ' |', '|' + ' --- |' * len(header),
             *map(_row, record['rows'])]
    if 'first_call_seconds' in record:
        lines += ['', '| first forward + backward of a process | compiled | from the cache |',
                  '| --- | --- | --- |']
        lines += [f'| {name} | {seconds["compiled"]:.2g} s | {seconds["cached"]:.2g} s |'
                  for name, seconds in record['first_call_seconds'].items()]
    return '\n'.join(lines) + '\n'


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument('--out', type=Path, metavar='FILE',
                      help='JSON file to write; the tables go beside it, with suffix .md')
    task.add_argument('--first-call', choices=CACHES, metavar='WAY',
                      help=f'print the seconds of one first call: {", ".join(CACHES)}')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads(), metavar='N',
                        help='threads of torch and Numba (default: torch\'s own number)')
    parser.add_argument('--quick', action='store_true', help='only the smallest size')
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison."""
    options = build_parser().parse_args(arguments)
    if options.first_call:
        print(first_call(options.first_call))
        return 0
    torch.set_num_threads(options.threads)
    numba.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        # What torch.compile keeps holds the number of threads of the run that compiled it.
        os.environ[CACHES[BROADCAST]] = folder
        record = measure(SIZES[-1:] if options.quick else SIZES)
    if not options.quick:
        record['first_call_seconds'] = {way: first_calls(way) for way in CACHES}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')
    options.out.with_suffix('.md').write_text(markdown(record), encoding='utf-8')
    print(f'{options.out} and {options.out.with_suffix(".md")} written')
    return 0


if __name__ == '__main__':
    sys.exit(main())
