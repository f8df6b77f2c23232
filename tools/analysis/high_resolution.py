"""A 4096 x 4096 image through the tiny backbone, with the peak memory of the process.

::

    python tools/analysis/high_resolution.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

import torch
from claim import Claim, Finding, UserError, plt
from matplotlib.figure import Figure
from photograph import add_image_argument, square_photograph
from tqdm import tqdm

# isort: split
# The claim has put the folder of these on the path.
from cpu_memory import peak_bytes
from scaling import exponent

from mmlaplacian.ops import nystrom_attention

SIDES, FAST_SIDES = (512, 1024, 2048, 4096), (64, 128)
# Of stage 1.
STRIDE, HEADS, HEAD_DIM, LANDMARKS = 4, 2, 32, 49
FLOAT_BYTES, GIB = 4, 2**30
# Exponent over the pixels up to which a growth counts as linear.
LINEAR = 1.1


def pass_in_new_process(image: Path, side: int, seed: int) -> dict[str, object]:
    """What ``backbone_pass.py`` prints.

    Raises:
        UserError: The process failed, for example out of memory.
    """
    script = Path(__file__).with_name('backbone_pass.py')
    done = subprocess.run([sys.executable, script, image, '--side', str(side), '--seed',
                           str(seed)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [''])[-1]
        raise UserError(f'the pass at {side} px ended with status {done.returncode}: {last}')
    return json.loads(done.stdout)


def matrix_bytes(side: int) -> int:
    """Of the N x N matrices that softmax attention stores in one layer of stage 1, float32."""
    return HEADS * ceil(side / STRIDE)**4 * FLOAT_BYTES


def attention_bytes(side: int) -> int:
    """Peak of the tensors that the attention of stage 1 makes, measured."""
    n = ceil(side / STRIDE)**2
    q = torch.randn(1, HEADS, n, HEAD_DIM)
    landmarks = q[:, :, torch.linspace(0, n - 1, min(n, LANDMARKS)).long()]
    with torch.inference_mode():
        return peak_bytes(lambda: nystrom_attention(q, q, q, landmarks))


def measure(options: argparse.Namespace) -> Finding:
    """A pass at every size, each in its own process."""
    # Refuses a file that is no image before the first process.
    square_photograph(options.image, 1)
    rows = []
    for side in tqdm(FAST_SIDES if options.fast else SIDES, unit='image'):
        done = pass_in_new_process(options.image, side, options.seed)
        rows.append({
            'side': side, 'tokens_of_stage_1': done['shapes'][0][2] * done['shapes'][0][3],
            'seconds': done['seconds'], 'peak_bytes': done['peak_bytes'],
            'before_bytes': done['before_bytes'],
            'pass_bytes': done['peak_bytes'] - done['before_bytes'],
            'attention_bytes': attention_bytes(side), 'softmax_matrix_bytes': matrix_bytes(side),
            'threads': torch.get_num_threads()})
    return Finding(rows, draw(rows), describe(rows, options.image.name))


def _growth(rows: Sequence[Mapping[str, float]], key: str) -> float:
    """Exponent over the pixels between the two largest images."""
    return exponent({row['side']**2: max(row[key], 1) for row in rows[-2:]})


def describe(rows: Sequence[Mapping[str, float]], source: str) -> str:
    """The result in words.

    Args:
        rows: Of the CSV file, the largest image last.
        source: Name of the photograph.
    """
    last = rows[-1]
    growth = {key: _growth(rows, key) for key in ('pass_bytes', 'attention_bytes')}
    verdict = 'holds' if max(growth.values()) <= LINEAR else 'does not hold here'
    return (
        f'That the memory is bounded by a multiple of the pixels **{verdict}** (an exponent of '
        f'at most {LINEAR} between the two largest images, for the process and for the '
        f'attention). {last["side"]} x {last["side"]} pixels of {source}, '
        f'{last["tokens_of_stage_1"]:,} tokens in stage 1, go through the tiny backbone in '
        f'{last["seconds"]:.1f} s with a peak of {last["peak_bytes"] / GIB:.2f} GiB of resident '
        f'memory (inference, float32, batch 1; {last["before_bytes"] / GIB:.2f} GiB of it were '
        f'there before the pass, which includes the image). The growth of the pass follows the '
        f'pixels to the power {growth["pass_bytes"]:.2f}, that of the tensors of the attention '
        f'of stage 1 the power {growth["attention_bytes"]:.2f}; those are '
        f'{last["attention_bytes"] / 2**20:.0f} MiB at the largest image. The N x N matrices of '
        f'softmax attention would be {last["softmax_matrix_bytes"] / GIB:,.0f} GiB in one layer '
        'of stage 1 (computed: 2 heads, float32); forms of softmax attention that never store '
        'them need no such memory, but N x N work.')


def draw(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Memory and time over the image side."""
    figure, (memory, times) = plt.subplots(1, 2, figsize=(10, 4.3))
    for axes in (memory, times):
        axes.set_xscale('log')
        axes.set_yscale('log')
    sides = [row['side'] for row in rows]
    for key, style, label in (
            ('softmax_matrix_bytes', 'k:', 'N x N matrices of a softmax layer, computed'),
            ('peak_bytes', 'o-', 'process, peak'),
            ('pass_bytes', 's-', 'process, growth by the pass'),
            ('attention_bytes', '^-', 'attention of stage 1, tensors')):
        memory.plot(sides, [row[key] / GIB for row in rows], style, label=label)
    memory.set_ylabel('memory, GiB')
    # Room for the legend.
    memory.set_ylim(top=100 * memory.get_ylim()[1])
    memory.legend(fontsize=8, loc='upper left')
    times.plot(sides, [row['seconds'] for row in rows], 'o-', label='measured')
    last = rows[-1]
    times.plot(sides, [last['seconds'] * (side / last['side'])**2 for side in sides], '--',
               color='0.5', label='proportional to the pixels')
    times.set_ylabel(f'inference, s ({last["threads"]} threads)')
    times.legend(fontsize=8)
    for axes in (memory, times):
        axes.set_xticks(sides, map(str, sides))
        axes.xaxis.minorticks_off()
        axes.set_xlabel('image side, px')
        axes.grid(alpha=0.3)
    figure.suptitle('Tiny backbone, inference of one image, float32')
    return figure


CLAIM = Claim('high_resolution', 'Images of 4096 x 4096 pixels fit into bounded memory.',
              measure, add_image_argument)

if __name__ == '__main__':
    sys.exit(CLAIM.run())
