"""Time and memory over the number of tokens, against other attentions, in SOFT's protocol.

::

    python tools/analysis/complexity.py --out work_dirs/claims

Width 384, 12 heads, 49 landmarks or features, N = 784 p tokens, batch 1, as SOFT
(arXiv 2110.11945) measures; of its 12 layers, which are alike, one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from claim import Claim, Finding, plt
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

# isort: split
# The claim has put the folder of these on the path.
from cpu_memory import peak_bytes
from op_cases import OWN
from scaling import exponent
from sequence_length import GAUSSIAN, HEADS, NYSTROMFORMER, PERFORMER, SIDE, WIDTH, Body, Core
from sequence_length import SOFTMAX as FUSED
from sequence_length import cores as benchmark_cores

STORED = 'softmax, N x N stored'
# Names in the figure, beside those of the benchmark.
LABELS = {OWN: 'Laplacian', GAUSSIAN: 'SOFT-style (Gaussian)', FUSED: 'softmax, fused'}
MULTIPLES, FAST_MULTIPLES = (1, 2, 4, 8), (1, 2)
ATTENTION, BODY = 'attention', 'layer'
# Softmax that stores its matrices is left out where one of them, of all heads, is larger.
MOST_STORED_BYTES = 2**30
TIME, MEMORY = 'processor_milliseconds', 'peak_bytes'
# Exponent up to which a growth counts as linear.
LINEAR = 1.1


def stored_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v by its formula, with its N x N matrices in memory."""
    return (q * q.shape[-1]**-0.5 @ k.mT).softmax(-1) @ v


def cores() -> dict[str, Core]:
    """The attentions by name, the own one first."""
    benchmark = benchmark_cores()
    chosen = {name: benchmark[name] for name in (OWN, GAUSSIAN, NYSTROMFORMER, PERFORMER, FUSED)}
    return {**{LABELS.get(name, name): core for name, core in chosen.items()},
            STORED: stored_softmax}


def _without_gradient(call: Callable[[], object]) -> None:
    with torch.inference_mode():
        call()


def calls_at(n: int, body: Body) -> Iterator[tuple[str, dict[str, Callable[[], None]]]]:
    """What is timed at N = n: the attention alone, and a whole layer around it."""
    q, k, v = torch.randn(3, 1, HEADS, n, WIDTH // HEADS)
    x = torch.randn(1, n, WIDTH)
    for part, arguments in ((ATTENTION, (q, k, v)), (BODY, (x, ))):
        yield part, {
            name: partial(_without_gradient, partial(core, *arguments) if part == ATTENTION
                          else partial(body, *arguments, core))
            for name, core in cores().items()
            if name != STORED or HEADS * n**2 * x.element_size() <= MOST_STORED_BYTES}


def processor_milliseconds(calls: Mapping[str, Callable[[], None]],
                           repeats: int) -> dict[str, float]:
    """Processor time of the fastest call of each, all threads together, one of each in turn.

    Unlike the time that passes, it hardly depends on what else the machine does.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + repeats):
        for name, call in calls.items():
            start = time.process_time()
            call()
            taken[name].append((time.process_time() - start) * 1e3)
    # The first calls warm up.
    return {name: min(values[1:]) for name, values in taken.items()}


def measure(options: argparse.Namespace) -> Finding:
    """Time and peak memory of every attention at every N."""
    body = Body(1).eval()
    lengths = [SIDE**2 * p for p in (FAST_MULTIPLES if options.fast else MULTIPLES)]
    rows = []
    progress = tqdm(total=2 * sum(lengths), unit='token')
    for n in lengths:
        for part, calls in calls_at(n, body):
            times = processor_milliseconds(calls, 3 if options.fast else 7)
            rows += [{'part': part, 'method': name, 'n': n, TIME: times[name],
                      MEMORY: peak_bytes(call)} for name, call in calls.items()]
            progress.update(n)
    progress.close()
    rows = with_exponents(rows)
    return Finding(rows, draw(rows), describe(rows))


def _series(rows: Sequence[Mapping[str, object]], part: str, name: str,
            key: str) -> dict[int, float]:
    """A column over N."""
    return {row['n']: row[key] for row in rows
            if (row['part'], row['method']) == (part, name)}


def with_exponents(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The rows, each with the exponents of time and memory fitted to its curve."""
    return [{**row, **{f'{key}_exponent': exponent(_series(rows, row['part'], row['method'], key))
                       for key in (TIME, MEMORY)}} for row in rows]


def describe(rows: Sequence[Mapping[str, object]]) -> str:
    """The result in words."""
    names = list(dict.fromkeys(row['method'] for row in rows))
    last = {(row['part'], row['method']): row for row in rows}
    n, own = max(row['n'] for row in rows), last[ATTENTION, names[0]]

    def linear(row: Mapping[str, object]) -> bool:
        return max(row[f'{TIME}_exponent'], row[f'{MEMORY}_exponent']) <= LINEAR

    verdict = 'holds' if linear(own) else 'does not hold here'
    grown = '; '.join(
        f'{name} {last[ATTENTION, name][f"{TIME}_exponent"]:.2f} and '
        f'{last[ATTENTION, name][f"{MEMORY}_exponent"]:.2f} '
        f'({last[ATTENTION, name][TIME]:.0f} ms, '
        f'{last[ATTENTION, name][MEMORY] / 2**20:.0f} MiB'
        + (')' if last[ATTENTION, name]['n'] == n else f' at N = {last[ATTENTION, name]["n"]})')
        for name in names)
    faster = {part: [name for name in names[1:]
                     if last[part, name]['n'] == n
                     and last[part, name][TIME] < last[part, names[0]][TIME]]
              for part in (ATTENTION, BODY)}
    whole = '; '.join(f'{name} {last[BODY, name][f"{TIME}_exponent"]:.2f} '
                      f'({last[BODY, name][TIME]:.0f} ms)' for name in names)
    return (
        f'That time and memory of the Laplacian attention grow linearly **{verdict}** (both '
        f'fitted exponents at most {LINEAR}). Exponents of processor time and of peak '
        f'memory, attention alone, inference, with the figures at N = {n}: {grown}. Faster than '
        f'the Laplacian attention at that N: {", ".join(faster[ATTENTION]) or "none"}. In a '
        'whole layer, where linear layers and MLP add work linear in N, the exponents of time '
        f'are: {whole}; faster there: {", ".join(faster[BODY]) or "none"}. Softmax without its '
        'matrices in memory (fused) is a matter of the implementation; its work stays quadratic. '
        'SOFT-style is the same operator, solver and map with the Gaussian kernel, Performer '
        'FAVOR+ with positive orthogonal features.')


def draw(rows: Sequence[Mapping[str, object]]) -> Figure:
    """Time and memory over N, of the attention alone and of a whole layer."""
    figure, panels = plt.subplots(2, 2, figsize=(10, 8))
    names = list(dict.fromkeys(row['method'] for row in rows))
    lengths = sorted({row['n'] for row in rows})
    for part, line in zip((ATTENTION, BODY), panels, strict=True):
        for axes, (key, unit, label) in zip(line, ((TIME, 1, 'processor time, ms'),
                                                   (MEMORY, 2**20, 'peak memory, MiB')),
                                            strict=True):
            for name, marker in zip(names, 'osD^vx', strict=True):
                values = _series(rows, part, name, key)
                power = exponent(values)
                axes.plot(list(values), [x / unit for x in values.values()], marker=marker,
                          label=f'{name}: {power:.2f}')
            axes.set_xscale('log')
            axes.set_yscale('log')
            axes.set_xticks(lengths, map(str, lengths))
            axes.xaxis.minorticks_off()
            axes.set_xlabel('tokens N')
            axes.set_ylabel(label)
            axes.set_title({ATTENTION: 'attention alone', BODY: 'whole layer with MLP'}[part],
                           fontsize=10)
            axes.grid(alpha=0.3)
            axes.legend(title='exponent a of N^a', fontsize=7, title_fontsize=7)
    figure.suptitle(f'Inference, width {WIDTH}, {HEADS} heads, batch 1')
    return figure


CLAIM = Claim('complexity', 'Time and memory of the attention grow linearly with the tokens.',
              measure)

if __name__ == '__main__':
    sys.exit(CLAIM.run())
