"""tools/demo.sh with a stand-in for Python: its steps, what it skips and how it goes on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Writes down each call and leaves the files that the tool of this name leaves.
FAKE_PYTHON = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >>calls
[[ $1 != "$(cat fail)" ]] || exit 7
case $1 in
  tools/make_shapes_dataset.py)
    mkdir -p data/shapes/{train,val}
    touch data/shapes/val/{01,02,03,04,05,06,07,08,09,10}.png ;;
  tools/train.py)
    mkdir -p work_dirs/demo/now
    touch work_dirs/demo/now/now.log work_dirs/demo/epoch_2.pth
    echo "$PWD/work_dirs/demo/epoch_2.pth" >work_dirs/demo/last_checkpoint ;;
  tools/test.py)
    mkdir -p work_dirs/demo/evaluation/later
    touch work_dirs/demo/evaluation/later/later.{log,json} ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    clone = tmp_path / 'a clone'
    (clone / '.venv' / 'bin').mkdir(parents=True)
    (clone / 'tools').mkdir()
    shutil.copy(ROOT / 'tools' / 'demo.sh', clone / 'tools')
    python = clone / '.venv' / 'bin' / 'python'
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    (clone / 'fail').touch()
    return clone


def run_demo(clone: Path) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Returns the result and the words of each call of Python."""
    (clone / 'calls').write_text('')
    result = subprocess.run(['bash', clone / 'tools' / 'demo.sh'], cwd=clone.parent,
                            capture_output=True, text=True, check=False, timeout=60)
    return result, [line.split() for line in (clone / 'calls').read_text().splitlines()]


def test_it_makes_data_trains_evaluates_and_draws(clone: Path) -> None:
    result, (data, train, test, draw) = run_demo(clone)
    assert result.returncode == 0, result.stderr
    config, work_dir = 'configs/demo/mask_rcnn_laplacian_shapes.py', 'work_dirs/demo'
    checkpoint = f'{work_dir}/epoch_2.pth'
    assert data == ['tools/make_shapes_dataset.py', '--out', 'data/shapes']
    assert train == ['tools/train.py', config, '--work-dir', work_dir]
    assert test == ['tools/test.py', config, checkpoint, '--work-dir', f'{work_dir}/evaluation']
    assert draw == ['tools/image_demo.py', *(f'data/shapes/val/{i:02}.png' for i in range(1, 9)),
                    config, checkpoint, '--score-thr', '0.5', '--out-dir',
                    f'{work_dir}/pictures']
    end = result.stdout.splitlines()[-4:]
    assert [line.split() for line in end] == [
        ['checkpoint', checkpoint], ['log', f'{work_dir}/now/now.log'],
        ['metrics', f'{work_dir}/evaluation/later/later.json'],
        ['pictures', f'{work_dir}/pictures/']]


def test_finished_steps_are_skipped(clone: Path) -> None:
    first, _ = run_demo(clone)
    second, calls = run_demo(clone)
    assert second.returncode == 0, second.stderr
    # The tool for the data skips a complete set itself.
    assert [call[0] for call in calls] == ['tools/make_shapes_dataset.py']
    assert second.stdout.count('already done') == 3
    assert second.stdout.splitlines()[-4:] == first.stdout.splitlines()[-4:]


@pytest.mark.parametrize(('failing', 'repeated'), [
    ('tools/make_shapes_dataset.py', 4), ('tools/train.py', 4), ('tools/test.py', 3),
    ('tools/image_demo.py', 2)])
def test_a_failure_stops_it_and_is_tried_again(clone: Path, failing: str, repeated: int) -> None:
    (clone / 'fail').write_text(failing)
    result, calls = run_demo(clone)
    assert result.returncode == 7
    assert calls[-1][0] == failing
    (clone / 'fail').write_text('')
    result, calls = run_demo(clone)
    assert result.returncode == 0, result.stderr
    assert len(calls) == repeated


def test_interrupted_training_resumes(clone: Path) -> None:
    (clone / 'fail').write_text('tools/train.py')
    run_demo(clone)
    (clone / 'work_dirs' / 'demo' / 'last_checkpoint').write_text('elsewhere/epoch_1.pth')
    (clone / 'fail').write_text('')
    _, calls = run_demo(clone)
    assert calls[1][-1] == '--resume'
