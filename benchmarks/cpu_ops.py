"""Times the ops against their peers on a CPU.

::

    python benchmarks/cpu_ops.py --out cpu_ops.json

Peers of packages that are not installed are left out; the table says so.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence

import cpu_cases
from op_cases import Case, bind, compile_settings
from parts import CPU, LEAST_REPEATS, ROOT, build_parser, parse, refusal, refusals, write
from report import environment, op_table, place, refused, row
from timing import NotTimed, Outcome, time_in_turn

_SECONDS_EACH, _MOST_REPEATS = 1.0, 15


def time_case(case: Case, seconds_each: float) -> dict[str, object]:
    """One row: every contestant's time, and its error at a smaller size."""
    contestants = cpu_cases.contestants(case)
    left_out: dict[str, Outcome] = {name: NotTimed(why) for name in contestants
                                    if (why := cpu_cases.missing(name))}
    present = {name: function for name, function in contestants.items() if name not in left_out}
    timed = time_in_turn(bind(case, present, cpu_cases.case_inputs(case)), CPU, seconds_each,
                         _MOST_REPEATS, LEAST_REPEATS)
    failed = {name for name, outcome in timed.items() if isinstance(outcome, NotTimed)}
    errors = cpu_cases.errors(case, {name: function for name, function in present.items()
                                     if name not in failed})
    return row(case, {name: left_out.get(name) or timed[name] for name in contestants}, None,
               errors)


def measure(cases: Iterable[Case], red: dict[str, list[str]], seconds_each: float = _SECONDS_EACH,
            say: Callable[[str], None] = print) -> dict[str, object]:
    """Times every case, ready for JSON."""
    rows = []
    for case in cases:
        reason = refusal(red, cpu_cases.built_on(case.op))
        rows.append(refused(case, reason) if reason else time_case(case, seconds_each))
        say(f'{case}')
    return {'environment': environment(CPU, ROOT), 'red_tests': red, 'rows': rows}


def markdown(record: dict[str, object]) -> list[str]:
    """The record as tables, one for each op."""
    lines = [place(record['environment'])]
    for op in dict.fromkeys(timed['op'] for timed in record['rows']):
        lines += ['', f'### {op}', '',
                  *op_table([timed for timed in record['rows'] if timed['op'] == op])]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this part."""
    options = parse(build_parser(__doc__.partition('\n')[0]), arguments)
    red = refusals(options.tests)
    with tempfile.TemporaryDirectory() as folder, compile_settings():
        # What torch.compile keeps holds the number of threads of the run that compiled it.
        os.environ['TORCHINDUCTOR_CACHE_DIR'] = folder
        record = measure(cpu_cases.cases(options.quick), red,
                         0.01 if options.quick else _SECONDS_EACH)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
