"""Peak memory of one training step of whole backbones on a CPU, each in its own process.

::

    python benchmarks/memory.py --out memory.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from backbone_models import BUILDERS, PVT, missing, training_step
from op_cases import OWN
from parts import CPU, ROOT, build_parser, parse, refusal, refusals, write
from report import environment, place, table
from resident_memory import resident_peak
from stored_attention import stored_attention

STORED = 'mmlaplacian, N x M matrices stored'
MODELS = (OWN, STORED, PVT)
SHAPE, QUICK_SHAPE, FIRST_SHAPE = (2, 3, 800, 1344), (1, 3, 64, 64), (1, 3, 64, 64)


def step(name: str, shape: Sequence[int]) -> dict[str, float]:
    """Runs one training step in this process.

    Returns:
        ``before_bytes`` and ``peak_bytes`` of the process: with the model built and a small step
        done, and after the step; ``seconds`` of the step.
    """
    torch.manual_seed(0)
    model = BUILDERS[OWN if name == STORED else name]().train()
    from mmlaplacian.models import attention

    # Read at every call, so a patch reaches a model that is built.
    function = stored_attention if name == STORED else attention.nystrom_attention
    with patch.object(attention, 'nystrom_attention', function):
        training_step(model, torch.randn(*FIRST_SHAPE))
        before = resident_peak()
        images = torch.randn(*shape)
        start = time.perf_counter()
        training_step(model, images)
    return {'before_bytes': before, 'peak_bytes': resident_peak(),
            'seconds': time.perf_counter() - start}


def in_new_process(name: str, shape: Sequence[int], threads: int) -> dict[str, float]:
    """:func:`step` in its own process, whose peak is of nothing else.

    The operating system's figure, and not that of torch's allocator as in ``scaling.py``: it is
    what a machine must have, with the workspaces of libraries, and steps of gigabytes make its
    noise small.

    Raises:
        subprocess.CalledProcessError: The step failed, for example out of memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'step.json'
        subprocess.run([sys.executable, __file__, '--step', name, '--out', str(out), '--threads',
                        str(threads), '--shape', *map(str, shape)], check=True)
        return json.loads(out.read_text(encoding='utf-8'))


def measure(shape: Sequence[int], reason: str | None) -> dict[str, object]:
    """Every model's step, ready for JSON.

    Args:
        shape: Of the images.
        reason: Why nothing is measured, None if it is.
    """
    rows = {}
    for name in () if reason else MODELS:
        if why := missing(name):
            rows[name] = {'reason': why}
            continue
        try:
            rows[name] = in_new_process(name, shape, torch.get_num_threads())
        except subprocess.CalledProcessError as error:
            rows[name] = {'reason': f'fails with status {error.returncode}'}
    return {'environment': environment(CPU, ROOT), 'refused': reason, 'shape': list(shape),
            'rows': rows}


def markdown(record: Mapping[str, object]) -> list[str]:
    """The record as one table."""
    lines = [place(record['environment']), '']
    if record['refused']:
        return [*lines, f'{record["refused"]}.']
    rows = record['rows']
    own = rows[OWN].get('peak_bytes')
    body = []
    for name, measured in rows.items():
        if 'reason' in measured:
            body.append([name, measured['reason'], '', '', ''])
            continue
        peak = measured['peak_bytes']
        body.append([name, f'{peak / 2**30:.2f} GiB',
                     f'{(peak - measured["before_bytes"]) / 2**30:.2f} GiB',
                     f'{own / peak:.2f}' if own else '', f'{measured["seconds"]:.1f} s'])
    shape = 'x'.join(map(str, record['shape']))
    return [*lines, *table([f'training step, {shape}', 'peak resident memory', 'of the step',
                            'mmlaplacian takes', 'time, once'], body)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this part."""
    parser = build_parser(__doc__.partition('\n')[0])
    parser.add_argument('--step', choices=MODELS, metavar='MODEL',
                        help='only run one step in this process, for the part itself: '
                             f'{"; ".join(MODELS)}')
    parser.add_argument('--shape', type=int, nargs=4, default=SHAPE, metavar='SIZE',
                        help='images B C H W (default: 2 3 800 1344)')
    options = parse(parser, arguments)
    if options.step:
        options.out.write_text(json.dumps(step(options.step, options.shape)), encoding='utf-8')
        return 0
    reason = refusal(refusals(options.tests), 'nystrom_attention')
    record = measure(QUICK_SHAPE if options.quick else options.shape, reason)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
