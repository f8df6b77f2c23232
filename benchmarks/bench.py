"""Tests the ops, times everything against its peers on the CPU, draws: ``make bench``.

::

    python benchmarks/bench.py --out work_dirs/bench

Writes JSON and a table for every part, PNG plots, and ``bench.md`` with all tables.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from parts import ROOT, run_contract_tests

PARTS = {'cpu_ops': 'Operators', 'backbones': 'Backbones', 'memory': 'Memory',
         'scaling': 'Scaling', 'sequence_length': 'Sequence length'}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description='Time the ops and the backbone against their peers on a CPU.')
    parser.add_argument('--out', type=Path, default=ROOT / 'work_dirs' / 'bench',
                        metavar='FOLDER', help='folder to write to (default: work_dirs/bench)')
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=list(PARTS), metavar='PART',
                        help=f'only these of {", ".join(PARTS)}')
    parser.add_argument('--quick', action='store_true', help='only the smallest sizes')
    return parser


def gather(folder: Path) -> str:
    """The tables of all parts that are there."""
    texts = [f'## {title}\n\n{file.read_text(encoding="utf-8")}' for part, title in PARTS.items()
             if (file := folder / f'{part}.md').exists()]
    return '\n'.join(texts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts one after another; 1 where one fails."""
    options = build_parser().parse_args(arguments)
    # A part runs in the repository's folder.
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = out / 'contract_tests.xml'
    print('contract tests of the ops', flush=True)
    run_contract_tests(results)
    failed = []
    for part in options.parts:
        print(f'{part}', flush=True)
        command = [sys.executable, str(ROOT / 'benchmarks' / f'{part}.py'), '--out',
                   str(out / f'{part}.json'), '--tests', str(results)]
        if subprocess.run([*command, *(['--quick'] if options.quick else [])], cwd=ROOT,
                          check=False).returncode:
            failed.append(part)
    subprocess.run([sys.executable, str(ROOT / 'benchmarks' / 'plots.py'), str(out)], cwd=ROOT,
                   check=False)
    (out / 'bench.md').write_text(gather(out), encoding='utf-8')
    print(f'{out / "bench.md"} written')
    if failed:
        print(f'failed: {", ".join(failed)}', file=sys.stderr)
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
