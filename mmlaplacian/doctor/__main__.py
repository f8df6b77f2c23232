"""``python -m mmlaplacian.doctor [--json]``; exit status 1 where something is wrong."""

import argparse
import sys
from collections.abc import Sequence

from . import hardware, implementations, packages, self_test
from .finding import Finding
from .report import as_json, as_text


def examine() -> list[Finding]:
    """All findings, in the order of the report."""
    return [*packages.check_base(), *packages.check_openmmlab(),
            *hardware.check_gpu(), *hardware.check_cupy(), *hardware.check_compiler(),
            *implementations.check_backend(), *implementations.check_choice(),
            *self_test.check_ops()]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        0, or 1 where something is wrong.
    """
    parser = argparse.ArgumentParser(
        prog='python -m mmlaplacian.doctor',
        description='Says what is installed, what each op will run and why, and what to mend.')
    parser.add_argument('--json', action='store_true', help='print JSON instead of text')
    args = parser.parse_args(argv)
    findings = examine()
    sys.stdout.write(as_json(findings) if args.json else as_text(findings))
    return int(any(finding.status == 'wrong' for finding in findings))


if __name__ == '__main__':
    sys.exit(main())
