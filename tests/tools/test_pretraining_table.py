"""``tools/analysis/pretraining_table.py``, with trainings replaced by what they leave behind."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

SEEDS = (0, 1, 2)


@pytest.fixture(scope='module')
def tool(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool('analysis/pretraining_table')


class Trainer:
    """Stands for ``run_tool``: writes the log and the checkpoint of a training.

    Attributes:
        started: Work dirs of the trainings, in order.
        box_ap: What each detector reaches, by work dir as ``seed0/scratch``.
        fails: A work dir whose training is interrupted.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.box_ap: dict[str, float] = {}
        self.fails = ''

    def __call__(self, command: Sequence[str], log: Path) -> None:
        if 'train.py' not in command[1]:
            return
        work_dir = Path(command[command.index('--work-dir') + 1])
        name = '/'.join(work_dir.parts[-2:])
        self.started.append(name)
        assert not work_dir.exists()
        scalars = work_dir / '20260101_000000' / 'vis_data' / 'scalars.json'
        scalars.parent.mkdir(parents=True)
        options = command[command.index('--cfg-options') + 1:]
        seed = int(options[0].removeprefix('randomness.seed='))
        assert work_dir.parent.name == f'seed{seed}'
        assert ('--pretrained' in command) == (work_dir.name == 'pretrained')
        if name == self.fails:
            raise KeyboardInterrupt
        if work_dir.name == 'classifier':
            values = [{'loss': 1.1}, {'accuracy/top1': 40.0}, {'accuracy/top1': 90.0 + seed}]
            (work_dir / 'last_checkpoint').write_text('/elsewhere/epoch_10.pth')
        else:
            self.box_ap[name] = 0.2 + 0.01 * len(self.box_ap) ** 2
            values = [{'coco/bbox_mAP': self.box_ap[name], 'coco/segm_mAP': 0.1}]
        if work_dir.name == 'pretrained':
            checkpoint = command[command.index('--pretrained') + 1]
            assert checkpoint == str(work_dir.parent / 'classifier' / 'epoch_10.pth')
        scalars.write_text('\n'.join(map(json.dumps, values)))


@pytest.fixture
def trainer(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(tool, 'run_tool', trainer)
    return trainer


def test_mean_and_spread(tool, trainer, tmp_path, capsys):
    assert tool.main(['--out', str(tmp_path)]) == 0
    assert trainer.started == [f'seed{seed}/{run}' for seed in SEEDS
                               for run in ('classifier', 'scratch', 'pretrained')]
    with (tmp_path / 'runs.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    for row in rows:
        assert float(row['box AP']) == pytest.approx(
            100 * trainer.box_ap[f'seed{row["seed"]}/{row["start"]}'])
        assert float(row['classifier top-1']) == 90 + int(row['seed'])
    table = (tmp_path / 'table.md').read_text()
    assert table in capsys.readouterr().out
    by_start = {start: [100 * trainer.box_ap[f'seed{seed}/{start}'] for seed in SEEDS]
                for start in ('scratch', 'pretrained')}
    by_start['gain, seed by seed'] = [after - before for before, after in zip(
        by_start['scratch'], by_start['pretrained'], strict=True)]
    for start, values in by_start.items():
        cell = f'{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}'
        assert f'| {start} | {cell} |' in table
    assert '| scratch |' in table and '10.0 ± 0.0 |' in table


def test_one_seed_has_no_spread(tool, trainer, tmp_path):
    assert tool.main(['--out', str(tmp_path), '--seeds', '7', '7']) == 0
    assert trainer.started == ['seed7/classifier', 'seed7/scratch', 'seed7/pretrained']
    table = (tmp_path / 'table.md').read_text()
    assert '±' not in table and 'Seeds 7.' in table


def test_finished_runs_are_kept_and_an_interrupted_one_starts_again(tool, trainer, tmp_path):
    trainer.fails = 'seed1/scratch'
    with pytest.raises(KeyboardInterrupt):
        tool.main(['--out', str(tmp_path)])
    assert trainer.started[-1] == 'seed1/scratch' and not (tmp_path / 'table.md').exists()
    trainer.fails = ''
    trainer.started.clear()
    assert tool.main(['--out', str(tmp_path)]) == 0
    assert trainer.started == ['seed1/scratch', 'seed1/pretrained',
                               *(f'seed2/{run}' for run in ('classifier', 'scratch',
                                                            'pretrained'))]
    table = (tmp_path / 'table.md').read_bytes()
    trainer.started.clear()
    assert tool.main(['--out', str(tmp_path)]) == 0
    assert trainer.started == [] and (tmp_path / 'table.md').read_bytes() == table


def test_runs_of_other_settings_are_refused(tool, trainer, tmp_path, capsys):
    assert tool.main(['--out', str(tmp_path), '--seeds', '0']) == 0
    assert tool.main(['--out', str(tmp_path), '--seeds', '0', '--detector-options',
                      'train_cfg.max_epochs=1']) == 2
    error = capsys.readouterr().err
    assert f'{tmp_path / "seed0" / "scratch"} holds a run of other settings' in error


def test_a_failed_training_is_named(tool, tmp_path, capsys, monkeypatch):
    real = tool.run_tool

    def no_data(command: Sequence[str], log: Path) -> None:
        if 'train.py' in command[1]:
            real([*command[:2], 'gone.py'], log)

    monkeypatch.setattr(tool, 'run_tool', no_data)
    assert tool.main(['--out', str(tmp_path), '--seeds', '0']) == 2
    error = capsys.readouterr().err
    assert 'train.py failed with status 2, see' in error
    assert 'error: config gone.py does not exist' in error
    assert not (tmp_path / 'runs.csv').exists()


def test_a_log_without_the_metric(tool, tmp_path):
    scalars = tmp_path / 'x' / 'vis_data' / 'scalars.json'
    scalars.parent.mkdir(parents=True)
    scalars.write_text('{"loss": 1.0}\n')
    with pytest.raises(tool.UserError, match='has no coco/bbox_mAP'):
        tool.last_metrics(tmp_path, ('loss', 'coco/bbox_mAP'))
