"""The kernel scale lambda and the head dim on the recall task.

::

    python tools/analysis/kernel_scale.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import statistics
import sys

# isort: split
from claim import Claim, Finding, plt
from training_runs import (
    CHANCE,
    CONTROL,
    Setting,
    add_run_arguments,
    all_runs,
    curve_rows,
    differ,
    final_accuracies,
    summary,
)

SCALES, DEFAULT_SCALE = (.5, 1., 2., 4., 8.), 4.
HEAD_DIMS, DEFAULT_DIM, WIDTH = (16, 32, 64), 32, 64


def label(scale: float, head_dim: int) -> str:
    """Name of a setting."""
    return f'scale {scale:g}, head dim {head_dim}'


def settings() -> list[Setting]:
    """Every scale at the default head dim, every head dim at the default scale."""
    pairs = dict.fromkeys([*((scale, DEFAULT_DIM) for scale in SCALES),
                           *((DEFAULT_SCALE, dim) for dim in HEAD_DIMS)])
    # Without arguments it is the training of the other commands.
    return [Setting(label(scale, dim),
                    arguments={} if (scale, dim) == (DEFAULT_SCALE, DEFAULT_DIM) else
                    dict(kernel_scale=scale, num_heads=WIDTH // dim))
            for scale, dim in pairs]


def measure(options: argparse.Namespace) -> Finding:
    """Trains and draws."""
    runs = all_runs([*settings(), CONTROL], options)
    final = {name: final_accuracies(group) for name, group in runs.items()}
    by_scale = {scale: final[label(scale, DEFAULT_DIM)] for scale in SCALES}
    by_dim = {dim: final[label(DEFAULT_SCALE, dim)] for dim in HEAD_DIMS}

    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axes, groups, name in zip(panels, (by_scale, by_dim),
                                  (f'kernel scale λ, head dim {DEFAULT_DIM}',
                                   f'head dim d of width {WIDTH}, λ = {DEFAULT_SCALE:g}'),
                                  strict=True):
        axes.plot(list(groups), [statistics.mean(v) for v in groups.values()], color='C0')
        for x, values in groups.items():
            axes.plot([x] * len(values), values, 'o', color='C0', alpha=.6)
        axes.axhline(statistics.mean(final[CONTROL.label]), color='C3', label=CONTROL.label)
        axes.axhline(CHANCE, color='.6', linestyle=':', label='chance')
        axes.set_xscale('log', base=2)
        axes.set_xticks(list(groups), [f'{x:g}' for x in groups])
        axes.set_xlabel(name)
        axes.grid(alpha=.3)
    panels[0].set_ylabel('accuracy, held out')
    panels[0].set_ylim(0, 1)
    panels[0].legend()
    figure.suptitle(f'Recall task: mean, and each of {options.runs} seeds')
    text = verdict(by_scale, by_dim, final[CONTROL.label])
    return Finding(curve_rows(runs, options.seed), figure, text)


def verdict(by_scale: dict[float, list[float]], by_dim: dict[int, list[float]],
            control: list[float]) -> str:
    """What the accuracies say about the claim, with the criterion."""
    best = max(by_scale, key=lambda scale: statistics.mean(by_scale[scale]))
    alike = [scale for scale in by_scale
             if scale != best and not differ(by_scale[scale], by_scale[best])]
    if not differ(by_scale[best], control):
        found = 'is not shown here, since the control is as good'
    elif best == DEFAULT_SCALE:
        found = 'holds here' if not alike else 'holds in part'
    else:
        found = 'holds in part' if DEFAULT_SCALE in alike else 'does not hold here'
    others = f'; not different from it beyond the seeds: {", ".join(f"{s:g}" for s in alike)}'
    figures = ', '.join(f'λ = {s:g} {summary(v)}' for s, v in by_scale.items())
    dims = ', '.join(f'd = {d} {summary(v)}' for d, v in by_dim.items())
    return (f'That λ = {DEFAULT_SCALE:g} is the best scale **{found}**: the best mean is at λ = '
            f'{best:g}{others if alike else ""} (two settings differ if their means are further '
            f'apart than both standard deviations together). Accuracy at d = {DEFAULT_DIM}: '
            f'{figures}; at λ = {DEFAULT_SCALE:g}: {dims}; without attention {summary(control)}.')


CLAIM = Claim('kernel_scale', 'The kernel scale 4 is the best of 0.5, 1, 2, 4 and 8.', measure,
              add_run_arguments)


if __name__ == '__main__':
    sys.exit(CLAIM.run())
