"""Own COCO-format data in one line: the ``--data`` flags and what they change in a config."""

from __future__ import annotations

import argparse
import colorsys
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from cli import UserError, walk_dicts, world_size
from coco_file import CocoFile, read_coco_file
from image_headers import check_image_sizes
from mmengine.config import Config


@dataclass(frozen=True)
class OwnData:
    """The files named by the ``--data`` flags, as absolute paths.

    Args:
        root: ``--data``.
        train_ann: ``--train-ann``; None if only testing.
        val_ann: ``--val-ann``.
        image_dir: Folder below which the training images lie.
        val_image_dir: Folder below which those of ``val_ann`` lie.
    """

    root: Path
    train_ann: Path | None
    val_ann: Path
    image_dir: Path
    val_image_dir: Path


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the own-data flags."""
    group = parser.add_argument_group(
        'own data', 'Train or test on COCO-format data without a config of its own: classes, '
        'num_classes, paths and evaluators follow from the annotation files. --cfg-options are '
        'applied after these flags and win over them.')
    group.add_argument('--data', metavar='ROOT', help='folder of the data set')
    group.add_argument('--train-ann', metavar='JSON',
                       help='training annotations, absolute or relative to ROOT')
    group.add_argument('--val-ann', metavar='JSON',
                       help='validation and test annotations, absolute or relative to ROOT; the '
                            'same categories in the same order')
    group.add_argument('--img-prefix', metavar='DIR',
                       help='folder of the images, absolute or relative to ROOT (default: ROOT)')
    group.add_argument('--val-img-prefix', metavar='DIR',
                       help='folder of the images of --val-ann, where it is another one '
                            '(default: that of --img-prefix)')


def parse_own_data(parser: argparse.ArgumentParser, args: argparse.Namespace, *,
                   needs_train: bool) -> OwnData | None:
    """Collects the own-data flags, or None where none was given.

    Args:
        parser: Reports flags that do not go together.
        args: Parsed arguments.
        needs_train: Whether ``--train-ann`` is required beside ``--data``.
    """

    def given(flag: str) -> bool:
        return getattr(args, flag[2:].replace('-', '_')) is not None

    if args.data is None:
        for flag in ('--train-ann', '--val-ann', '--img-prefix', '--val-img-prefix'):
            if given(flag):
                parser.error(f'{flag} needs --data ROOT')
        return None
    required = ('--train-ann', '--val-ann') if needs_train else ('--val-ann', )
    missing = [flag for flag in required if not given(flag)]
    if missing:
        parser.error(f'--data needs {" and ".join(missing)}')
    # Absolute, so that the config dumped in the work dir works from anywhere.
    root = Path(os.path.abspath(args.data))
    image_dir = root / (args.img_prefix or '')
    return OwnData(
        root=root,
        train_ann=None if args.train_ann is None else root / args.train_ann,
        val_ann=root / args.val_ann,
        image_dir=image_dir,
        val_image_dir=root / args.val_img_prefix if given('--val-img-prefix') else image_dir)


def apply_own_data(cfg: Config, data: OwnData) -> list[str]:
    """Points every data set, evaluator and head of ``cfg`` to ``data``.

    Returns:
        One line for the user if annotations are left out of training, else nothing.

    Raises:
        UserError: If the files or the config do not fit; ``cfg`` is unchanged then.
    """
    if not data.root.is_dir():
        raise UserError(f'--data {data.root} is not a folder')
    for flag, folder in (('--img-prefix', data.image_dir),
                         ('--val-img-prefix', data.val_image_dir)):
        if not folder.is_dir():
            raise UserError(f'image folder {folder} does not exist; {flag} is relative to '
                            f'--data {data.root}')
    masks = _trains_masks(cfg)
    val = read_coco_file(data.val_ann, needs_masks=masks, is_evaluated=True)
    train = None
    if data.train_ann is not None:
        train = (val if data.train_ann == data.val_ann else
                 read_coco_file(data.train_ann, needs_masks=masks, is_evaluated=False))
        if train.class_names != val.class_names:
            raise UserError(
                f'the categories differ: {train.path} lists {", ".join(train.class_names)}; '
                f'{val.path} lists {", ".join(val.class_names)}; both must list the same names '
                'in the same order, because mmdet numbers labels by the order in the file')
        _require_objects(train)
    training = [('train', train, data.image_dir)] if train else []
    testing = [(split, val, data.val_image_dir) for split in ('val', 'test')]
    same = train is val and data.image_dir == data.val_image_dir
    for split, file, folder in (training if same else training + testing[1:]):
        _require_images(file, folder, '--img-prefix' if split == 'train' else
                        '--img-prefix or, for these images alone, --val-img-prefix')
        check_image_sizes(file, folder, obeys_exif=_obeys_exif(cfg, split))

    datasets = [(dataset, file, folder) for split, file, folder in testing + training
                for dataset in _own_datasets(cfg, split)]
    heads = [node for path, node in walk_dicts(cfg.model)
             # A region proposal head knows one class, object, whatever the data.
             if 'num_classes' in node and 'rpn_head' not in path.split('.')]
    if not heads:
        raise UserError('--data found no num_classes in the model of the config to set to '
                        f'{len(val.class_names)}')

    for dataset, file, folder in datasets:
        dataset['data_root'] = str(data.root)
        dataset['ann_file'] = str(file.path)
        dataset['data_prefix'] = dict(img=str(folder))
        dataset['metainfo'] = dict(
            classes=val.class_names, palette=_palette(len(val.class_names)))
    for split in ('val', 'test'):
        for _, node in walk_dicts(cfg.get(f'{split}_evaluator')):
            if 'ann_file' in node:
                node['ann_file'] = str(val.path)
    for node in heads:
        node['num_classes'] = len(val.class_names)
    if train is None or not train.num_dropped:
        return []
    return [f'{train.num_dropped} of {train.num_annotations} annotations of {train.path} are left '
            f'out of training by mmdet, first {train.first_unused}']


def shorten_warm_up(cfg: Config, images: int, chosen: Collection[str] = ()) -> list[str]:
    """Shortens iteration-based warm-up to at most one epoch.

    Call it when batch size and launcher are final.

    Args:
        cfg: Changed in place.
        images: Number of training images.
        chosen: Keys of ``--cfg-options``: an end that the user chose stays.

    Returns:
        One line for the user for each warm-up that is longer than an epoch.
    """
    changes = []
    loader = cfg.train_dataloader
    processes = world_size(cfg.get('launcher', 'none'))
    batch = loader.get('batch_size') or 1
    per_process = math.ceil(images / processes)
    iters = (per_process // batch if loader.get('drop_last') else math.ceil(per_process / batch))
    # LinearLR arrives one iteration before its end and never moves if it ends after one.
    limit = max(iters, 2)
    schedulers = cfg.get('param_scheduler') or []
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    for index, warm_up in enumerate(schedulers):
        end = warm_up.get('end')
        if (warm_up.get('type') != 'LinearLR' or warm_up.get('by_epoch', True)
                or warm_up.get('begin', 0) != 0 or end is None or end <= limit):
            continue
        epoch = (f'an epoch of this data is {iters} iteration{"s" if iters > 1 else ""} '
                 f'({images} images, batch size {batch}, {processes} '
                 f'process{"es" if processes > 1 else ""})')
        if {'param_scheduler', f'param_scheduler.{index}',
                f'param_scheduler.{index}.end'} & set(chosen):
            changes.append(f'warm-up left at the {end} iterations of --cfg-options, although '
                           f'{epoch}')
            continue
        warm_up['end'] = limit
        for follower in schedulers:
            if follower.get('begin') == end and not follower.get('by_epoch', True):
                follower['begin'] = limit
        changes.append(f'warm-up shortened from {end} to {limit} iterations: {epoch}')
    return changes


def num_training_images(cfg: Config) -> int:
    """Images of an epoch that pass the filter of the (own) training data set.

    Raises:
        UserError: If no image passes.
    """
    dataset = _own_datasets(cfg, 'train')[0]
    rules = dataset.get('filter_cfg') or {}
    # --cfg-options may have replaced the path by one relative to the root.
    path = Path(dataset.get('data_root') or '', dataset['ann_file'])
    file = read_coco_file(path, needs_masks=False, is_evaluated=False)
    count = file.num_training_images(
        rules.get('filter_empty_gt', False), rules.get('min_size', 0))
    if count == 0:
        raise UserError(f'no image of {file.path} passes the filter of the training data set: '
                        f'{dict(rules)}')
    for _, node in walk_dicts(cfg.train_dataloader.dataset):
        if node.get('type') == 'RepeatDataset':
            count *= node['times']
    return count


def _trains_masks(cfg: Config) -> bool:
    return any(node.get('mask_head') for _, node in walk_dicts(cfg.model))


def _require_objects(train: CocoFile) -> None:
    if not any(image.has_annotation for image in train.images):
        raise UserError(f'annotation file {train.path} has no image with annotations')
    if not any(image.has_object for image in train.images):
        raise UserError(f'mmdet trains on none of the {train.num_annotations} annotations of '
                        f'{train.path}, first {train.first_unused}')


def _obeys_exif(cfg: Config, split: str) -> bool:
    """Whether the pipeline of a split turns images by their EXIF orientation, the default."""
    loader = cfg.get(f'{split}_dataloader') or {}
    colors = [str(node.get('color_type')) for _, node in walk_dicts(loader.get('dataset'))]
    return not any(
        color == 'unchanged' or color.endswith('ignore_orientation') for color in colors)


def _require_images(file: CocoFile, image_dir: Path, flag: str) -> None:
    missing = [image for image in file.images if not (image_dir / image.file_name).is_file()]
    if missing:
        first = missing[0]
        raise UserError(f'{len(missing)} of {len(file.images)} images of {file.path} do not '
                        f'exist, e.g. image {first.id}, {image_dir / first.file_name}; set '
                        f'{flag} to the folder that the file names in the annotation file start '
                        'from')


def _own_datasets(cfg: Config, split: str) -> list[dict]:
    """The innermost data set dicts of a split, below any wrapper."""
    loader = cfg.get(f'{split}_dataloader')
    if not loader:
        return []
    found = [node for _, node in walk_dicts(loader.dataset) if 'ann_file' in node]
    kinds = [getattr(node['type'], '__name__', node['type']).split('.')[-1] for node in found]
    if kinds != ['CocoDataset']:
        raise UserError(f'--data needs one CocoDataset in {split}_dataloader of the config, '
                        f'which has {", ".join(kinds) or "none"}')
    return found


def _palette(num_colors: int) -> list[tuple[int, int, int]]:
    """Well-separated RGB colours: the hue moves by the golden ratio."""
    colors = []
    for index in range(num_colors):
        rgb = colorsys.hsv_to_rgb(index * 0.618034 % 1, 0.75, 0.95)
        colors.append(tuple(round(255 * channel) for channel in rgb))
    return colors
