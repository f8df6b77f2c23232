"""Times the tiny backbone against its peers on a GPU: ``benchmarks/gpu_check.sh`` runs this.

It needs torch and CuPy, the package on the module path, and mmengine and mmcv for the backbone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import torch
from backbone_models import BUILDERS, available, inference, missing, training_step
from gpu_part import build_parser, device_and_refusals, write
from op_cases import OWN
from parts import ROOT, refusal
from report import cell, environment, gpu_place, table
from timing import NotTimed, Outcome, Timing, time_in_turn
from torch import nn

from mmlaplacian.ops import use_backend

INFERENCE, TRAINING = 'inference', 'training step'
GRAPH = f'{OWN}, CUDA graph'
NAMES = (OWN, GRAPH, *(name for name in BUILDERS if name != OWN))
SIZES = {INFERENCE: ((1, 224, 224), (32, 224, 224), (1, 800, 1344)),
         TRAINING: ((32, 224, 224), (2, 800, 1344))}
QUICK = {INFERENCE: ((1, 224, 224), ), TRAINING: ((8, 224, 224), )}
_SECONDS_EACH = 0.3


@dataclass(frozen=True)
class Case:
    """One pass over one batch.

    Args:
        kind: ``'inference'`` or ``'training step'``.
        batch: Images.
        height: Of an image.
        width: Of an image.
        amp: bfloat16 by autocast instead of float32.
    """

    kind: str
    batch: int
    height: int
    width: int
    amp: bool

    def __str__(self) -> str:
        return (f'{self.kind}, {self.batch}x3x{self.height}x{self.width}, '
                f'{"bfloat16 autocast" if self.amp else "float32"}')


def cases(quick: bool) -> Iterator[Case]:
    """All cases, or one size of each pass."""
    for (kind, sizes), amp in product((QUICK if quick else SIZES).items(), (False, True)):
        for size in sizes:
            yield Case(kind, *size, amp)


class Graphed:
    """A call that is captured as a CUDA graph when it is first made, and then replayed.

    What the call returns is dropped; its memory stays with the graph.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is None:
            self.graph = self._captured()
        self.graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        # Kernels are compiled and workspaces made beforehand, on another stream, as a capture
        # asks for.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.call()
        return graph


def _call(case: Case, model: nn.Module, images: torch.Tensor) -> None:
    # A capture must not meet casts that an earlier call has cached.
    with torch.autocast(images.device.type, torch.bfloat16, enabled=case.amp,
                        cache_enabled=False):
        (training_step if case.kind == TRAINING else inference)(model, images)


def time_case(case: Case, models: Mapping[str, nn.Module],
              device: torch.device) -> dict[str, Outcome]:
    """Every model at one size, and the own one as a CUDA graph.

    A graph's memory is its own and no call's, so its peak is not known.
    """
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(case.batch, 3, case.height, case.width, generator=generator,
                         device=device)
    calls = {}
    for name, model in models.items():
        model.train(case.kind == TRAINING).zero_grad(set_to_none=True)
        calls[name] = partial(_call, case, model, images)
        if name == OWN:
            calls[GRAPH] = Graphed(calls[name])
    timed = time_in_turn(calls, device, _SECONDS_EACH)
    if isinstance(timed.get(GRAPH), Timing):
        timed[GRAPH] = replace(timed[GRAPH], peak_bytes=None)
    return {name: timed.get(name) or NotTimed(missing(OWN if name == GRAPH else name)
                                              or 'left out') for name in NAMES}


def row(case: Case, outcomes: Mapping[str, Outcome]) -> dict[str, object]:
    """A case as it goes into the JSON file; ``speedup`` is a peer's median over the own one's."""
    own = outcomes.get(OWN)
    timed = {name: x for name, x in outcomes.items() if isinstance(x, Timing)}
    return {**asdict(case), 'outcomes': {name: asdict(x) for name, x in outcomes.items()},
            'images_per_s': {name: case.batch / x.milliseconds * 1e3 for name, x in timed.items()},
            'speedup': {name: x.milliseconds / own.milliseconds for name, x in timed.items()
                        if name != OWN and isinstance(own, Timing)}}


def measure(chosen: Sequence[Case], reason: str | None, device: torch.device, seconds: float,
            say: Callable[[str], None] = print) -> dict[str, object]:
    """Times every case, ready for JSON.

    Args:
        chosen: The cases.
        reason: Why the own model is not timed, None if it is.
        device: Where to run.
        seconds: No case starts after that time.
        say: Takes a line of progress for each case.
    """
    deadline = time.monotonic() + seconds
    models = {name: model.to(device) for name, model in available().items()
              if name != OWN or reason is None}
    rows = []
    for case in chosen:
        if time.monotonic() > deadline:
            outcomes: dict[str, Outcome] = {OWN: NotTimed(f'not run: after {seconds:g} s')}
        else:
            outcomes = time_case(case, models, device)
        if reason is not None:
            outcomes = {**outcomes, OWN: NotTimed(reason), GRAPH: NotTimed(reason)}
        rows.append(row(case, outcomes))
        say(f'{case}')
    return {'environment': environment(device, ROOT), 'rows': rows}


def markdown(record: Mapping[str, object]) -> str:
    """The record as one table: images/s, the time of a call and its peak memory."""
    body = []
    for timed in record['rows']:
        cells = [timed['kind'], f'{timed["batch"]}x3x{timed["height"]}x{timed["width"]}',
                 'bfloat16 autocast' if timed['amp'] else 'float32']
        for name in NAMES:
            rate = timed['images_per_s'].get(name)
            text = cell(timed['outcomes'].get(name), timed['speedup'].get(name))
            cells.append(text if rate is None else f'{rate:.4g} images/s, {text}')
        body.append(cells)
    lines = [gpu_place(record['environment']), '',
             *table(['', 'images', 'precision', *NAMES], body)]
    return '\n'.join(lines) + '\n'


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 2 where it cannot run."""
    options = build_parser('Time the tiny backbone against its peers on a GPU; write JSON and a '
                           'table.', seconds=60).parse_args(arguments)
    device, refusals = device_and_refusals('gpu_backbones.py', options.tests)
    with use_backend('cupy'):
        record = measure(list(cases(options.quick)), refusal(refusals, 'nystrom_attention'),
                         device, options.seconds)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
