"""Times the tiny backbone against its peers on a CPU.

::

    python benchmarks/backbones.py --out backbones.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch
from backbone_models import BUILDERS, available, gmacs, inference, missing, training_step
from op_cases import OWN
from parts import CPU, LEAST_REPEATS, ROOT, build_parser, parse, refusal, refusals, write
from report import cell, environment, place, table
from timing import NotTimed, Outcome, Timing, time_in_turn
from torch import nn

INFERENCE, TRAINING, SWEEP = 'inference', 'training step', 'resolution'
CASES = ((INFERENCE, (1, 3, 224, 224)), (INFERENCE, (1, 3, 800, 1344)),
         (TRAINING, (8, 3, 224, 224)), (TRAINING, (2, 3, 320, 416)))
SWEEP_SIZES = ((224, 224), (384, 384), (512, 512), (768, 768), (1024, 1024), (800, 1280))
QUICK = ((INFERENCE, (1, 3, 32, 32)), (TRAINING, (1, 3, 32, 32)), (SWEEP, (1, 3, 32, 32)))
_SECONDS_EACH, _MOST_REPEATS = 1.0, 15


def cases(quick: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Kind and shape of the images of every case."""
    if quick:
        return QUICK
    return *CASES, *((SWEEP, (1, 3, *size)) for size in SWEEP_SIZES)


def time_case(kind: str, shape: Sequence[int], models: Mapping[str, nn.Module],
              seconds_each: float) -> dict[str, object]:
    """One row: every model's time."""
    images = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    step = training_step if kind == TRAINING else inference
    timed = time_in_turn(
        {name: partial(step, model.train(kind == TRAINING), images)
         for name, model in models.items()}, CPU, seconds_each, _MOST_REPEATS, LEAST_REPEATS)
    outcomes: dict[str, Outcome] = {
        name: timed[name] if name in timed else NotTimed(missing(name) or 'left out')
        for name in BUILDERS}
    own = outcomes[OWN]
    speedup = {name: outcome.milliseconds / own.milliseconds for name, outcome in outcomes.items()
               if name != OWN and isinstance(outcome, Timing) and isinstance(own, Timing)}
    return {'kind': kind, 'shape': list(shape), 'speedup': speedup,
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
    if reason is None:
        models = available()
        for kind, shape in chosen:
            rows.append(time_case(kind, shape, models, seconds_each))
            say(f'{kind}, {"x".join(map(str, shape))}')
        sizes = sorted({shape[2:] for _, shape in chosen})
        counted = {name: {f'{height}x{width}': gmacs(model, height, width)
                          for height, width in sizes} for name, model in models.items()}
        for timed in rows:
            size = '{}x{}'.format(*timed['shape'][2:])
            timed['gmacs'] = {name: counts[size] for name, counts in counted.items()}
    return {'environment': environment(CPU, ROOT), 'refused': reason, 'rows': rows}


def markdown(record: Mapping[str, object]) -> list[str]:
    """The record as one table: median, times the own model's, GMACs of an image."""
    lines = [place(record['environment']), '']
    if record['refused']:
        return [*lines, f'{record["refused"]}.']
    body = []
    for timed in record['rows']:
        cells = [timed['kind'], 'x'.join(map(str, timed['shape']))]
        for name, outcome in timed['outcomes'].items():
            text = cell(outcome, timed['speedup'].get(name))
            count = timed['gmacs'].get(name)
            cells.append(text if count is None else f'{text}, {count:.3g} GMACs')
        body.append(cells)
    return [*lines, *table(['', 'images', *BUILDERS], body)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this part."""
    options = parse(build_parser(__doc__.partition('\n')[0]), arguments)
    reason = refusal(refusals(options.tests), 'nystrom_attention')
    record = measure(cases(options.quick), reason, 0.01 if options.quick else _SECONDS_EACH)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
