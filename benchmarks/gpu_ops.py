"""Times the ops against their peers on a GPU: ``benchmarks/gpu_check.sh`` runs this.

It needs torch and CuPy, and the package on the module path.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from gpu_part import build_parser, device_and_refusals, write
from op_cases import OWN, Case, cases, compile_settings, functions, growth
from parts import ROOT
from report import environment, markdown, refused, row
from timing import NotTimed, Outcome, Timing, time_in_turn

from mmlaplacian.ops import use_backend

LONGEST_CALL_MS = 1000


class _Pace:
    """Predicts from smaller sizes, so that no single call takes minutes."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], tuple[int, float]] = {}

    def _key(self, case: Case, name: str) -> tuple[object, ...]:
        return case.op, case.mode, case.groups, case.d, case.dtype, name

    def too_long(self, case: Case, name: str) -> NotTimed | None:
        """Why a contestant is left out, None if it is not."""
        n, milliseconds = self._seen.get(self._key(case, name), (case.n, 0.0))
        predicted = milliseconds * (case.n / n)**growth(name) if n else 0.0
        if predicted <= LONGEST_CALL_MS:
            return None
        return NotTimed(f'not run: over {LONGEST_CALL_MS / 1e3:g} s expected')

    def note(self, case: Case, outcomes: Mapping[str, Outcome]) -> None:
        """Remembers what was timed."""
        for name, outcome in outcomes.items():
            if isinstance(outcome, Timing):
                self._seen[self._key(case, name)] = case.n, outcome.milliseconds


def time_case(case: Case, device: torch.device, pace: _Pace) -> dict[str, Outcome]:
    """Times the op and its peers at one size."""
    try:
        contestants = functions(case, device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {OWN: NotTimed('out of memory for the inputs')}
    left_out = {name: why for name in contestants if (why := pace.too_long(case, name))}
    timed = time_in_turn({name: function for name, function in contestants.items()
                          if name not in left_out}, device)
    pace.note(case, timed)
    return {name: left_out.get(name) or timed[name] for name in contestants}


def measure(chosen: Iterable[Case], refusals: Mapping[str, Sequence[str]], device: torch.device,
            seconds: float, say: Callable[[str], None] = print) -> dict[str, object]:
    """Times every case and gathers the record.

    Args:
        chosen: The cases, small sizes before large ones.
        refusals: Red tests by op; such an op is not timed.
        device: Where to run.
        seconds: No case starts after that time.
        say: Takes a line of progress for each case.

    Returns:
        ``environment``, ``red_tests`` and ``rows``, ready for JSON.
    """
    where = environment(device, ROOT)
    floor = where['add_floor_elements_per_s']
    deadline = time.monotonic() + seconds
    pace, rows = _Pace(), []
    for case in chosen:
        if case.op in refusals:
            rows.append(refused(case, f'refused: {len(refusals[case.op])} red tests'))
        elif time.monotonic() > deadline:
            rows.append(refused(case, f'not run: after {seconds:g} s'))
        else:
            rows.append(row(case, time_case(case, device, pace), floor))
        say(f'{case}: {summary(rows[-1])}')
    red = sorted({test for tests in refusals.values() for test in tests})
    return {'environment': where, 'red_tests': red, 'rows': rows}


def summary(timed: Mapping[str, object]) -> str:
    """The outcomes of a row in one line."""
    return '; '.join(f'{name} {outcome["reason"]}' if 'reason' in outcome else
                     f'{name} {outcome["milliseconds"]:.3g} ms'
                     for name, outcome in timed['outcomes'].items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 2 where it cannot run."""
    options = build_parser('Time the ops against their peers on a GPU; write JSON and a table.',
                           seconds=120).parse_args(arguments)
    device, refusals = device_and_refusals('gpu_ops.py', options.tests)
    with use_backend('cupy'), compile_settings():
        record = measure(cases(options.quick), refusals, device, options.seconds)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
