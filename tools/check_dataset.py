"""Prints what is worth knowing of COCO-format data before training as a table.

Exit status: 0, 1 where ``tools/train.py --data`` would refuse the data, 2 where the file cannot
be examined at all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cli import UserError, exits_on_user_error
from coco_file import read_structure
from dataset_findings import DataFinding, findings_of

_EFFECTS = {'refused': 'stops tools/train.py --data', 'left out': 'mmdet trains without it',
            'note': 'is trained on'}


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description='Look for faults in COCO-format data: the annotations, and every image.')
    parser.add_argument('ann', metavar='ANN', help='COCO instance annotation file')
    parser.add_argument('--img-prefix', metavar='DIR', default='.',
                        help='folder of the images (default: the current one)')
    parser.add_argument('--masks', action='store_true',
                        help='the data is for a model that trains masks')
    parser.add_argument('--evaluated', action='store_true',
                        help='the data is evaluated on, as --val-ann is')
    parser.add_argument('--no-decode', action='store_true',
                        help='look at the headers of the images only: faster')
    parser.add_argument('--examples', type=int, default=3, metavar='N',
                        help='examples that are shown of each kind (default: 3)')
    return parser


def as_table(findings: Iterable[DataFinding], examples: int) -> list[str]:
    """A line for each kind, the gravest first, with indented examples below.

    Args:
        findings: In any order.
        examples: How many of each kind are shown.
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        kinds.setdefault((finding.effect, finding.kind), []).append(finding.detail)
    lines = [f'{"effect":<8}  {"count":>7}  finding']
    for effect, meaning in _EFFECTS.items():
        for (_, kind), details in (item for item in kinds.items() if item[0][0] == effect):
            lines.append(f'{effect:<8}  {len(details):>7}  {kind}')
            lines += [f'{"":<19}- {detail}' for detail in details[:examples]]
            if examples and len(details) > examples:
                lines.append(f'{"":<19}- ... and {len(details) - examples} more')
        if any(key[0] == effect for key in kinds):
            lines.append(f'{"":<8}  {"":>7}  ({effect}: {meaning})')
    return lines if kinds else ['nothing to report']


@exits_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.examples < 0:
        parser.error(f'argument --examples: must be 0 or more, got {args.examples}')
    path, image_dir = (Path(os.path.abspath(name)) for name in (args.ann, args.img_prefix))
    content = read_structure(path, is_evaluated=args.evaluated)
    if not image_dir.is_dir():
        raise UserError(f'image folder {image_dir} does not exist')
    print(f'{path}: {len(content["images"])} images, {len(content["annotations"])} annotations, '
          f'{len(content["categories"])} categories', flush=True)
    findings = list(findings_of(content, path, image_dir, needs_masks=args.masks,
                                decodes=not args.no_decode))
    print('\n'.join(as_table(findings, args.examples)))
    return int(any(finding.effect == 'refused' for finding in findings))


if __name__ == '__main__':
    sys.exit(main())
