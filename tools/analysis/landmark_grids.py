"""Landmarks by the paper's pooling ratios against a fixed grid, over the image size.

::

    python tools/analysis/landmark_grids.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from activations import AttentionInputs, attention_inputs
from claim import Claim, Finding, UserError, plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from photograph import add_image_argument, normalized, square_photograph
from torch import Tensor, nn
from tqdm import tqdm

# isort: split
# The claim has put this folder on the path.
from backbone_models import gmacs, inference
from cpu_memory import peak_bytes
from scaling import exponent
from timing import time_call

from mmlaplacian import LaplacianFormer
from mmlaplacian.models.landmarks import LandmarkPool
from mmlaplacian.ops import laplacian_kernel

CPU = torch.device('cpu')
GRID, RATIO = 'grid of 7 x 7', 'ratios 8, 4, 2, 1'
RULES: dict[str, dict[str, object]] = {GRID: {}, RATIO: {'pool_ratio': (8, 4, 2, 1)}}
SIDES, FAST_SIDES = (224, 320, 448, 640, 1024), (64, 96)
KERNEL_SCALE, RIDGE = 4.0, 1e-2
# N x N is 16 GiB a head at 1024 px: the error is that of these rows of it.
SAMPLED_QUERIES = 256
# Timed calls of a fast inference, and what they may take together; a slower one is timed while
# its memory is watched.
_REPEATS, _LONGEST_MS = 5, 4e3
# Exponent over the pixels up to which a growth counts as linear.
LINEAR = 1.15


def backbone(rule: str, seed: int, checkpoint: Path | None) -> LaplacianFormer:
    """The tiny backbone; the weights are the same whatever the rule.

    Args:
        rule: Name in :data:`RULES`.
        seed: Of new weights.
        checkpoint: File of weights, None for new ones.
    """
    torch.manual_seed(seed)
    load = None if checkpoint is None else dict(type='Pretrained', checkpoint=str(checkpoint))
    model = LaplacianFormer('tiny', init_cfg=load, **RULES[rule]).eval()
    try:
        model.init_weights()
    except (OSError, ValueError) as error:
        raise UserError(f'--checkpoint must hold weights of the tiny backbone: {error}') from error
    return model


def cost(model: nn.Module, image: Tensor) -> dict[str, float]:
    """``milliseconds`` (median) and ``peak_bytes`` of an inference, peak of the tensors alone."""
    call = _Inference(model, image)
    peak = peak_bytes(call)
    repeats = min(_REPEATS, int(_LONGEST_MS / call.milliseconds))
    taken = [time_call(call, CPU) for _ in range(repeats)] or [call.milliseconds]
    return {'milliseconds': median(taken), 'peak_bytes': peak}


class _Inference:
    """A call that remembers how long it took."""

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        self.model, self.image, self.milliseconds = model, image, 0.0

    def __call__(self) -> None:
        self.milliseconds = time_call(lambda: inference(self.model, self.image), CPU)


def landmarks_of(inputs: AttentionInputs, rule: str, stage: int) -> Tensor:
    """The keys of a layer pooled by a rule, ``(B, h, M, d)``."""
    ratios = RULES[rule].get('pool_ratio')
    pool = LandmarkPool() if ratios is None else LandmarkPool(pool_ratio=ratios[stage])
    maps = inputs.k.flatten(0, 1).unflatten(1, inputs.grid)
    return pool(maps).unflatten(0, inputs.k.shape[:2])


def relative_error(q: Tensor, k: Tensor, landmarks: Tensor) -> float:
    """||G - K|| / ||K|| in the Frobenius norm, K = k(q, k) and G = C_q W^-1 C_k^T, in float64.

    Args:
        q: Queries ``(B, h, n, d)``: n rows of G and K.
        k: Keys ``(B, h, N, d)``.
        landmarks: ``(B, h, M, d)``.
    """
    q, k, landmarks = (x.double() for x in (q, k, landmarks))
    c_q, c_k, w = (laplacian_kernel(x, landmarks, KERNEL_SCALE) for x in (q, k, landmarks))
    w.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
    exact = laplacian_kernel(q, k, KERNEL_SCALE)
    return ((torch.linalg.solve(w, c_q.mT).mT @ c_k.mT - exact).norm() / exact.norm()).item()


def stage_errors(layers: Sequence[AttentionInputs], rule: str,
                 queries: int = SAMPLED_QUERIES) -> list[dict[str, float]]:
    """Tokens, landmarks and error of each stage, the mean over its layers.

    Args:
        layers: Of the whole backbone.
        rule: Name in :data:`RULES`.
        queries: Rows of G drawn from each layer, from torch's generator.
    """
    stages: dict[int, list[dict[str, float]]] = {}
    for inputs in layers:
        stage = int(inputs.layer.split('.')[1])
        landmarks = landmarks_of(inputs, rule, stage)
        n = inputs.q.shape[2]
        rows = inputs.q[:, :, torch.randperm(n)[:queries]]
        stages.setdefault(stage, []).append({
            'stage': stage + 1, 'tokens': n, 'landmarks': landmarks.shape[2],
            'relative_error': relative_error(rows, inputs.k, landmarks)})
    return [{**found[0], 'relative_error': sum(x['relative_error'] for x in found) / len(found)}
            for found in stages.values()]


def measure(options: argparse.Namespace) -> Finding:
    """Cost and error of both rules at every size."""
    sides = FAST_SIDES if options.fast else SIDES
    models = {rule: backbone(rule, options.seed, options.checkpoint) for rule in RULES}
    for model in models.values():
        inference(model, torch.zeros(1, 3, 64, 64))
    rows = []
    progress = tqdm(total=2 * sum(side**2 for side in sides), unit='pixel', unit_scale=True)
    for side in sides:
        image = normalized(square_photograph(options.image, side))
        layers = attention_inputs(models[GRID], image)
        for rule, model in models.items():
            with torch.device('meta'):
                counted = LaplacianFormer('tiny', **RULES[rule])
            whole = {**cost(model, image), 'gmacs': gmacs(counted, side, side)}
            torch.manual_seed(options.seed)
            rows += [{'rule': rule, 'side': side, **stage, **whole}
                     for stage in stage_errors(layers, rule)]
            progress.update(side**2)
    progress.close()
    weights = 'new weights' if options.checkpoint is None else options.checkpoint.name
    return Finding(rows, draw(rows), describe(rows, f'{options.image.name}, {weights}'))


def _of(rows: Sequence[dict], rule: str, stage: int, key: str) -> dict[int, float]:
    """A column over the image side."""
    return {row['side']: row[key] for row in rows if (row['rule'], row['stage']) == (rule, stage)}


def _growth(rows: Sequence[dict], rule: str, key: str) -> float:
    """Exponent over the pixels between the two largest images."""
    values = _of(rows, rule, 1, key)
    return exponent({side**2: values[side] for side in sorted(values)[-2:]})


def describe(rows: Sequence[dict], source: str) -> str:
    """The result in words.

    Args:
        rows: Of the CSV file.
        source: Photograph and weights.
    """
    sides = sorted({row['side'] for row in rows})
    last = sides[-1]
    growth = {rule: _growth(rows, rule, 'milliseconds') for rule in RULES}
    linear = [rule for rule in RULES if growth[rule] <= LINEAR]
    verdict = {0: 'does not hold here', 1: 'holds in part', 2: 'holds'}[len(linear)]
    parts = [f'That pooled landmarks make the time linear in the pixels **{verdict}** (linear: '
             f'an exponent of at most {LINEAR} between {sides[-2]} and {last} px).']
    for rule in RULES:
        values = {key: _of(rows, rule, 1, key)
                  for key in ('landmarks', 'milliseconds', 'peak_bytes', 'gmacs')}
        parts.append(
            f'With the {rule} stage 1 has {values["landmarks"][sides[0]]} landmarks at '
            f'{sides[0]} px and {values["landmarks"][last]} at {last} px; an inference takes '
            f'{values["milliseconds"][last] / 1e3:.2f} s, {values["gmacs"][last]:.1f} GMACs and '
            f'{values["peak_bytes"][last] / 2**20:.0f} MiB at {last} px, and its time grows with '
            f'the pixels to the power {growth[rule]:.2f}.')
    errors = {rule: [_of(rows, rule, stage, 'relative_error') for stage in range(1, 5)]
              for rule in RULES}

    def range_at(rule: str, side: int) -> str:
        return ', '.join(f'{stage[side]:.3f}' for stage in errors[rule])

    parts.append(
        f'The error of G against the exact kernel matrix (relative, Frobenius norm, '
        f'{SAMPLED_QUERIES} sampled queries of each layer, {source}) is, in stages 1 to 4, '
        f'{range_at(GRID, sides[0])} with the grid and {range_at(RATIO, sides[0])} with the '
        f'ratios at {sides[0]} px, and {range_at(GRID, last)} and {range_at(RATIO, last)} at '
        f'{last} px.')
    return ' '.join(parts)


def draw(rows: Sequence[dict]) -> Figure:
    """Landmarks, time, memory and error over the image side."""
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 7))
    sides = sorted({row['side'] for row in rows})
    columns = (('landmarks', 1, 'landmarks M of stage 1'), ('milliseconds', 1e3, 'inference, s'),
               ('peak_bytes', 2**20, 'peak memory of tensors, MiB'))
    for ax, (key, unit, label) in zip(axes.flat, columns, strict=False):
        for rule, style in zip(RULES, ('o-', 's--'), strict=True):
            values = _of(rows, rule, 1, key)
            ax.plot(sides, [values[side] / unit for side in sides], style, label=rule)
        ax.set_ylabel(label)
        ax.set_yscale('log')
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter('{x:g}')
        ax.legend()
    ax = axes[1, 1]
    for stage in range(1, 5):
        for rule, style in zip(RULES, ('o-', 's--'), strict=True):
            errors = _of(rows, rule, stage, 'relative_error')
            ax.plot(sides, [errors[side] for side in sides], style, color=f'C{stage + 1}',
                    label=f'stage {stage}, {rule.split()[0]}')
    ax.set_ylabel('error of G, relative')
    # Room for the legend.
    ax.set_ylim(0, 1.35 * ax.get_ylim()[1])
    ax.legend(fontsize=7, ncol=2, loc='upper left')
    for ax in axes.flat:
        ax.set_xscale('log')
        ax.set_xticks(sides, map(str, sides))
        ax.xaxis.minorticks_off()
        ax.yaxis.minorticks_off()
        ax.set_xlabel('image side, px')
        ax.grid(alpha=0.3)
    figure.suptitle('Tiny backbone: landmarks from a fixed grid and from fixed ratios')
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The photograph and the weights."""
    add_image_argument(parser)
    parser.add_argument('--checkpoint', type=Path, metavar='FILE',
                        help='weights of the tiny backbone (default: new ones)')


CLAIM = Claim('landmark_grids', 'Pooled landmarks make the attention linear in the pixels.',
              measure, add_arguments)

if __name__ == '__main__':
    sys.exit(CLAIM.run())
