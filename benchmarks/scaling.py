"""How time and memory of the attention grow with the number of tokens, on a CPU.

::

    python benchmarks/scaling.py --out scaling.json
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import log
from statistics import linear_regression

import torch
from cpu_cases import ATTENTION, case_inputs
from cpu_memory import peak_bytes
from op_cases import LANDMARKS, MODES, Case, attention, bind
from parts import CPU, ROOT, build_parser, parse, refusal, refusals, write
from report import environment, place, table
from timing import Timing, time_in_turn

TOKENS = tuple(3136 * 2**power for power in range(7))
QUICK_TOKENS = (256, 512)
HEADS, HEAD_DIM = 2, 32
_REPEATS = 9


def exponent(values: Mapping[int, float]) -> float:
    """a of the least-squares fit value = c N^a on logarithms."""
    return linear_regression([log(n) for n in values], [log(y) for y in values.values()]).slope


def measure(tokens: Sequence[int], reason: str | None,
            repeats: int = _REPEATS) -> dict[str, object]:
    """Forward and backward at every N, ready for JSON.

    Args:
        tokens: Numbers of tokens N.
        reason: Why nothing is timed, None if it is.
        repeats: Timed calls of each N.
    """
    record = {'environment': environment(CPU, ROOT), 'refused': reason, 'heads': HEADS,
              'd': HEAD_DIM, 'm': LANDMARKS, 'mode': MODES[1], 'rows': []}
    if reason is not None:
        return record
    calls = {}
    for n in tokens:
        case = Case(ATTENTION, MODES[1], HEADS, n, HEAD_DIM, torch.float32)
        calls[n] = bind(case, {'': attention}, case_inputs(case))['']
    outcomes = time_in_turn(calls, CPU, most_repeats=repeats, least_repeats=repeats)
    for n, outcome in outcomes.items():
        if not isinstance(outcome, Timing):
            raise RuntimeError(f'{ATTENTION} at N = {n} {outcome.reason}')
        record['rows'].append({
            'n': n, 'milliseconds': outcome.milliseconds, 'fastest': outcome.fastest,
            'slowest': outcome.slowest, 'repeats': outcome.repeats,
            'peak_bytes': peak_bytes(calls[n])})
    for key in ('milliseconds', 'peak_bytes'):
        record[f'{key}_exponent'] = exponent({row['n']: row[key] for row in record['rows']})
    return record


def markdown(record: Mapping[str, object]) -> list[str]:
    """The record as one table with the fitted exponents."""
    lines = [place(record['environment']), '']
    if record['refused']:
        return [*lines, f'{record["refused"]}.']
    body = [[str(row['n']), f'{row["milliseconds"]:.3g} ms',
             f'{row["peak_bytes"] / 2**20:.3g} MiB',
             f'{row["milliseconds"] / row["n"] * 1e6:.0f} ns',
             f'{row["peak_bytes"] / row["n"]:.0f} B'] for row in record['rows']]
    body.append(['a in N^a', f'{record["milliseconds_exponent"]:.3f}',
                 f'{record["peak_bytes_exponent"]:.3f}', '', ''])
    return [*lines, *table(['N', 'time', 'peak memory', 'time / N', 'memory / N'], body)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this part."""
    options = parse(build_parser(__doc__.partition('\n')[0]), arguments)
    reason = refusal(refusals(options.tests), ATTENTION)
    record = measure(QUICK_TOKENS if options.quick else TOKENS, reason)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
