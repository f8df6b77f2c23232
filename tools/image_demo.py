"""Draws a detector's predictions: ``python tools/image_demo.py IMAGES... CONFIG CHECKPOINT``."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import cv2
import mmcv
import torch
from building import config_errors_explained, make_folder
from checkpoints import check_checkpoint_fits, load_checkpoint, weights_only
from cli import CfgOptions, UserError, exits_on_user_error, one_line
from config_file import load_config, merge_cfg_options, require_settings

_IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description='Draw boxes, masks, class names and scores of a trained detector.')
    parser.add_argument('images', nargs='+', help='image files, or folders of images')
    parser.add_argument('config', help='config file, e.g. the one dumped in the work dir')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--out-dir', required=True, metavar='DIR',
                        help='where the pictures go, as PNG files')
    parser.add_argument('--score-thr', type=float, default=0.3, metavar='SCORE',
                        help='draw detections above this score, 0 to 1 (default: 0.3)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='where to run, e.g. cpu or cuda:0 (default: a GPU if there is one)')
    parser.add_argument('--cfg-options', nargs='+', action=CfgOptions, metavar='KEY=VALUE',
                        help='change settings of the config')
    return parser


@exits_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status, 0 or 2 (the input was refused before any work, or some images could not be
        predicted).
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if not 0 <= args.score_thr <= 1:
        parser.error(f'argument --score-thr: {args.score_thr} is not between 0 and 1')
    images = _find_images(args.images)
    _require_device(args.device)
    out_dir = Path(args.out_dir)
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f'--out-dir {out_dir} is a file')
    targets = _targets(images, out_dir)
    cfg = load_config(args.config)
    merge_cfg_options(cfg, args.cfg_options)
    require_settings(cfg, args.config, ('model', 'test_dataloader'))
    checkpoint = load_checkpoint(args.checkpoint)
    make_folder(out_dir, '--out-dir')

    from drawing import draw_instances  # slow imports, after the checks
    from mmdet.apis import inference_detector, init_detector
    with config_errors_explained(args.config), weights_only(trusted=False):
        model = init_detector(cfg, args.checkpoint, device=args.device)
    check_checkpoint_fits(checkpoint, model, args.checkpoint)
    classes = model.dataset_meta['classes']

    failed: list[str] = []
    for source, target in targets:
        image = mmcv.imread(str(source), channel_order='rgb')
        try:
            instances = inference_detector(model, str(source)).pred_instances
            kept = instances[instances.scores > args.score_thr]
            picture = draw_instances(image, kept, classes, model.dataset_meta['palette'])
        except (cv2.error, RuntimeError, ValueError) as error:
            # One odd image, such as one of 2 rows, must not cost the pictures of the others.
            failed.append(f'{source} ({one_line(error)})')
            continue
        mmcv.imwrite(picture[..., ::-1], str(target))
        print(f'{source}: {_summary(kept.labels.tolist(), instances.scores, classes)} -> '
              f'{target}', flush=True)
    if failed:
        raise UserError(f'{len(failed)} of {len(targets)} images could not be predicted: '
                        f'{", ".join(failed)}')
    return 0


def _find_images(paths: list[str]) -> list[Path]:
    images: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix.lower() in _IMAGE_SUFFIXES)
            if not found:
                raise UserError(f'folder {path} holds no image ({", ".join(_IMAGE_SUFFIXES)})')
            images.extend(found)
        elif path.is_file():
            images.append(path)
        else:
            raise UserError(f'image {path} does not exist (looked in {Path.cwd()})')
    for path in images:
        # A file that merely has the suffix would fail in the middle of the work.
        if mmcv.imread(str(path)) is None:
            raise UserError(f'image {path} cannot be read as an image')
    return images


def _require_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'--device {device} cannot be used: {reason}') from error


def _targets(images: list[Path], out_dir: Path) -> list[tuple[Path, Path]]:
    """Pairs every image with its picture; equal names are numbered.

    Raises:
        UserError: If a picture would replace one of the images.
    """
    # By inode, so that links and names that differ in case only are seen.
    sources = {_inode(image): image for image in images}
    taken: set[str] = set()
    targets = []
    for image in images:
        numbered = (f'{image.stem}_{number}' for number in itertools.count(2))
        name = next(name for name in itertools.chain((image.stem, ), numbered)
                    if name.casefold() not in taken)
        taken.add(name.casefold())
        target = out_dir / f'{name}.png'
        if target.exists() and (source := sources.get(_inode(target))) is not None:
            raise UserError(f'--out-dir {out_dir}: the picture {target} would replace the image '
                            f'{source}; name another folder')
        targets.append((image, target))
    return targets


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _summary(labels: list[int], all_scores: torch.Tensor, classes: Sequence[str]) -> str:
    if labels:
        counts = Counter(classes[label] for label in labels)
        return ', '.join(f'{count} {name}' for name, count in counts.items())
    best = f'best score {float(all_scores.max()):.2f}' if len(all_scores) else 'no detection'
    return f'nothing above the score threshold ({best})'


if __name__ == '__main__':
    sys.exit(main())
