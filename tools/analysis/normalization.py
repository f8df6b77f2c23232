"""``normalize`` whiten, row and none on the recall task, and changes that stay a whitening.

Beside the curves it records, every 25 steps and averaged over the layers, the spread of the
attention branch over the tokens against that of the values, and the norm of the gradients of the
projections to q, k and v::

    python tools/analysis/normalization.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence

# isort: split
import torch
from claim import Claim, Finding, plt
from torch import Tensor, nn
from training_runs import (
    CHANCE,
    Run,
    Setting,
    add_run_arguments,
    all_runs,
    differ,
    draw_band,
    final_accuracies,
    summary,
)

from mmlaplacian.models import LaplacianAttention

EVERY = 25
# Schedules end here; a training has 600 steps.
_SCHEDULE = 300
WHITEN, ROW, NONE = 'whiten', 'row', 'none'


def _layers(model: nn.Module) -> list[LaplacianAttention]:
    return [module for module in model.modules() if isinstance(module, LaplacianAttention)]


def record_spread(model: nn.Module) -> None:
    """Keeps the spread over the tokens of every layer's branch and values."""

    def of_branch(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        module.spread = output.detach().flatten(1, 2).std(1).mean().item()

    def of_values(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        module.spread = inputs[0].detach().flatten(1, 2).std(1).mean().item()

    for layer in _layers(model):
        layer.branch.register_forward_hook(of_branch)
        layer.local.register_forward_hook(of_values)


class HeadGain(nn.Module):
    """Multiplies what the branch has beside its mean over the tokens, head by head.

    sqrt(D) becomes g sqrt(D) with one learned g a head: Z is still affine in G with one positive
    scale for each similarity dimension, as long as g > 0.

    Args:
        num_heads: Heads h.
        start: The first gain.
    """

    def __init__(self, num_heads: int, start: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((num_heads, 1), float(start)))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, C) -> (B, H, W, C)``."""
        mean = x.mean((1, 2), keepdim=True)
        heads = (x - mean).unflatten(-1, (len(self.gain), -1))
        return mean + (heads * self.gain).flatten(-2)


def _set_gain(model: nn.Module, start: float) -> None:
    for layer in _layers(model):
        layer.branch = HeadGain(layer.num_heads, start)
    record_spread(model)


def gain_of_1(model: nn.Module) -> None:
    """A learned gain a head, 1 at the start."""
    _set_gain(model, 1)


def gain_of_4(model: nn.Module) -> None:
    """A learned gain a head, 4 at the start."""
    _set_gain(model, 4)


def watch(model: nn.Module, step: int) -> dict[str, float] | None:
    """Spreads and gradient norms, means over the layers."""
    if step % EVERY:
        return None
    layers = _layers(model)
    norms = zip(*([part.norm().item() for part in layer.qkv.weight.grad.chunk(3)]
                  for layer in layers), strict=True)
    return dict(branch=statistics.mean(layer.branch.spread / layer.local.spread
                                       for layer in layers),
                **{f'gradient_{name}': statistics.mean(values)
                   for name, values in zip('qkv', norms, strict=True)})


def _geometric(first: float, last: float, step: int) -> float:
    share = min(1., step / _SCHEDULE)
    return first**(1 - share) * last**share


def watch_floor(model: nn.Module, step: int) -> dict[str, float] | None:
    """The floor of the variance falls from 1e-2 to 1e-5."""
    for layer in _layers(model):
        layer.whiten_eps = _geometric(1e-2, 1e-5, step)
    return watch(model, step)


def watch_scale(model: nn.Module, step: int) -> dict[str, float] | None:
    """The kernel scale falls from 16 to 4."""
    for layer in _layers(model):
        layer.kernel_scale = _geometric(16, 4, step)
    return watch(model, step)


SETTINGS = (
    *(Setting(name, arguments=dict(normalize=name), change=record_spread, watch=watch)
      for name in (WHITEN, ROW, NONE)),
    Setting('whiten, learned gain from 1', change=gain_of_1, watch=watch),
    Setting('whiten, learned gain from 4', change=gain_of_4, watch=watch),
    Setting('whiten, floor 1e-2 to 1e-5', change=record_spread, watch=watch_floor),
    Setting('whiten, scale 16 to 4', change=record_spread, watch=watch_scale),
)
CHANGES = tuple(setting.label for setting in SETTINGS[3:])


def measure(options: argparse.Namespace) -> Finding:
    """Trains and draws."""
    runs = all_runs(SETTINGS, options)
    figure, panels = plt.subplots(2, 2, figsize=(10, 8))
    for label in (WHITEN, ROW, NONE):
        draw_band(panels[0, 0], runs[label], 'accuracy', label)
    for label, style in zip((WHITEN, ROW, *CHANGES), ('--', '--', '-', '-', '-', '-'),
                            strict=True):
        draw_band(panels[0, 1], runs[label], 'accuracy', label, linestyle=style)
    for axes in panels[0]:
        axes.set_ylabel('accuracy, held out')
        axes.axhline(CHANCE, color='.6', linestyle=':', label='chance')
        axes.set_ylim(0, 1)
    for axes, value, name in ((panels[1, 0], 'branch', 'spread of the branch / of the values'),
                              (panels[1, 1], 'gradient_q', 'norm of the gradient of W_q')):
        for label in (WHITEN, ROW, NONE):
            points = watched_means(runs[label], value)
            axes.plot(list(points), list(points.values()), label=label)
        axes.set_yscale('log')
        axes.set_xlabel('optimizer steps')
        axes.set_ylabel(name)
        axes.grid(alpha=.3)
    for axes in panels.flat:
        axes.legend(fontsize=7)
    figure.suptitle(f'Recall task: mean and range over {options.runs} seeds')
    return Finding(rows(runs, options.seed), figure, verdict(runs))


def watched_means(runs: Sequence[Run], value: str) -> dict[int, float]:
    """Mean over the runs of what was watched, by step."""
    return {at[0]['step']: statistics.mean(values[value] for values in at)
            for at in zip(*(run.watched for run in runs), strict=True)}


def rows(runs: Mapping[str, Sequence[Run]], seed: int) -> list[dict[str, object]]:
    """Accuracy, and what was watched last before, at each look."""
    lines = []
    for label, group in runs.items():
        for i, run in enumerate(group):
            for step, accuracy in zip(run.curve.steps, run.curve.accuracy, strict=True):
                before = [values for values in run.watched if values['step'] <= step]
                last = before[-1] if before else dict.fromkeys(
                    ('branch', 'gradient_q', 'gradient_k', 'gradient_v'))
                lines.append(dict(setting=label, seed=seed + i, step=step, accuracy=accuracy,
                                  **{name: last[name] for name in last if name != 'step'}))
    return lines


def verdict(runs: Mapping[str, Sequence[Run]]) -> str:
    """What the runs show, with the criterion."""
    final = {label: final_accuracies(group) for label, group in runs.items()}
    middle = {label: [_at_half(run) for run in group] for label, group in runs.items()}
    figures = ', '.join(f'{label} {summary(values)} ({summary(middle[label])} half way)'
                        for label, values in final.items())
    slower = (differ(middle[WHITEN], middle[ROW])
              and statistics.mean(middle[WHITEN]) < statistics.mean(middle[ROW]))
    closing = [label for label in CHANGES
               if min(middle[label]) > max(middle[WHITEN])
               and min(final[label]) >= min(final[WHITEN])]
    text = (f'Final accuracy: {figures}. Whitening '
            f'{"starts slower than" if slower else "does not differ half way from"} row (two '
            'settings differ if their means are further apart than both standard deviations '
            'together). ')
    if runs[WHITEN][0].watched:
        first = {label: _early(runs[label]) for label in (WHITEN, ROW)}
        text += ('In the first hundred steps the branch has '
                 f'{first[WHITEN]["branch"]:.2f} of the values\' spread with whiten and '
                 f'{first[ROW]["branch"]:.2f} with row, and the gradient of W_q has the norm '
                 f'{first[WHITEN]["gradient_q"]:.1e} and {first[ROW]["gradient_q"]:.1e}, of W_v '
                 f'{first[WHITEN]["gradient_v"]:.1e} and {first[ROW]["gradient_v"]:.1e}. ')
    if closing:
        text += f'Ahead of whiten half way with every seed, and not behind at the end: ' \
                f'{"; ".join(closing)}.'
    else:
        text += 'No change that was tried is ahead of whiten half way with every seed.'
    return text


def _at_half(run: Run) -> float:
    """Accuracy at the look nearest to half of the steps."""
    half = run.curve.steps[-1] / 2
    return min(zip(run.curve.steps, run.curve.accuracy, strict=True),
               key=lambda look: abs(look[0] - half))[1]


def _early(runs: Sequence[Run]) -> dict[str, float]:
    """Means of what was watched in the first hundred steps."""
    return {name: statistics.mean(values[name] for run in runs for values in run.watched
                                  if values['step'] <= 100)
            for name in runs[0].watched[0]}


CLAIM = Claim('normalization',
              'The whitened map trains as fast as row normalisation of the attention.', measure,
              add_run_arguments)


if __name__ == '__main__':
    sys.exit(CLAIM.run())
