"""What the commands behind docs/claims share: their options and the files they leave.

A command measures one claim of the paper and writes::

    OUT/NAME.png    the figure
    OUT/NAME.csv    every number in it
    OUT/NAME.md     what was found, with date, commit and machine
"""

from __future__ import annotations

import argparse
import csv
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch

REPO = Path(__file__).resolve().parents[2]
for _folder in ('tools', 'benchmarks'):
    if str(REPO / _folder) not in sys.path:
        sys.path.append(str(REPO / _folder))

from cli import UserError, exits_on_user_error  # noqa: E402  the folders are set above
from report import environment  # noqa: E402

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402  after the choice of a backend without a display
from matplotlib.figure import Figure  # noqa: E402


@dataclass(frozen=True)
class Finding:
    """What a command measured.

    Args:
        rows: Lines of the CSV file; the first row's keys are its header.
        figure: Picture of the rows.
        text: One paragraph in Markdown that says what the figures show, written from them.
    """

    rows: Sequence[Mapping[str, object]]
    figure: Figure
    text: str


@dataclass(frozen=True)
class Claim:
    """A command.

    Args:
        name: Stem of its files.
        statement: The claim in one sentence.
        measure: Takes the parsed options.
        add_arguments: Adds the command's own options to ``--out``, ``--fast`` and ``--seed``.
    """

    name: str
    statement: str
    measure: Callable[[argparse.Namespace], Finding]
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None

    def parser(self) -> argparse.ArgumentParser:
        """The command line."""
        parser = argparse.ArgumentParser(description=self.statement)
        parser.add_argument('--out', type=Path, default=Path('work_dirs/claims'), metavar='DIR',
                            help='folder of the files (default: work_dirs/claims)')
        parser.add_argument('--fast', action='store_true',
                            help='smallest sizes, in seconds: shows that the command works')
        parser.add_argument('--seed', type=_seed, default=0, metavar='N',
                            help='seed of all random numbers (default: 0)')
        if self.add_arguments is not None:
            self.add_arguments(parser)
        return parser

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Measures and writes.

        Args:
            argv: Arguments; None for those of the process.

        Returns:
            Exit status, 0 or 2 (bad input, in one sentence).
        """
        return exits_on_user_error(self._measure_and_write)(argv)

    def _measure_and_write(self, argv: Sequence[str] | None) -> int:
        given = list(sys.argv[1:] if argv is None else argv)
        options = self.parser().parse_args(given)
        if options.out.exists() and not options.out.is_dir():
            raise UserError(f'--out must be a folder, got the file {options.out}')
        options.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(options.seed)
        finding = self.measure(options)
        self._write(finding, options.out, f'{Path(sys.argv[0]).name} {shlex.join(given)}'.strip())
        return 0

    def _write(self, finding: Finding, out: Path, command: str) -> None:
        with (out / f'{self.name}.csv').open('w', encoding='utf-8', newline='') as file:
            writer = csv.DictWriter(file, fieldnames=list(finding.rows[0]))
            writer.writeheader()
            writer.writerows(finding.rows)
        finding.figure.tight_layout()
        finding.figure.savefig(out / f'{self.name}.png', dpi=110)
        plt.close(finding.figure)
        where = environment(torch.device('cpu'), REPO)
        commit, _, modified = str(where['commit']).partition(',')
        text = (f'# {self.statement}\n\n{finding.text.strip()}\n\n'
                f'`{command}`, {where["date"][:10]}, commit {commit[:7]}{modified}, '
                f'{where["processor"]}, {where["threads"]} threads, torch {where["torch"]}.\n')
        (out / f'{self.name}.md').write_text(text, encoding='utf-8')
        print(f'\n{finding.text.strip()}\n{out}/{self.name}.png, .csv and .md written')


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f'must be from 0 to 4294967295, got {value}')
    return value
