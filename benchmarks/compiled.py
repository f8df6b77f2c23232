"""Times the tiny backbone eager and under ``torch.compile`` with Inductor, at fixed sizes.

::

    python benchmarks/compiled.py --out compiled.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch
from backbone_models import BUILDERS, inference, training_step
from backbones import INFERENCE, TRAINING
from op_cases import OWN
from parts import CPU, LEAST_REPEATS, ROOT, build_parser, parse, refusal, refusals, write
from report import cell, environment, place, table
from timing import Timing, time_in_turn

EAGER, COMPILED = 'eager', 'compiled'
CASES = ((INFERENCE, (1, 3, 224, 224)), (INFERENCE, (1, 3, 800, 1344)),
         (TRAINING, (2, 3, 320, 416)))
QUICK = ((INFERENCE, (1, 3, 32, 32)), (TRAINING, (1, 3, 32, 32)))
_SECONDS_EACH, _MOST_REPEATS = 1.0, 15


def time_case(kind: str, shape: Sequence[int], seconds_each: float) -> dict[str, object]:
    """One row: both times; the warm-up calls compile."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = BUILDERS[OWN]().train(kind == TRAINING)
    images = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    step = training_step if kind == TRAINING else inference
    models = {EAGER: model, COMPILED: torch.compile(model)}
    outcomes = time_in_turn({name: partial(step, model, images) for name, model in models.items()},
                            CPU, seconds_each, _MOST_REPEATS, LEAST_REPEATS)
    eager, compiled = outcomes[EAGER], outcomes[COMPILED]
    timed = isinstance(eager, Timing) and isinstance(compiled, Timing)
    return {'kind': kind, 'shape': list(shape),
            'ratio': compiled.milliseconds / eager.milliseconds if timed else None,
            'outcomes': {name: asdict(outcome) for name, outcome in outcomes.items()}}


def measure(chosen: Sequence[tuple[str, tuple[int, ...]]], reason: str | None,
            seconds_each: float = _SECONDS_EACH,
            say: Callable[[str], None] = print) -> dict[str, object]:
    """Times every case, ready for JSON.

    Args:
        chosen: Kinds and shapes.
        reason: Why nothing is timed, None if it is.
        seconds_each: Time to spend on one model.
        say: Takes a line of progress for each case.
    """
    rows = []
    for kind, shape in () if reason else chosen:
        rows.append(time_case(kind, shape, seconds_each))
        say(f'{kind}, {"x".join(map(str, shape))}')
    return {'environment': environment(CPU, ROOT), 'refused': reason, 'rows': rows}


def markdown(record: Mapping[str, object]) -> list[str]:
    """The record as one table."""
    lines = [place(record['environment']), '']
    if record['refused']:
        return [*lines, f'{record["refused"]}.']
    body = [[row['kind'], 'x'.join(map(str, row['shape'])), cell(row['outcomes'][EAGER], None),
             cell(row['outcomes'][COMPILED], row['ratio'])] for row in record['rows']]
    return [*lines, *table(['', 'images', EAGER, COMPILED], body)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this part."""
    options = parse(build_parser(__doc__.partition('\n')[0]), arguments)
    reason = refusal(refusals(options.tests), 'nystrom_attention')
    record = measure(QUICK if options.quick else CASES, reason,
                     0.01 if options.quick else _SECONDS_EACH)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
