"""docs/reliability.md: its counts, and a test for every bug report."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PAGE = (REPO / 'docs' / 'reliability.md').read_text(encoding='utf-8')
REPORTS = (1, 2, 4, 6, 8, 9, 11, 13, 14, 16, 18, 20, 21, 22, 23, 25, 26, 27, 28, 30, 31, 32, 33,
           34, 35, 36, 38, 40, 41, 43, 45)
ROWS = re.findall(r'^\| ([^|]+) \| (\d+) \| (`[^|]+`) \|$', PAGE, re.MULTILINE)


def functions_of(path: Path) -> list[str]:
    """Names of the test functions in a file."""
    tree = ast.parse(path.read_text(encoding='utf-8'))
    return [node.name for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith('test_')]


def test_there_are_rows() -> None:
    assert [row[0] for row in ROWS] == ['Doctor', 'Input', 'Data', 'Faults and untrusted files',
                                        'Numbers']


@pytest.mark.parametrize(('what', 'count', 'files'), ROWS, ids=[row[0] for row in ROWS])
def test_a_section_has_as_many_tests_as_it_says(what: str, count: str, files: str) -> None:
    names = [name for path in re.findall(r'`(.+?)`', files) for name in functions_of(REPO / path)]
    assert len(names) >= int(count)


def test_every_report_has_a_test_of_its_name() -> None:
    names = [name for path in (REPO / 'tests').rglob('test_*.py') for name in functions_of(path)]
    found = {int(number) for name in names
             for number in re.findall(r'b(\d\d)_', (re.match(r'test_((b\d\d_)*)', name)[1]))}
    assert found == set(REPORTS)
    assert f'| Bug reports | {len(REPORTS)} |' in PAGE
