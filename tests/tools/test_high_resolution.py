"""``tools/analysis/high_resolution.py``: memory of a pass over large images."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ANALYSIS = Path(__file__).resolve().parents[2] / 'tools' / 'analysis'


@pytest.fixture(scope='module')
def resolution(tool: Callable[[str], ModuleType]) -> ModuleType:
    if str(ANALYSIS) not in sys.path:
        sys.path.append(str(ANALYSIS))
    return tool('analysis/high_resolution')


def test_fast_run(resolution: ModuleType, tmp_path: Path,
                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, 'FAST_SIDES', (64, 384))
    assert resolution.CLAIM.run(['--fast', '--out', str(tmp_path)]) == 0
    with (tmp_path / 'high_resolution.csv').open(encoding='utf-8', newline='') as file:
        small, large = csv.DictReader(file)
    assert int(large['tokens_of_stage_1']) == 96 * 96
    # Two of the maps that the MLP of stage 1 makes, eight times as wide as the stage, are alive
    # at once; the process had nothing of that size before.
    assert int(large['pass_bytes']) > 8 * 64 * 96 * 96 * 4
    assert int(small['pass_bytes']) < int(large['pass_bytes'])
    for row in (small, large):
        assert 2**26 < int(row['before_bytes']) <= int(row['peak_bytes'])
        n = int(row['tokens_of_stage_1'])
        assert int(row['softmax_matrix_bytes']) == 2 * n * n * 4
    # Output and little else: no N x M matrix of both heads.
    output = 2 * 32 * 9216 * 4
    assert output <= int(large['attention_bytes']) < output + 2 * 49 * 9216 * 4
    assert 'grace_hopper.jpg' in (tmp_path / 'high_resolution.md').read_text(encoding='utf-8')


@pytest.mark.parametrize(('power', 'verdict'), [(1, 'holds'), (2, 'does not hold here')])
def test_verdict_follows_the_numbers(resolution: ModuleType, power: int, verdict: str) -> None:
    rows = [{'side': side, 'tokens_of_stage_1': 1, 'seconds': 1., 'peak_bytes': side,
             'before_bytes': 1, 'pass_bytes': side**2, 'attention_bytes': side**(2 * power),
             'softmax_matrix_bytes': 1} for side in (64, 128)]
    assert f'**{verdict}**' in resolution.describe(rows, '')


def test_a_failed_pass_says_why(resolution: ModuleType, tmp_path: Path,
                                capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / 'text.jpg'
    text.write_text('no image')
    assert resolution.CLAIM.run(['--fast', '--out', str(tmp_path), '--image', str(text)]) == 2
    assert '--image must be a readable image' in capsys.readouterr().err
    with pytest.raises(resolution.UserError, match='status 1: .*--image must be a readable'):
        resolution.pass_in_new_process(text, 64, 0)
