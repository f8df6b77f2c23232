"""What the parts of ``make bench`` share: command line, contract tests, files to write."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from red_tests import red_tests, refused_ops

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device('cpu')
LEAST_REPEATS = 5
_CONTRACT_TESTS = ('test_kernels.py', 'test_newton_schulz.py', 'test_nystrom_attention.py')


def build_parser(description: str) -> argparse.ArgumentParser:
    """The command line of a part."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('--out', type=Path, required=True, metavar='FILE',
                        help='JSON file to write; the tables go beside it, with suffix .md')
    parser.add_argument('--tests', type=Path, metavar='FILE',
                        help='JUnit file of the contract tests (default: run them first): an op '
                             'with a red test is not timed')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads(), metavar='N',
                        help="threads of torch (default: torch's own number)")
    parser.add_argument('--quick', action='store_true', help='only the smallest sizes')
    return parser


def parse(parser: argparse.ArgumentParser,
          arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, sets the threads, and makes the folder of ``--out`` at once: a
    name that cannot be written shall not cost a run."""
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f'argument --threads: expected at least 1, got {options.threads}')
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'argument --out: cannot make its folder: {error}')
    torch.set_num_threads(options.threads)
    return options


def run_contract_tests(results: Path) -> None:
    """Writes the JUnit file of the ops' contract tests on the CPU, about half a minute."""
    files = [str(ROOT / 'tests' / 'ops' / name) for name in _CONTRACT_TESTS]
    subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m',
                    'not gpu and not soak', f'--junitxml={results}', *files], cwd=ROOT,
                   check=False, stdout=subprocess.DEVNULL)


def refusals(tests: Path | None) -> dict[str, list[str]]:
    """Red tests by op.

    Args:
        tests: JUnit file, or None to run the tests now.

    Raises:
        SystemExit: The file is missing or holds no test that ran.
    """
    try:
        if tests is not None:
            return refused_ops(red_tests(tests))
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / 'results.xml'
            run_contract_tests(results)
            return refused_ops(red_tests(results))
    except (OSError, ValueError, SyntaxError) as error:
        sys.exit(f'the contract tests of the ops must run before anything is timed: {error}.')


def refusal(red: dict[str, list[str]], op: str) -> str | None:
    """Why an op is not timed, or None."""
    return f'refused: {len(red[op])} red tests' if op in red else None


def write(record: dict[str, object], lines: Sequence[str], out: Path) -> None:
    """Writes the JSON file and the tables beside it."""
    out.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')
    out.with_suffix('.md').write_text('\n'.join(lines) + '\n', encoding='utf-8')
    print(f'{out} and {out.with_suffix(".md")} written')
