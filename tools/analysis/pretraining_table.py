"""Measures what pretraining gives: the shapes detector from scratch and from a classifier.

For every seed it trains the classifier of generated shapes, then the detector after a short
schedule, once from scratch and once from the classifier's backbone; ``--no-attention`` runs the
control of both, with the attention branch set to zero. It writes::

    OUT/runs.csv      box AP and mask AP of every detector
    OUT/table.md      mean and spread (sample standard deviation) over the seeds
    OUT/seed0/...     the work dir of every run; settings and results of a finished one are in
                      its finished.json

A finished run is not repeated; one that was interrupted starts again at its beginning, because a
resumed training draws other random numbers than an uninterrupted one.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / 'tools'))

from cli import UserError, exits_on_user_error  # noqa: E402  the folder is set above

CLASSIFIER = 'laplacian_shapes_classification'
DETECTOR = 'mask_rcnn_laplacian_shapes_short'
CONTROL = '_no_attention'
METRICS = {'box AP': 'coco/bbox_mAP', 'mask AP': 'coco/segm_mAP'}
STARTS = ('scratch', 'pretrained')


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        work_dir: Its work dir.
        config: Its config file.
        options: ``--cfg-options`` of ``tools/train.py``.
        metrics: Names of the metrics of its last evaluation to keep.
        pretrained: Work dir of the classifier that it starts from, or None.
    """

    work_dir: Path
    config: Path
    options: tuple[str, ...]
    metrics: tuple[str, ...]
    pretrained: Path | None = None

    @property
    def settings(self) -> dict:
        """What the result depends on."""
        return dict(config=self.config.name, options=list(self.options),
                    pretrained=self.pretrained is not None)

    def result(self) -> dict[str, float]:
        """Metrics of the finished run; trains it if it is not finished.

        Raises:
            UserError: If the training fails, or the work dir holds a run of other settings.
        """
        finished = self.work_dir / 'finished.json'
        if finished.is_file():
            content = json.loads(finished.read_text(encoding='utf-8'))
            if content['settings'] != self.settings:
                raise UserError(f'{self.work_dir} holds a run of other settings: '
                                f'{content["settings"]}; remove it or choose another --out')
            print(f'{self.work_dir}: finished already', flush=True)
            return content['metrics']
        if self.work_dir.exists():
            shutil.rmtree(self.work_dir)
        print(f'{self.work_dir}: training', flush=True)
        command = [sys.executable, str(REPO / 'tools/train.py'), str(self.config), '--work-dir',
                   str(self.work_dir)]
        if self.pretrained is not None:
            command += ['--pretrained', str(last_checkpoint(self.pretrained))]
        run_tool([*command, '--cfg-options', *self.options], self.work_dir.with_suffix('.log'))
        metrics = last_metrics(self.work_dir, self.metrics)
        content = json.dumps(dict(settings=self.settings, metrics=metrics), indent=2)
        finished.write_text(content + '\n', encoding='utf-8')
        return metrics


def run_tool(command: Sequence[str], log: Path) -> None:
    """Runs a tool from the root of the repository, where the configs look for their data.

    Args:
        command: The command line.
        log: File that takes what it prints.

    Raises:
        UserError: If it fails, with the last line that it printed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('w', encoding='utf-8') as file:
        status = subprocess.run(command, cwd=REPO, stdout=file, stderr=subprocess.STDOUT,
                                check=False).returncode
    if status:
        lines = log.read_text(encoding='utf-8').split('\n')
        last = next((line for line in reversed(lines) if line.strip()), 'no output')
        raise UserError(f'{Path(command[1]).name} failed with status {status}, see {log}: {last}')


def last_checkpoint(work_dir: Path) -> Path:
    """The checkpoint that a finished training left."""
    name = Path((work_dir / 'last_checkpoint').read_text(encoding='utf-8').strip()).name
    return work_dir / name


def last_metrics(work_dir: Path, names: Sequence[str]) -> dict[str, float]:
    """The last value of each metric in the log of a training.

    Args:
        work_dir: Its work dir, with one training in it.
        names: Names as in the log.

    Raises:
        UserError: If the log has no value of one of them.
    """
    found: dict[str, float] = {}
    for file in sorted(work_dir.glob('*/vis_data/scalars.json')):
        for line in file.read_text(encoding='utf-8').splitlines():
            values = json.loads(line)
            found.update((name, values[name]) for name in names if name in values)
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(f'the log of {work_dir} has no {", ".join(missing)}')
    return found


def measure(out: Path, seed: int, control: bool, classifier_options: Sequence[str],
            detector_options: Sequence[str]) -> list[dict]:
    """Runs everything of one seed.

    Args:
        out: Folder of all runs.
        seed: Seed of the three trainings.
        control: Whether they run without the attention branch.
        classifier_options: Further ``--cfg-options`` of the classifier.
        detector_options: Further ``--cfg-options`` of both detectors.

    Returns:
        A row of the table for each start, AP in percent.
    """
    folder = out / f'seed{seed}'
    classifier_config, detector_config = (
        REPO / f'configs/demo/{name}{CONTROL if control else ""}.py'
        for name in (CLASSIFIER, DETECTOR))
    classifier = Run(folder / 'classifier', classifier_config,
                     (f'randomness.seed={seed}', *classifier_options), ('accuracy/top1', ))
    accuracy = classifier.result()['accuracy/top1']
    rows = []
    for start in STARTS:
        metrics = Run(
            folder / start, detector_config, (f'randomness.seed={seed}', *detector_options),
            tuple(METRICS.values()),
            classifier.work_dir if start == 'pretrained' else None).result()
        rows.append({'seed': seed, 'start': start,
                     **{name: 100 * metrics[key] for name, key in METRICS.items()},
                     'classifier top-1': accuracy})
    return rows


def markdown_table(rows: Sequence[dict]) -> str:
    """Mean and sample standard deviation over the seeds, and the gain of each seed.

    Args:
        rows: Of :func:`measure`, for all seeds.
    """
    lines = ['| start | ' + ' | '.join(METRICS) + ' |', '| --- |' + ' --- |' * len(METRICS)]
    values = {(start, name): [row[name] for row in rows if row['start'] == start]
              for start in STARTS for name in METRICS}
    for start in STARTS:
        cells = [spread(values[start, name]) for name in METRICS]
        lines.append(f'| {start} | ' + ' | '.join(cells) + ' |')
    gains = [spread([after - before for before, after in zip(
        values['scratch', name], values['pretrained', name], strict=True)]) for name in METRICS]
    lines.append('| gain, seed by seed | ' + ' | '.join(gains) + ' |')
    seeds = sorted({row['seed'] for row in rows})
    return '\n'.join(lines) + f'\n\nSeeds {", ".join(map(str, seeds))}.\n'


def spread(values: Sequence[float]) -> str:
    """``mean ± standard deviation``, or the value where there is one only."""
    text = f'{statistics.mean(values):.1f}'
    return f'{text} ± {statistics.stdev(values):.1f}' if len(values) > 1 else text


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description='Compare the shapes detector from scratch and from a pretrained classifier.')
    parser.add_argument('--out', type=Path, metavar='DIR',
                        help='folder of all runs and of the table (default: '
                             f'work_dirs/pretraining_table, with {CONTROL} for the control)')
    parser.add_argument('--no-attention', action='store_true',
                        help='the control: all trainings with the attention branch set to zero')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2],
                        help='seeds of the trainings (default: 0 1 2)')
    parser.add_argument('--classifier-options', nargs='+', default=[], metavar='KEY=VALUE',
                        help='--cfg-options of the classifier')
    parser.add_argument('--detector-options', nargs='+', default=[], metavar='KEY=VALUE',
                        help='--cfg-options of the detectors')
    return parser


@exits_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status, 0 or 2 (a training failed or was refused).
    """
    args = build_parser().parse_args(argv)
    default = f'work_dirs/pretraining_table{CONTROL if args.no_attention else ""}'
    out = (args.out or Path(default)).resolve()
    for tool in ('make_shapes_dataset', 'make_shape_classes'):
        run_tool([sys.executable, str(REPO / f'tools/{tool}.py')], out / f'{tool}.log')
    rows = [row for seed in dict.fromkeys(args.seeds)
            for row in measure(out, seed, args.no_attention, args.classifier_options,
                               args.detector_options)]
    with (out / 'runs.csv').open('w', encoding='utf-8', newline='') as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table = markdown_table(rows)
    (out / 'table.md').write_text(table, encoding='utf-8')
    print(table, end='')
    return 0


if __name__ == '__main__':
    sys.exit(main())
