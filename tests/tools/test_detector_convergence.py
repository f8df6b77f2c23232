"""``tools/analysis/detector_convergence.py``, its trainings replaced by what they leave."""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from torch import nn


@pytest.fixture(scope='module')
def analysis(tool: Callable[[str], ModuleType]) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of ``tools/analysis``, which import each other."""
    folder = str(Path(__file__).resolve().parents[2] / 'tools/analysis')
    sys.path.insert(0, folder)
    yield lambda name: tool(f'analysis/{name}')
    sys.path.remove(folder)


def test_the_class_of_a_region_is_the_colour_of_the_dot_on_its_stripes(analysis, tmp_path,
                                                                       monkeypatch):
    made = analysis('distant_parts_set')
    monkeypatch.setattr(made.distant_parts, 'NOISE', 0.)
    made.write_set(tmp_path / 'set', 3, 2, seed=1)
    for split, count, seed in (('train', 3, 2), ('val', 2, 3)):
        _, cells = made.distant_parts.batch(count, torch.Generator().manual_seed(seed), 64)
        content = json.loads((tmp_path / f'set/annotations/{split}.json').read_text())
        assert [category['name'] for category in content['categories']] == list(made.CLASSES)
        assert len(content['images']) == count and len(content['annotations']) == 16 * count
        for image in content['images']:
            pixels = Image.open(tmp_path / 'set' / split / image['file_name'])
            dots = 0
            for box in content['annotations']:
                if box['image_id'] != image['id']:
                    continue
                x, y, width, height = box['bbox']
                crop = np.asarray(pixels.crop((x, y, x + width, y + height))) / 255
                assert (width, height, crop.shape) == (16, 16, (16, 16, 3))
                assert (cells[image['id'] - 1, y // 8:y // 8 + 2, x // 8:x // 8 + 2] + 1).eq(
                    box['category_id']).all()
                # A region without a dot is grey.
                if np.ptp(crop, -1).max() > .1:
                    dots += 1
                    colour = torch.from_numpy(crop[6:10, 6:10].mean((0, 1)))
                    apart = (made.distant_parts.PALETTE - colour).abs().sum(1)
                    assert apart.argmin() + 1 == box['category_id']
            assert dots == 4


def test_a_complete_set_stays_and_a_broken_one_goes(analysis, tmp_path):
    write = analysis('distant_parts_set').write_set
    (tmp_path / 'set.part/train').mkdir(parents=True)
    (tmp_path / 'set.part/train/000009.png').touch()
    write(tmp_path / 'set', 1, 1, seed=0)
    assert [file.name for file in (tmp_path / 'set/train').iterdir()] == ['000001.png']
    before = (tmp_path / 'set/train/000001.png').stat().st_mtime_ns
    write(tmp_path / 'set', 2, 1, seed=0)
    assert (tmp_path / 'set/train/000001.png').stat().st_mtime_ns == before


def test_the_hook_sets_the_attention(analysis):
    from mmlaplacian.models import LaplacianAttention
    model = nn.Sequential(LaplacianAttention(8, 2))
    runner = SimpleNamespace(model=model, logger=logging.getLogger('test'))
    analysis('attention_hook').SetAttentionHook('softmax').before_run(runner)
    assert type(model[0]).__name__ == 'SoftmaxAttention'


class Trainer:
    """Stands for ``run_tool``: writes the log of a training."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def __call__(self, command, log: Path) -> None:
        work_dir = Path(command[command.index('--work-dir') + 1])
        config = Config.fromfile(command[2], import_custom_modules=False)
        assert config.custom_hooks[0].attention == work_dir.name.split('-')[0]
        assert f'randomness.seed={work_dir.name.split("-")[1]}' in command
        self.started.append(work_dir.name)
        scalars = work_dir / '20260101_000000/vis_data/scalars.json'
        scalars.parent.mkdir(parents=True)
        final = dict(laplacian=.9, gaussian=.5, softmax=.9, none=.1)[config.custom_hooks[0]
                                                                     .attention]
        lines = [dict(loss=3., iter=25), dict(loss=1., iter=50), {'coco/bbox_mAP': .05, 'step': 1},
                 dict(loss=.5, iter=75), dict(loss=.3, iter=100),
                 {'coco/bbox_mAP': final, 'step': 2}]
        scalars.write_text('\n'.join(map(json.dumps, lines)))


def test_the_command_writes_what_was_trained(analysis, tmp_path, monkeypatch):
    module, trainer = analysis('detector_convergence'), Trainer()
    # What the command sets for its trainings goes after the test.
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setenv('PYTHONPATH', '')
    monkeypatch.setattr(module.pretraining_table, 'run_tool', trainer)
    arguments = ['--out', str(tmp_path), '--fast', '--runs', '2', '--jobs', '2']
    assert module.CLAIM.run(arguments) == 0
    assert sorted(trainer.started) == sorted(f'{name}-{seed}' for seed in (0, 1) for name in (
        'laplacian', 'gaussian', 'softmax', 'none'))
    with (tmp_path / 'detector_convergence.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 2 * 2
    seen = [(row['step'], float(row['loss']), float(row['accuracy'])) for row in rows
            if (row['setting'], row['seed']) == ('Gaussian', '1')]
    assert seen == [('50', 2., .05), ('100', .4, .5)]
    text = (tmp_path / 'detector_convergence.md').read_text(encoding='utf-8')
    assert 'final box AP Laplacian 0.900' in text and 'holds here' in text
    trainer.started.clear()
    assert module.CLAIM.run(arguments) == 0 and trainer.started == []


@pytest.mark.parametrize('name', ['runs', 'jobs'])
def test_no_run_and_no_job_are_refused(analysis, tmp_path, name, capsys):
    assert analysis('detector_convergence').CLAIM.run(
        ['--out', str(tmp_path), '--fast', f'--{name}', '0']) == 2
    assert f'--{name}' in capsys.readouterr().err
    assert not (tmp_path / 'detector-fast').exists()
