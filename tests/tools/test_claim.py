"""``tools/analysis/claim.py``: the files that every command behind docs/claims leaves."""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib import pyplot as plt

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def claim(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool('analysis/claim')


def example(claim: ModuleType, seen: list[argparse.Namespace]):
    def measure(options: argparse.Namespace):
        seen.append(options)
        figure, axes = plt.subplots()
        axes.plot([0, 1])
        return claim.Finding([{'x': 1, 'y': torch.rand(()).item()}], figure, 'It holds.\n')

    return claim.Claim('example', 'Numbers are random.', measure)


def test_figure_numbers_and_text_are_written(claim: ModuleType, tmp_path: Path) -> None:
    seen = []
    out = tmp_path / 'new' / 'folder'
    assert example(claim, seen).run(['--out', str(out), '--fast']) == 0
    assert seen[0].fast and seen[0].seed == 0
    assert (out / 'example.png').read_bytes().startswith(b'\x89PNG')
    with (out / 'example.csv').open(encoding='utf-8', newline='') as file:
        assert [set(row) for row in csv.DictReader(file)] == [{'x', 'y'}]
    title, _, text, _, origin = (out / 'example.md').read_text(encoding='utf-8').splitlines()
    assert (title, text) == ('# Numbers are random.', 'It holds.')
    assert '--fast' in origin and 'commit' in origin
    assert not plt.get_fignums()


def test_the_seed_gives_the_numbers(claim: ModuleType, tmp_path: Path) -> None:
    def numbers(seed: str) -> str:
        example(claim, []).run(['--out', str(tmp_path), '--seed', seed])
        return (tmp_path / 'example.csv').read_text(encoding='utf-8')

    assert numbers('3') == numbers('3') != numbers('4')


@pytest.mark.parametrize('seed', ['-1', '4294967296', 'one'])
def test_a_wrong_seed_is_refused(claim: ModuleType, tmp_path: Path, seed: str,
                                 capsys: pytest.CaptureFixture) -> None:
    seen = []
    with pytest.raises(SystemExit):
        example(claim, seen).run(['--out', str(tmp_path), f'--seed={seed}'])
    assert seed in capsys.readouterr().err and not seen


def test_a_file_as_folder_is_refused_before_the_work(claim: ModuleType, tmp_path: Path,
                                                     capsys: pytest.CaptureFixture) -> None:
    (tmp_path / 'file').write_text('kept')
    seen = []
    assert example(claim, seen).run(['--out', str(tmp_path / 'file')]) == 2
    assert str(tmp_path / 'file') in capsys.readouterr().err and not seen


def test_make_claims_runs_every_command() -> None:
    """``tools/claims.sh`` and the folder name the same commands."""
    script = (REPO / 'tools/claims.sh').read_text(encoding='utf-8')
    listed = re.search(r'commands=\(([^)]*)\)', script).group(1).split()
    commands = [file.stem for file in (REPO / 'tools/analysis').glob('*.py')
                if re.search(r'^CLAIM = ', file.read_text(encoding='utf-8'), re.MULTILINE)]
    assert sorted(listed) == sorted(commands)
