"""Image classification data in ImageNet's layout: one folder of images a class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cli import UserError, walk_dicts
from mmengine.config import Config

# Data sets of mmpretrain that number their labels by the names of folders.
_KINDS = ('CustomDataset', 'ImageNet', 'ImageNet21k')


def dataset_kind(dataset: dict) -> str:
    """Class name of a data set, without its scope."""
    return getattr(dataset['type'], '__name__', dataset['type']).split('.')[-1]


def image_folder(dataset: dict) -> str | None:
    """The folder below which a data set looks for images, without its ``data_root``.

    Args:
        dataset: Settings of a data set.

    Returns:
        The folder, or None for a data set of another kind.
    """
    if dataset_kind(dataset) not in _KINDS:
        return None
    prefix = dataset.get('data_prefix') or ''
    if isinstance(prefix, dict):
        prefix = prefix.get('img_path') or ''
    return prefix or dataset.get('split') or ''


def class_folders(dataset: dict) -> tuple[str, ...] | None:
    """Names of the folders of the classes, in label order.

    Args:
        dataset: Settings of a data set, whose images must be present.

    Returns:
        The names, or None where something else than folders on this machine gives the labels.
    """
    folder = image_folder(dataset)
    split = dataset.get('split')
    root = dataset.get('data_root') or ''
    if (folder is None or dataset.get('ann_file') or not dataset.get('with_label', True)
            or split == 'test' or (split and Path(root, 'meta', f'{split}.txt').is_file())
            or not Path(root, folder).is_dir()):
        return None
    with os.scandir(Path(root, folder)) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir()))


def check_class_folders(cfg: Config, splits: Sequence[str]) -> None:
    """Refuses folders of classes that differ between the splits or from the head.

    mmpretrain numbers labels by the folders that it finds, so a folder that one split lacks
    moves all labels behind it.

    Args:
        cfg: The config, with all options applied; its data must be present.
        splits: Of ``'train'``, ``'val'``, ``'test'``: those that will be used.

    Raises:
        UserError: With the folder.
    """
    first: tuple[str, tuple[str, ...]] | None = None
    for split in splits:
        loader = cfg.get(f'{split}_dataloader') or {}
        for _, node in walk_dicts(loader.get('dataset')):
            names = class_folders(node) if 'type' in node and 'dataset' not in node else None
            if names is None:
                continue
            folder = os.path.join(node.get('data_root') or '', image_folder(node))
            if not names:
                raise UserError(f'{folder} has no folders; it must hold one folder of images for '
                                'each class')
            if first is None:
                first = folder, names
            elif names != first[1]:
                odd = sorted(set(names) ^ set(first[1]))[0]
                has, lacks = (folder, first[0]) if odd in names else (first[0], folder)
                raise UserError(f'the classes differ: {has} has a folder {odd}, {lacks} has none; '
                                'mmpretrain numbers labels by the folders of each')
            for path, head in walk_dicts(cfg.model.get('head'), 'model.head'):
                if head.get('num_classes', len(names)) != len(names):
                    raise UserError(f'{path}.num_classes is {head["num_classes"]}, but {folder} '
                                    f'has {len(names)} folders of classes')
