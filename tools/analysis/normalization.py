"""``normalize`` whiten, row and none on the recall task, and changes that stay a whitening.

Beside the curves it records every 25 steps what the attention does: its focus (see
:func:`focus`), the spread of the branch over the tokens against that of the values, and the
norms of the gradients of the projections to q, k and v::

    python tools/analysis/normalization.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import cache

# isort: split
import recall_task
import torch
from activations import attention_inputs
from claim import Claim, Finding, plt
from torch import Tensor, nn
from training_runs import (
    CHANCE,
    CONTROL,
    TASKS,
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
from mmlaplacian.ops.nystrom_attention.reference import attention_map, similarity

EVERY = 25
WATCHED = ('focus', 'branch', 'gradient_q', 'gradient_k', 'gradient_v')
# Schedules end here, half way.
_SCHEDULE = TASKS['recall'][2] // 2
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

    sqrt(D) becomes g sqrt(D) with one learned g > 0 a head: Z is still affine in G with one
    positive scale for each similarity dimension. g = start exp(10 p): a step of AdamW changes g by
    a share of it that is ten times the learning rate.

    Args:
        num_heads: Heads h.
        start: The first gain.
    """

    def __init__(self, num_heads: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.log = nn.Parameter(torch.zeros(num_heads, 1))

    @property
    def gain(self) -> Tensor:
        """``(h, 1)``."""
        return self.start * (10 * self.log).exp()

    def forward(self, x: Tensor) -> Tensor:
        """``(B, H, W, C) -> (B, H, W, C)``."""
        mean = x.mean((1, 2), keepdim=True)
        heads = (x - mean).unflatten(-1, (len(self.log), -1))
        return mean + (heads * self.gain).flatten(-2)


def _set_gain(model: nn.Module, start: float) -> None:
    for layer in _layers(model):
        layer.branch = HeadGain(layer.num_heads, start)
    record_spread(model)


def small_gain(model: nn.Module) -> None:
    """A learned gain a head, 1/16 at the start."""
    _set_gain(model, 1 / 16)


def large_gain(model: nn.Module) -> None:
    """A learned gain a head, 4 at the start."""
    _set_gain(model, 4)


@cache
def _probe() -> tuple[Tensor, Tensor]:
    """Four maps, and which keys have the answer of which query ``(B, N, N)``."""
    seed = 2**31
    tokens, _ = recall_task.batch(4, torch.Generator().manual_seed(seed))
    types, colours, carriers = recall_task.layout(4, torch.Generator().manual_seed(seed))
    types = recall_task.enlarged(types, recall_task.SIDE).flatten(1)
    carry = recall_task.patches(colours, carriers).flatten(1) >= 0
    return tokens, (types[:, :, None] == types[:, None]) & carry[:, None]


def focus(z: Tensor, answers: Tensor) -> Tensor:
    """How much more a query sees of the keys that have its answer than the mean query does.

    The mean over the queries i of the sum over the keys j with i's answer of Z_ij - mean_i Z_ij.
    With row it is at most 1 less the share of the queries that have the same answer. A whitened
    column of N (Z - 1/N) has the variance 1 at most, so for a share p of queries with the same
    answer its mean over them is at most sqrt((1 - p) / p).

    Args:
        z: The map ``(B, h, N, N)``.
        answers: Which keys have the answer of which query ``(B, N, N)``.

    Returns:
        For each head, the mean over the maps ``(h, )``.
    """
    beside = z - z.mean(-2, keepdim=True)
    return (beside * answers[:, None]).sum(-1).mean((0, 2))


def whiten_bound(answers: Tensor) -> float:
    """The largest focus of a whitened map with a gain of 1."""
    n = answers.shape[-1]
    share = answers.float().mean(-2)
    return ((share * (1 - share)).sqrt().sum(-1) / n).mean().item()


@torch.no_grad()
def _best_focus(model: nn.Module) -> float:
    """Focus of the head that has most of it."""
    tokens, answers = _probe()
    best = -math.inf
    for layer, seen in zip(_layers(model), attention_inputs(model, tokens), strict=True):
        g = similarity(seen.q, seen.k, seen.landmarks, layer.kernel_scale, layer.ridge,
                       layer.kernel)
        own = focus(attention_map(g, layer.whiten_eps, layer.normalize), answers)
        if isinstance(layer.branch, HeadGain):
            own = own * layer.branch.gain[:, 0]
        best = max(best, own.max().item())
    return best


def watch(model: nn.Module, step: int) -> dict[str, float] | None:
    """Spreads and gradient norms as means over the layers, and the best focus."""
    if step % EVERY:
        return None
    layers = _layers(model)
    norms = zip(*([part.norm().item() for part in layer.qkv.weight.grad.chunk(3)]
                  for layer in layers), strict=True)
    branch = statistics.mean(layer.branch.spread / layer.local.spread for layer in layers)
    return dict(focus=_best_focus(model), branch=branch,
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
    Setting('whiten, gain from 1/16', change=small_gain, watch=watch),
    Setting('whiten, gain from 4', change=large_gain, watch=watch),
    Setting('whiten, floor 1e-2 to 1e-5', change=record_spread, watch=watch_floor),
    Setting('whiten, scale 16 to 4', change=record_spread, watch=watch_scale),
)
CHANGES = tuple(setting.label for setting in SETTINGS[3:])


def measure(options: argparse.Namespace) -> Finding:
    """Trains and draws."""
    runs = all_runs([*SETTINGS, CONTROL], options)
    figure, panels = plt.subplots(2, 2, figsize=(10, 8))
    styles = {label: dict(color=f'C{i}', linestyle='-' if label in CHANGES else '--')
              for i, label in enumerate(runs)}
    for axes, labels in zip(panels[0], ((WHITEN, ROW, NONE, CONTROL.label),
                                        (WHITEN, ROW, *CHANGES)), strict=True):
        for label in labels:
            draw_band(axes, runs[label], 'accuracy', label, **styles[label])
    for axes in panels[0]:
        axes.set_ylabel('accuracy, held out')
        axes.axhline(CHANCE, color='.6', linestyle=':', label='chance')
        axes.set_ylim(0, 1)
    for axes, value, name in ((panels[1, 0], 'focus', 'focus of the best head'),
                              (panels[1, 1], 'branch', 'spread of the branch / of the values')):
        for setting in SETTINGS:
            points = watched_means(runs[setting.label], value)
            axes.plot(list(points), list(points.values()), label=setting.label,
                      **styles[setting.label])
        axes.set_yscale('log')
        axes.set_xlabel('optimizer steps')
        axes.set_ylabel(name)
        axes.grid(alpha=.3)
    panels[1, 0].axhline(whiten_bound(_probe()[1]), color='.6', linestyle=':',
                         label='bound of a whitened map')
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
                last = before[-1] if before else {}
                lines.append(dict(setting=label, seed=seed + i, step=step, accuracy=accuracy,
                                  **{name: last.get(name) for name in WATCHED}))
    return lines


def verdict(runs: Mapping[str, Sequence[Run]]) -> str:
    """What the runs show, with the criteria."""
    speed = {label: [statistics.mean(run.curve.accuracy) for run in group]
             for label, group in runs.items()}
    final = {label: final_accuracies(group) for label, group in runs.items()}
    figures = ', '.join(f'{label} {summary(speed[label])} and {summary(final[label])}'
                        for label in runs)
    text = (f'Accuracy as the mean over the looks at the training, and at its end: {figures}. '
            f'Two settings differ if their means are further apart than both standard deviations '
            f'together; speed is the mean over the looks. Whitening is '
            f'{"slower than" if _slower(speed[WHITEN], speed[ROW]) else "not slower than"} row: '
            f'the claim '
            f'**{"does not hold" if _slower(speed[WHITEN], speed[ROW]) else "holds"} here**. ')
    if not differ(final[WHITEN], final[CONTROL.label]):
        text += 'The control without attention is as good, so this says nothing about attention. '
    text += _mechanism(runs)
    ahead = [label for label in CHANGES
             if all(changed > own for changed, own in
                    zip(speed[label], speed[WHITEN], strict=True))]
    gap = statistics.mean(speed[ROW]) - statistics.mean(speed[WHITEN])
    shares = {label: (statistics.mean(speed[label]) - statistics.mean(speed[WHITEN])) / gap
              for label in ahead if gap > 0}
    closing = [label for label in shares if not _slower(speed[label], speed[ROW])]
    listed = ', '.join(f'{label} ({share:.0%} of the gap)' for label, share in shares.items())
    text += (f'Faster than plain whitening with every seed: {listed or "no change"}. '
             f'Not slower than row as well: {", ".join(closing) or "no change"}.')
    return text


def _mechanism(runs: Mapping[str, Sequence[Run]]) -> str:
    """What was watched, first and last."""
    if not runs[WHITEN][0].watched:
        return ''
    first, last = ({label: {name: statistics.mean(run.watched[i][name] for run in runs[label])
                            for name in WATCHED} for label in runs if runs[label][0].watched}
                   for i in (0, -1))
    times = first[WHITEN]['branch'] / first[ROW]['branch']
    parts = [
        f'What was watched, after {runs[WHITEN][0].watched[0]["step"]} steps and at the end. The '
        "spread of the branch over that of the values: ", _pairs(first, last, 'branch'),
        '. The focus of the best head (how much more a query sees of the keys with its answer '
        'than the mean query does): ', _pairs(first, last, 'focus'),
        f'. So the whitened branch starts {times:.1f} times as large as that of row, with '
        f'{first[WHITEN]["focus"] / first[ROW]["focus"]:.1f} times its focus. A whitened map with '
        f'a gain of 1 has a focus of at most {whiten_bound(_probe()[1]):.3f} here. Norms of the '
        'gradients: ']
    parts.append('; '.join(f'of W_{name} {_pairs(first, last, f"gradient_{name}", (WHITEN, ROW))}'
                           for name in 'qkv'))
    return ''.join(parts) + '. '


def _pairs(first: Mapping[str, Mapping[str, float]], last: Mapping[str, Mapping[str, float]],
           name: str, labels: Sequence[str] | None = None) -> str:
    return ', '.join(f'{label} {first[label][name]:.2g} and {last[label][name]:.2g}'
                     for label in labels or first)


def _slower(first: Sequence[float], second: Sequence[float]) -> bool:
    return differ(first, second) and statistics.mean(first) < statistics.mean(second)


CLAIM = Claim('normalization',
              'The whitened map trains as fast as row normalisation of the attention.', measure,
              add_run_arguments)


if __name__ == '__main__':
    sys.exit(CLAIM.run())
