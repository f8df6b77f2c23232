"""What the parts of ``benchmarks/gpu_check.sh`` share: command line, device, files to write."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from red_tests import red_tests, refused_ops


def build_parser(description: str, seconds: float) -> argparse.ArgumentParser:
    """The command line of a part.

    Args:
        description: What it does.
        seconds: Default of ``--seconds``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('--tests', type=Path, required=True, metavar='FILE',
                        help='JUnit file of the gpu tests: an op with a red test is not timed')
    parser.add_argument('--out', type=Path, required=True, metavar='FILE',
                        help='JSON file to write; the table goes beside it, with suffix .md')
    parser.add_argument('--quick', action='store_true', help='only the smallest sizes')
    parser.add_argument('--seconds', type=float, default=seconds, metavar='S',
                        help=f'start no further case after that time (default: {seconds:g})')
    return parser


def device_and_refusals(program: str, tests: Path) -> tuple[torch.device, dict[str, list[str]]]:
    """The first GPU, and the red tests by op.

    Raises:
        SystemExit: With status 2, where there is no GPU or the file holds no test that ran.
    """
    if not torch.cuda.is_available():
        print(f'{program} needs a CUDA device, but torch {torch.__version__} sees none.',
              file=sys.stderr)
        raise SystemExit(2)
    try:
        return torch.device('cuda', 0), refused_ops(red_tests(tests))
    except (OSError, ValueError, SyntaxError) as error:
        print(f'--tests must name a JUnit file of the gpu tests: {error}.', file=sys.stderr)
        raise SystemExit(2) from None


def write(record: Mapping[str, object], table: str, out: Path) -> None:
    """Writes the JSON file and the table beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')
    out.with_suffix('.md').write_text(table, encoding='utf-8')
    print(f'{out} and {out.with_suffix(".md")} written')
