"""Newton-Schulz against conjugate gradient, Cholesky and the pseudo-inverse.

::

    python tools/analysis/solvers.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from activations import AttentionInputs
from claim import Claim, Finding, plt
from convergence import NAMES
from inverses import (
    CHOLESKY,
    DIRECT,
    GENERAL,
    GRADIENTS,
    ITERATIVE,
    PAPER,
    SPD,
    direct,
    iterates,
    residual,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from photograph import add_image_argument
from timing import time_in_turn
from tiny_layers import tiny_layers
from torch import Tensor
from tqdm import tqdm
from training_runs import (
    CHANCE,
    CONTROL,
    Run,
    Setting,
    add_run_arguments,
    all_runs,
    differ,
    final_accuracies,
    summary,
)
from verdict import verdict

from mmlaplacian.ops import laplacian_kernel, newton_schulz_inverse
from mmlaplacian.ops.newton_schulz import default_iters
from mmlaplacian.ops.nystrom_attention.reference import attention_map

M, KERNEL_SCALE, RIDGE, WHITEN_EPS = 49, 4.0, 1e-2, 1e-5
STEPS, FAST_STEPS = 40, 20
CONDITIONS = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
SIDE = 224
# Dense maps of N x N are formed for layers of at most so many tokens: stages 2 to 4 at 224 px.
MOST_TOKENS = 784
# Beside the default.
TRAINING_STEPS = (1, 3, 10)
WITH_DEFAULT = NAMES['laplacian']
FULL, HALF = 'float32', 'rounded to float16'
FLAT, PHOTOGRAPH = 'flat', 'photograph'
RESIDUAL, TIME, OUTPUT, TRAINING = 'residual', 'milliseconds', 'output error', 'accuracy'
# Largest residual and output error that count as solved.
SOLVED = 1e-2
DEFAULT = default_iters(M, RIDGE, torch.float32)


def conditioned(condition: float, generator: torch.Generator) -> Tensor:
    """SPD matrices ``(8, M, M)`` with eigenvalues evenly spaced in logarithm and trace M.

    The trace is that of a matrix of kernel values.
    """
    basis, _ = torch.linalg.qr(torch.randn(8, M, M, generator=generator, dtype=torch.float64))
    values = torch.logspace(0, -math.log10(condition), M, dtype=torch.float64)
    return (basis * (values * M / values.sum())) @ basis.mT


def landmark_matrix(landmarks: Tensor) -> Tensor:
    """W = k(k~, k~) + ridge I, in float64."""
    w = laplacian_kernel(landmarks.double(), landmarks.double(), KERNEL_SCALE)
    return w + RIDGE * torch.eye(w.shape[-1], dtype=w.dtype)


def residual_rows(case: str, w: Tensor, steps: int, **columns: object) -> list[dict[str, object]]:
    """The largest residual of every method on matrices of one kind, in both precisions.

    Args:
        case: Name of the matrices.
        w: Symmetric positive definite ``(..., M, M)``, float64.
        steps: Steps of the iterations.
        **columns: Further columns.
    """
    bound = torch.linalg.eigvalsh(w)[..., 0].min().item()
    rows = []
    for precision, given in ((FULL, w.float()), (HALF, w.half().float())):
        found = {name: list(iterates(name, bound)(given, steps)) for name in ITERATIVE}
        found |= {name: [direct(name)(given)] for name in DIRECT}
        rows += [_row(RESIDUAL, case, name, residual(given, x).max().item(), precision=precision,
                      steps=step if name in ITERATIVE else '', **columns)
                 for name, xs in found.items() for step, x in enumerate(xs, 1)]
    return rows


def _row(part: str, case: str, method: str, value: float, **columns: object) -> dict[str, object]:
    return {'part': part, 'case': case, 'method': method, 'precision': '', 'steps': '',
            'condition': '', 'seed': '', 'value': value, **columns}


def output(inputs: AttentionInputs, inverse: Tensor) -> Tensor:
    """Z V with G = C_q X C_k^T for a given X, in the dtype of X."""
    q, k, v, landmarks = (x.to(inverse.dtype) for x in (
        inputs.q, inputs.k, inputs.v, inputs.landmarks))
    c_q, c_k = (laplacian_kernel(x, landmarks, KERNEL_SCALE) for x in (q, k))
    return attention_map(c_q @ inverse @ c_k.mT, WHITEN_EPS, 'whiten') @ v


def output_rows(case: str, layers: Sequence[AttentionInputs],
                steps: int) -> list[dict[str, object]]:
    """Largest relative error of the attention output over the layers, against float64.

    Args:
        case: Name of the inputs.
        layers: Each M landmarks.
        steps: Steps of the iterations.
    """
    errors: dict[tuple[str, object], float] = {}
    for inputs in layers:
        w = landmark_matrix(inputs.landmarks)
        exact = output(inputs, torch.linalg.inv(w))
        found = {(name, step): x for name in ITERATIVE
                 for step, x in enumerate(iterates(name, RIDGE)(w.float(), steps), 1)}
        found |= {(name, ''): direct(name)(w.float()) for name in DIRECT}
        for key, x in found.items():
            error = ((output(inputs, x).double() - exact).norm() / exact.norm()).item()
            errors[key] = max(errors.get(key, 0.),
                              error if math.isfinite(error) else math.inf)
    return [_row(OUTPUT, case, name, error, precision=FULL, steps=step)
            for (name, step), error in errors.items()]


def nearly_flat(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs of a layer drawn together, so that its landmarks are almost equal."""

    def drawn(x: Tensor) -> Tensor:
        mean = x.mean(2, keepdim=True)
        return mean + 1e-3 * (x - mean)

    return AttentionInputs(inputs.layer, inputs.grid, drawn(inputs.q), drawn(inputs.k), inputs.v,
                           drawn(inputs.landmarks))


def time_rows(w: Tensor, repeats: int) -> list[dict[str, object]]:
    """Milliseconds of a batch of inverses: iterations with their default counts.

    Args:
        w: SPD ``(batch, M, M)``, float32.
        repeats: Timed calls, at most.
    """
    calls: dict[str, Callable[[], object]] = {
        SPD: partial(newton_schulz_inverse, w, None, RIDGE),
        GENERAL: partial(newton_schulz_inverse, w),
        GRADIENTS: lambda: list(iterates(GRADIENTS, RIDGE)(w, M)),
        **{name: partial(direct(name), w) for name in DIRECT}}
    counts = {SPD: DEFAULT, GENERAL: default_iters(M, None, w.dtype), GRADIENTS: M}
    outcomes = time_in_turn(calls, torch.device('cpu'), seconds_each=1, most_repeats=repeats)
    return [_row(TIME, f'{len(w)} matrices', name, outcome.milliseconds, precision=FULL,
                 steps=counts.get(name, '')) for name, outcome in outcomes.items()]


def train_all(options: argparse.Namespace) -> dict[str, list[Run]]:
    """The recall task with every number of solver steps, and without attention."""
    settings = [Setting(f'solver steps {count}', arguments={'solver_iters': count})
                for count in (TRAINING_STEPS[:1] if options.fast else TRAINING_STEPS)]
    return all_runs([*settings, Setting(WITH_DEFAULT), CONTROL], options)


def _short(label: str) -> str:
    return {WITH_DEFAULT: 'default'}.get(label, label.removeprefix('solver steps '))


def measure(options: argparse.Namespace) -> Finding:
    """Residuals, times, output errors and short trainings."""
    generator = torch.Generator().manual_seed(options.seed)
    steps = FAST_STEPS if options.fast else STEPS
    layers = [layer for layer in tiny_layers(options.image, SIDE, options.seed)
              if layer.q.shape[2] <= MOST_TOKENS]
    real = torch.cat([landmark_matrix(layer.landmarks)[0] for layer in layers])
    matrices = {f'condition {condition:.0e}': (conditioned(condition, generator), condition)
                for condition in CONDITIONS}
    matrices[FLAT] = (torch.ones(1, M, M) + RIDGE * torch.eye(M)).double(), (M + RIDGE) / RIDGE
    matrices[PHOTOGRAPH] = real, torch.linalg.cond(real).max().item()
    rows = []
    for case, (w, condition) in tqdm(matrices.items(), desc='residuals'):
        rows += residual_rows(case, w.double(), steps, condition=condition)
    rows += time_rows(real.float(), 3 if options.fast else 20)
    shown = layers[-1:] if options.fast else layers[::2]
    for case, chosen in tqdm(((PHOTOGRAPH, shown), (FLAT, [nearly_flat(x) for x in shown])),
                             desc='outputs'):
        rows += output_rows(case, chosen, steps)
    runs = train_all(options)
    rows += [_row(TRAINING, 'recall task', label, accuracy, seed=options.seed + i)
             for label, group in runs.items()
             for i, accuracy in enumerate(final_accuracies(group))]
    return Finding(rows, draw(rows), describe(rows, options.image.name))


def _value(rows: Sequence[Mapping[str, object]], **wanted: object) -> float:
    """The value of the only row with these columns."""
    value, = (row['value'] for row in rows if all(row[key] == x for key, x in wanted.items()))
    return value


def _accuracies(rows: Sequence[Mapping[str, object]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row['part'] == TRAINING:
            found.setdefault(row['method'], []).append(row['value'])
    return found


def describe(rows: Sequence[Mapping[str, object]], source: str) -> str:
    """The result in words.

    Args:
        rows: Of the CSV file.
        source: Name of the photograph.
    """
    kernel_cases = (FLAT, PHOTOGRAPH)

    def worst(part: str, method: str, steps: object) -> float:
        return max(_value(rows, part=part, case=case, method=method, steps=steps, precision=FULL)
                   for case in kernel_cases)

    paper, own = (worst(RESIDUAL, name, DEFAULT) for name in (PAPER, SPD))
    error = worst(OUTPUT, SPD, DEFAULT)
    times = {row['method']: row['value'] for row in rows if row['part'] == TIME}
    accuracies = _accuracies(rows)
    default = accuracies[WITH_DEFAULT]
    worse = [_short(name) for name, values in accuracies.items()
             if name not in (CONTROL.label, WITH_DEFAULT) and differ(values, default)
             and statistics.mean(values) < statistics.mean(default)]
    learns = (differ(default, accuracies[CONTROL.label])
              and statistics.mean(default) > statistics.mean(accuracies[CONTROL.label]))
    held = [paper <= SOLVED, max(own, error) <= SOLVED, times[SPD] <= times[CHOLESKY]]

    def solved_up_to(name: str, precision: str, steps: object) -> str:
        solved = [condition for condition in CONDITIONS
                  if _value(rows, part=RESIDUAL, case=f'condition {condition:.0e}', method=name,
                            precision=precision, steps=steps) <= SOLVED]
        return f'{max(solved):.0e}' if solved else 'none'

    most = max(row['steps'] for row in rows if row['part'] == RESIDUAL and row['steps'])
    reach = '; '.join(
        f'{name} {solved_up_to(name, FULL, steps)} and {solved_up_to(name, HALF, steps)}'
        for name, steps in [(name, most) for name in ITERATIVE] + [(name, '') for name in DIRECT])
    trained = ', '.join(f'{_short(name)} {summary(values)}'
                        for name, values in accuracies.items())
    return (
        f'That Newton-Schulz inverts the landmark matrix reliably and at little cost '
        f'{verdict(held)}. On equal landmarks and on the matrices of {source} (tiny backbone, '
        f'new weights, M = {M}), after {DEFAULT} steps, the default count, the printed start '
        f'2 W^T / ||W||_2 has a largest residual of {paper:.1e} and the start for symmetric '
        f'positive definite matrices {own:.1e}, in float32 (solved: at most {SOLVED:g}); the '
        f'attention output then differs from float64 by {error:.1e}, relatively. Cost: '
        f'{times[SPD]:.2f} ms for the matrices of the photograph, against {times[GENERAL]:.2f} '
        f'with the general start, {times[CHOLESKY]:.2f} by Cholesky, {times["pinv"]:.2f} by '
        f'pinv and {times[GRADIENTS]:.2f} by {M} steps of conjugate gradient, on this processor; '
        f'the criterion is Cholesky. Largest condition number that is solved in float32 and '
        f'with W rounded to float16, after {most} steps: {reach}. Recall task, final accuracy '
        f'over the solver steps: {trained} (chance {CHANCE:.3f}). '
        + (f'Worse than the default by more than both standard deviations together: '
           f'{", ".join(f"{name} steps" for name in worse) or "no count"}.' if learns else
           'The default count is not above the control by more than both standard deviations '
           'together: the trainings say nothing about the solver.'))


def _capped(values: Sequence[float]) -> list[float]:
    """For a logarithmic axis: what diverges is drawn at its top."""
    return [min(max(value, 1e-9), 1e4) for value in values]


def _draw_steps(axes: Axes, rows: Sequence[Mapping[str, object]], part: str, case: str) -> None:
    chosen = [row for row in rows if (row['part'], row['case'], row['precision']) ==
              (part, case, FULL)]
    for name in (*ITERATIVE, *DIRECT):
        found = [row for row in chosen if row['method'] == name]
        if name in ITERATIVE:
            axes.plot([row['steps'] for row in found], _capped([row['value'] for row in found]),
                      label=name)
        else:
            axes.axhline(_capped([found[0]['value']])[0], ls=':', label=name,
                         color='k' if name == CHOLESKY else '0.5')
    axes.axvline(DEFAULT, color='0.8', lw=1, zorder=0)
    axes.set_yscale('log')
    axes.set_xlabel(f'steps (default {DEFAULT})')
    axes.grid(alpha=.3)


def _draw_conditions(axes: Axes, rows: Sequence[Mapping[str, object]], precision: str) -> None:
    most = max(row['steps'] for row in rows if row['part'] == RESIDUAL and row['steps'])
    for name, marker in zip((*ITERATIVE, *DIRECT), 'osD^vx', strict=True):
        values = [_value(rows, part=RESIDUAL, case=f'condition {condition:.0e}', method=name,
                         precision=precision, steps=most if name in ITERATIVE else '')
                  for condition in CONDITIONS]
        axes.plot(CONDITIONS, _capped(values), marker=marker, ms=5, label=name)
    axes.set_xscale('log')
    axes.set_yscale('log')
    axes.set_xlabel('condition number of W')
    axes.set_ylabel('residual max |WX - I|')
    axes.set_title(f'{most} steps, W in {precision}' if precision == FULL else
                   f'{most} steps, W {precision}', fontsize=9)
    axes.grid(alpha=.3)


def draw(rows: Sequence[Mapping[str, object]]) -> Figure:
    """Residuals, output errors, times and trainings."""
    figure, panels = plt.subplots(2, 3, figsize=(14, 8))
    _draw_steps(panels[0, 0], rows, RESIDUAL, FLAT)
    panels[0, 0].set_title('equal landmarks', fontsize=9)
    panels[0, 0].set_ylabel('residual max |WX - I|')
    panels[0, 0].legend(fontsize=7)
    _draw_conditions(panels[0, 1], rows, FULL)
    _draw_conditions(panels[0, 2], rows, HALF)
    _draw_steps(panels[1, 0], rows, OUTPUT, PHOTOGRAPH)
    panels[1, 0].set_title('attention output, photograph', fontsize=9)
    panels[1, 0].set_ylabel('relative error against float64')

    timed = [row for row in rows if row['part'] == TIME]
    bars = panels[1, 1].barh([row['method'] for row in timed], [row['value'] for row in timed])
    panels[1, 1].bar_label(bars, fmt='%.2f', padding=3, fontsize=8)
    panels[1, 1].set_xscale('log')
    panels[1, 1].xaxis.set_minor_formatter(NullFormatter())
    panels[1, 1].margins(x=.2)
    panels[1, 1].set_xlabel('time, ms')
    panels[1, 1].set_title(f'{timed[0]["case"]}, M = {M}', fontsize=9)

    accuracies = _accuracies(rows)
    for place, values in enumerate(accuracies.values()):
        panels[1, 2].plot([place] * len(values), values, 'o', color='C0', alpha=.5)
        panels[1, 2].plot(place, statistics.mean(values), '_', color='k', ms=18)
    panels[1, 2].axhline(CHANCE, ls=':', color='0.5', label='chance')
    panels[1, 2].set_xticks(range(len(accuracies)),
                            [_short(name).replace(' ', '\n') for name in accuracies],
                            fontsize=8)
    panels[1, 2].set_xlabel('solver steps of the training')
    panels[1, 2].set_ylabel('accuracy, each seed and mean')
    panels[1, 2].set_title('recall task', fontsize=9)
    panels[1, 2].legend(fontsize=7, loc='lower left')
    figure.suptitle(f'Inverse of the landmark matrix, M = {M}; values above 1e4, or not finite, '
                    'are drawn at 1e4')
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The photograph and the trainings."""
    add_image_argument(parser)
    add_run_arguments(parser)


CLAIM = Claim('solvers', 'Newton-Schulz inverts the landmark matrix reliably and at little cost.',
              measure, add_arguments)

if __name__ == '__main__':
    sys.exit(CLAIM.run())
