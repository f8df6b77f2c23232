"""Many short trainings: settings times seeds, a few at a time, each kept when it is finished."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import distant_parts
import recall_task
import torch
from claim import UserError
from short_training import Curve, train
from softmax_attention import set_attention
from torch import nn
from tqdm import tqdm

TASKS = {'recall': (recall_task.RecallModel, recall_task.batch, 600),
         'images': (distant_parts.DistantPartsModel, distant_parts.batch, 400)}
"""Model, data and optimizer steps of each task."""

CHANCE = 1 / recall_task.COLOURS

Watch = Callable[[nn.Module, int], Mapping[str, float] | None]


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Args:
        label: Its name in figures and files.
        task: One of :data:`TASKS`.
        attention: As in :func:`softmax_attention.set_attention`.
        arguments: Of the model.
        change: Changes the model before the training.
        watch: Called after each step's backward; what it returns is kept with the step.
    """

    label: str
    task: str = 'recall'
    attention: str = 'laplacian'
    arguments: Mapping[str, object] = field(default_factory=dict)
    change: Callable[[nn.Module], None] | None = None
    watch: Watch | None = None

    def key(self, seed: int, steps: int) -> dict[str, object]:
        """What the result depends on, as JSON holds it."""
        functions = {name: getattr(self, name).__name__ for name in ('change', 'watch')
                     if getattr(self, name)}
        return dict(task=self.task, attention=self.attention, arguments=dict(self.arguments),
                    seed=seed, steps=steps, **functions)


CONTROL = Setting('no attention', attention='none')
"""What every setting of the recall task is compared with."""


@dataclass(frozen=True)
class Run:
    """A finished training.

    Args:
        curve: Its loss and accuracy.
        watched: What the setting's ``watch`` returned, with ``step``.
    """

    curve: Curve
    watched: list[dict[str, float]]


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--runs`` and ``--jobs``."""
    parser.add_argument('--runs', type=int, default=3, metavar='N',
                        help='trainings of each setting, with seeds from --seed on (default: 3)')
    parser.add_argument('--jobs', type=int, default=os.cpu_count() or 1, metavar='N',
                        help='trainings at a time, one thread each (default: the processors, '
                             f'here {os.cpu_count()})')


def run(setting: Setting, seed: int, steps: int, validation: int = 64) -> Run:
    """Trains one setting with one thread."""
    torch.set_num_threads(1)
    model_type, batch, _ = TASKS[setting.task]

    def build() -> nn.Module:
        model = set_attention(model_type(**setting.arguments), setting.attention)
        if setting.change is not None:
            setting.change(model)
        return model

    watched = []

    def watch(model: nn.Module, step: int) -> None:
        values = setting.watch(model, step)
        if values is not None:
            watched.append(dict(step=step, **values))

    _, curve = train(build, batch, steps=steps, seed=seed, validation=validation,
                     watch=watch if setting.watch else None)
    return Run(curve, watched)


def all_runs(settings: Sequence[Setting],
             options: argparse.Namespace) -> dict[str, list[Run]]:
    """Trains every setting with every seed, but for those that ``--out`` has already.

    A training is known by what it depends on, not by its label: one serves several commands.

    Args:
        settings: Labels differ.
        options: With ``out``, ``seed``, ``runs``, ``jobs`` and ``fast``, which trains for a few
            steps.

    Returns:
        The runs of each label, seed by seed.

    Raises:
        UserError: ``--runs`` or ``--jobs`` below 1.
    """
    for name in ('runs', 'jobs'):
        if getattr(options, name) < 1:
            raise UserError(f'--{name} must be at least 1, got {getattr(options, name)}')
    folder = options.out / 'runs'
    folder.mkdir(parents=True, exist_ok=True)
    seeds = range(options.seed, options.seed + options.runs)
    wanted = [(setting, seed, 4 if options.fast else TASKS[setting.task][2])
              for seed in seeds for setting in settings]
    missing = [job for job in wanted if _kept(folder, *job) is None]
    validation = 2 if options.fast else 64
    with tqdm(total=len(missing), desc='trainings') as bar:
        for job, result in _train(missing, options.jobs, validation):
            file = _file(folder, *job)
            part = file.with_suffix('.part')
            part.write_text(json.dumps(dict(key=job[0].key(*job[1:]), **asdict(result))) + '\n',
                            encoding='utf-8')
            part.replace(file)
            bar.update()
    return {setting.label: [_kept(folder, *job) for job in wanted if job[0] is setting]
            for setting in settings}


Job = tuple[Setting, int, int]


def _train(jobs: Sequence[Job], workers: int, validation: int) -> Iterable[tuple[Job, Run]]:
    """Finished trainings, in the order in which they finish."""
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            yield job, run(*job, validation)
        return
    # A thread pool of OpenMP does not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=get_context('spawn')) as pool:
        running = {pool.submit(run, *job, validation): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()


def _file(folder: Path, setting: Setting, seed: int, steps: int) -> Path:
    key = setting.key(seed, steps)
    parts = [key.pop('task'), key.pop('attention'),
             *(f'{name}_{value}' for name, value in (key.pop('arguments') | key).items())]
    name = '-'.join(parts)
    return folder / f'{"".join(c if c.isalnum() or c in "-." else "_" for c in name)}.json'


def _kept(folder: Path, setting: Setting, seed: int, steps: int) -> Run | None:
    """The finished training of these settings, if there is one."""
    file = _file(folder, setting, seed, steps)
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding='utf-8'))
    if content.pop('key') != json.loads(json.dumps(setting.key(seed, steps))):
        return None
    return Run(Curve(**content['curve']), content['watched'])


def final_accuracies(runs: Iterable[Run]) -> list[float]:
    """Accuracy of each run's last look."""
    return [run.curve.accuracy[-1] for run in runs]


def spread(values: Sequence[float]) -> float:
    """Sample standard deviation; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.


def summary(values: Sequence[float], digits: int = 3) -> str:
    """``mean ± standard deviation``, or the value where there is one only."""
    text = f'{statistics.mean(values):.{digits}f}'
    return f'{text} ± {spread(values):.{digits}f}' if len(values) > 1 else text


def differ(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether two means are further apart than both standard deviations together."""
    apart = abs(statistics.mean(first) - statistics.mean(second))
    return apart > spread(first) + spread(second)


def curve_rows(runs: Mapping[str, Sequence[Run]], seed: int,
               **columns: object) -> list[dict[str, object]]:
    """A line of a CSV file for each look at each run."""
    return [dict(columns, setting=label, seed=seed + i, step=step, loss=loss, accuracy=accuracy)
            for label, group in runs.items() for i, run in enumerate(group)
            for step, loss, accuracy in zip(run.curve.steps, run.curve.loss, run.curve.accuracy,
                                            strict=True)]


def draw_band(axes, runs: Sequence[Run], value: str, label: str, **style: object) -> None:
    """The mean over the runs, and a band from the lowest to the highest.

    Args:
        axes: Where to draw.
        runs: Of one setting.
        value: ``'loss'`` or ``'accuracy'``.
        label: Name in the legend.
        **style: Of the line.
    """
    steps = runs[0].curve.steps
    values = [getattr(run.curve, value) for run in runs]
    means = [statistics.mean(at) for at in zip(*values, strict=True)]
    line, = axes.plot(steps, means, label=label, **style)
    axes.fill_between(steps, [min(at) for at in zip(*values, strict=True)],
                      [max(at) for at in zip(*values, strict=True)], alpha=.2,
                      color=line.get_color(), linewidth=0)
    axes.set_xlabel('optimizer steps')
    axes.grid(alpha=.3)
