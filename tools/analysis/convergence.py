"""Loss and accuracy of the Laplacian kernel, the Gaussian kernel, softmax and no attention.

Two tasks that need attention, ``recall_task.py`` as tokens and ``distant_parts.py`` as images::

    python tools/analysis/convergence.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import statistics
import sys

# isort: split
from claim import Claim, Finding, plt
from softmax_attention import ATTENTIONS
from training_runs import (
    CHANCE,
    TASKS,
    Run,
    Setting,
    add_run_arguments,
    all_runs,
    curve_rows,
    differ,
    draw_band,
    final_accuracies,
    summary,
)

NAMES = dict(laplacian='Laplacian', gaussian='Gaussian', softmax='softmax',
             none='no attention')
TITLES = dict(recall='recall, 256 tokens', images='distant parts, 128 x 128 px')
# "Converges faster" is the number of steps to this accuracy.
HALF = .5


def measure(options: argparse.Namespace) -> Finding:
    """Trains and draws."""
    tasks = options.tasks
    figure, panels = plt.subplots(len(tasks), 2, figsize=(9, .3 + 3.4 * len(tasks)),
                                  squeeze=False)
    rows, texts = [], []
    for (loss, accuracy), task in zip(panels, tasks, strict=True):
        runs = all_runs([Setting(NAMES[a], task, a) for a in ATTENTIONS], options)
        rows += curve_rows(runs, options.seed, task=task)
        texts.append(verdict(TITLES[task], runs))
        for label, group in runs.items():
            draw_band(loss, group, 'loss', label)
            draw_band(accuracy, group, 'accuracy', label)
        accuracy.axhline(CHANCE, color='.6', linestyle=':', label='chance')
        accuracy.set_ylim(0, 1)
        loss.set_ylabel('cross entropy, training')
        accuracy.set_ylabel('accuracy, held out')
        loss.set_title(TITLES[task], fontsize=10)
        accuracy.set_title(TITLES[task], fontsize=10)
    panels[0, 0].legend(fontsize=8)
    panels[0, 1].legend(fontsize=8)
    figure.suptitle(f'Mean and range over {options.runs} seeds')
    return Finding(rows, figure, ' '.join(texts))


def verdict(title: str, runs: dict[str, list[Run]], value: str = 'accuracy') -> str:
    """What the runs of one task say about the claim, with the criterion.

    Args:
        title: The task.
        runs: By name of the attention.
        value: Name of the curves' accuracy.
    """
    final = {name: final_accuracies(group) for name, group in runs.items()}
    figures = ', '.join(f'{name} {summary(values)}{_half(runs[name])}'
                        for name, values in final.items())
    laplacian, gaussian, control = (final[NAMES[a]] for a in ('laplacian', 'gaussian', 'none'))
    if not differ(laplacian, control):
        found = 'the control is as good, so this says nothing about attention'
    elif not differ(laplacian, gaussian):
        found = 'Laplacian and Gaussian do not differ beyond the seeds: not shown here'
    elif statistics.mean(laplacian) > statistics.mean(gaussian):
        found = 'the Laplacian kernel is better than the Gaussian: holds here'
    else:
        found = 'the Gaussian kernel is better than the Laplacian: does not hold here'
    return (f'**{title}**: final {value} {figures}. {found[0].upper()}{found[1:]} (two settings '
            'differ if their means are further apart than both standard deviations together).')


def _half(runs: list[Run]) -> str:
    """After how many steps all runs have named half of the places right."""
    reached = [next((step for step, value in zip(run.curve.steps, run.curve.accuracy, strict=True)
                     if value >= HALF), None) for run in runs]
    if None in reached:
        return ''
    return f' (above {HALF:g} by step {" / ".join(map(str, reached))})'


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument('--tasks', nargs='+', choices=TASKS, default=list(TASKS),
                        help=f'what is trained on (default: {" ".join(TASKS)})')


CLAIM = Claim('convergence',
              'The Laplacian kernel converges faster and to a better result than the Gaussian '
              'kernel.', measure, _add_arguments)


if __name__ == '__main__':
    sys.exit(CLAIM.run())
