"""Times attention cores in one transformer body over the sequence length, on a CPU.

::

    python benchmarks/sequence_length.py --out sequence_length.json

The sizes are those of SOFT (arXiv 2110.11945): 12 layers, width 384, 12 heads, 49 landmarks,
N = 784 p tokens, batch 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import isqrt

import torch
import torch.nn.functional as F
from attention_peers import nystromformer, orthogonal_features, performer
from cpu_memory import peak_bytes
from op_cases import KERNEL_SCALE, LANDMARKS, OWN, RIDGE
from parts import CPU, LEAST_REPEATS, ROOT, build_parser, parse, refusal, refusals, write
from report import environment, place, table
from timing import Timing, time_in_turn
from torch import Tensor, nn

from mmlaplacian.ops import nystrom_attention

SOFTMAX, GAUSSIAN, RETURN_V = 'softmax', 'Gaussian kernel', 'return V'
PERFORMER, NYSTROMFORMER = 'Performer', 'Nystromformer'
LAYERS, WIDTH, HEADS, MLP_RATIO = 12, 384, 12, 4
# A map of 28 p x 28 tokens, and the grid of its landmarks.
SIDE, GRID = 28, isqrt(LANDMARKS)
MULTIPLES, QUICK_MULTIPLES = (1, 2, 4, 8), (1, )

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def _pooled_keys(k: Tensor) -> Tensor:
    """Landmarks as in the model: a 7 x 7 grid over the key map."""
    groups = k.flatten(0, 1).mT.unflatten(-1, (-1, SIDE))
    return F.adaptive_avg_pool2d(groups, GRID).flatten(2).mT.unflatten(0, k.shape[:2])


def _kernel_attention(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nystrom_attention(q, k, v, _pooled_keys(k), KERNEL_SCALE, RIDGE, kernel=kernel)


def cores() -> dict[str, Core]:
    """The attention cores by name, the own one first."""
    directions = orthogonal_features(LANDMARKS, WIDTH // HEADS, torch.Generator().manual_seed(0))
    return {OWN: partial(_kernel_attention, 'laplacian'),
            GAUSSIAN: partial(_kernel_attention, 'gaussian'),
            NYSTROMFORMER: partial(nystromformer, landmarks=LANDMARKS),
            PERFORMER: partial(performer, directions=directions),
            SOFTMAX: F.scaled_dot_product_attention,
            RETURN_V: lambda q, k, v: v}


class Body(nn.Module):
    """Pre-norm transformer layers around an attention core that is given at the call."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({
            'norm1': nn.LayerNorm(WIDTH), 'qkv': nn.Linear(WIDTH, 3 * WIDTH),
            'proj': nn.Linear(WIDTH, WIDTH), 'norm2': nn.LayerNorm(WIDTH),
            'mlp': nn.Sequential(nn.Linear(WIDTH, MLP_RATIO * WIDTH), nn.GELU(),
                                 nn.Linear(MLP_RATIO * WIDTH, WIDTH))}) for _ in range(layers))

    def forward(self, x: Tensor, core: Core) -> Tensor:
        """``(B, N, C) -> (B, N, C)``."""
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                       for t in layer['qkv'](layer['norm1'](x)).chunk(3, -1))
            x = x + layer['proj'](core(q, k, v).transpose(1, 2).flatten(2))
            x = x + layer['mlp'](layer['norm2'](x))
        return x


@torch.no_grad()
def _infer(body: Body, x: Tensor, core: Core) -> None:
    body(x, core)


def measure(multiples: Sequence[int], layers: int, red: Mapping[str, list[str]],
            say: Callable[[str], None] = print) -> dict[str, object]:
    """Inference at every N with every core, ready for JSON.

    Args:
        multiples: p of N = 784 p.
        layers: Layers of the body.
        red: Red tests by op; the op's own cores are left out if there are any.
        say: Takes a line of progress for each N.
    """
    reason = refusal(dict(red), 'nystrom_attention')
    torch.manual_seed(0)
    body, rows = Body(layers).eval(), []
    chosen = {name: core for name, core in cores().items()
              if reason is None or name not in (OWN, GAUSSIAN)}
    for multiple in multiples:
        x = torch.randn(1, SIDE**2 * multiple, WIDTH)
        calls = {name: partial(_infer, body, x, core) for name, core in chosen.items()}
        outcomes = time_in_turn(calls, CPU, seconds_each=0, least_repeats=LEAST_REPEATS)
        rows.append({'p': multiple, 'n': x.shape[1],
                     'outcomes': {name: asdict(outcome) for name, outcome in outcomes.items()},
                     'peak_bytes': {name: peak_bytes(calls[name])
                                    for name, outcome in outcomes.items()
                                    if isinstance(outcome, Timing)}})
        say(f'N = {x.shape[1]}')
    return {'environment': environment(CPU, ROOT), 'refused': reason, 'layers': layers,
            'width': WIDTH, 'heads': HEADS, 'm': LANDMARKS, 'rows': rows}


def markdown(record: Mapping[str, object]) -> list[str]:
    """The record as one table: time and peak memory of a pass."""
    lines = [place(record['environment']), '']
    if record['refused']:
        lines += [f'{OWN} and {GAUSSIAN}: {record["refused"]}.', '']
    names = list(record['rows'][0]['outcomes'])
    body = []
    for row in record['rows']:
        cells = [str(row['p']), str(row['n'])]
        for name in names:
            outcome = row['outcomes'][name]
            cells.append(outcome['reason'] if 'reason' in outcome else
                         f'{outcome["milliseconds"]:.0f} ms, '
                         f'{row["peak_bytes"][name] / 2**20:.0f} MiB')
        body.append(cells)
    return [*lines, *table(['p', 'N', *names], body)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs this part."""
    options = parse(build_parser(__doc__.partition('\n')[0]), arguments)
    red = refusals(options.tests)
    record = measure(QUICK_MULTIPLES if options.quick else MULTIPLES,
                     1 if options.quick else LAYERS, red)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
