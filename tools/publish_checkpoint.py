"""Makes a checkpoint fit to share: ``python tools/publish_checkpoint.py IN OUT``.

A training checkpoint holds optimizer state, the config with its paths and pickled objects of
MMEngine. What this tool writes loads with ``torch.load(OUT, weights_only=True)``::

    state_dict   tensors on the CPU; the averaged ones of a training with EMAHook
    meta         part: model or backbone; weights: averaged or trained; dataset_meta.classes, the
                 names of the classes, where the training had any and the head is kept
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoints import load_checkpoint
from cli import UserError, exits_on_user_error
from torch import Tensor

from mmlaplacian.models.pretrained import is_averaged, named_tensors, under


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description='Write a checkpoint that holds tensors alone and loads without unpickling '
                    'code. Averaged weights (EMAHook) are taken where there are any.')
    parser.add_argument('checkpoint', metavar='IN', help='checkpoint of a training')
    parser.add_argument('out', metavar='OUT', help='file to write; it must not exist')
    parser.add_argument('--backbone-only', action='store_true',
                        help='leave out neck and heads, and the prefix "backbone."')
    return parser


def published(content: dict, path: str, backbone_only: bool) -> dict:
    """What is written.

    Args:
        content: The loaded checkpoint.
        path: Its path, for messages.
        backbone_only: Whether to keep the tensors below ``backbone.`` alone.

    Raises:
        UserError: If it holds no tensors, or none of a backbone.
    """
    tensors = named_tensors(content)
    # What wraps a model for distribution.
    tensors = under('module.', tensors) or tensors
    if not tensors:
        raise UserError(f'checkpoint {path} holds no tensors, neither by themselves nor under '
                        'state_dict or model')
    if backbone_only:
        tensors = under('backbone.', tensors)
        if not tensors:
            raise UserError(f'checkpoint {path} has no tensor whose name starts with backbone.; '
                            'leave out --backbone-only if it holds a backbone alone')
    meta: dict = dict(part='backbone' if backbone_only else 'model',
                      weights='averaged' if is_averaged(content) else 'trained')
    classes = ((content.get('meta') or {}).get('dataset_meta') or {}).get('classes')
    if classes and not backbone_only:
        meta['dataset_meta'] = dict(classes=tuple(map(str, classes)))
    return dict(state_dict={name: _bare(value) for name, value in tensors.items()}, meta=meta)


def _bare(value: Tensor) -> Tensor:
    # A clone: a view would be saved with all that it is a view of.
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


@exits_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status, 0 or 2 (the input was refused; nothing was written).
    """
    args = build_parser().parse_args(argv)
    out = Path(args.out)
    if out.exists():
        raise UserError(f'{out} exists already: remove it or choose another name')
    if not out.parent.is_dir():
        raise UserError(f'folder {out.parent} does not exist')
    content = published(load_checkpoint(args.checkpoint), args.checkpoint, args.backbone_only)
    partial = out.with_name(f'.{out.name}.partial')
    try:
        torch.save(content, partial)
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        os.replace(partial, out)
    except (OSError, RuntimeError) as error:
        raise UserError(f'{out} cannot be written: {error}') from error
    finally:
        partial.unlink(missing_ok=True)
    kind = 'averaged weights (EMA)' if content['meta']['weights'] == 'averaged' else 'weights'
    print(f'{out}: {len(content["state_dict"])} tensors of the {content["meta"]["part"]}, {kind}, '
          f'sha256 {digest}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
