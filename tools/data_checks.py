"""Checks of the configured data before a model is built: files, class names, num_classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from class_folders import class_folders, dataset_kind, image_folder
from cli import UserError, walk_dicts
from coco_file import category_names, load_json
from mmengine.config import Config
from mmengine.fileio import list_from_file

# Reading COCO's 450 MB of training annotations once more would cost 10 s at every start.
_MAX_BYTES_TO_READ = 100 * 2**20


def check_data_present(cfg: Config, splits: Sequence[str]) -> None:
    """Refuses to start when annotation files or image folders are missing.

    Args:
        cfg: The config, with all options applied.
        splits: Of ``'train'``, ``'val'``, ``'test'``: those that will be used.

    Raises:
        UserError: With every missing path and where the data goes.
    """
    missing: dict[str, None] = {}
    for split in splits:
        for dataset in _datasets(cfg, split):
            if _is_remote(dataset):
                continue
            names = [dataset.get('ann_file') or None, _image_dir(dataset)]
            paths = [_joined(dataset, name) for name in names if name is not None]
            missing.update((path, None) for path in paths if not _present(path))
        for _, node in walk_dicts(cfg.get(f'{split}_evaluator')):
            path = node.get('ann_file')
            if path and not _is_remote(node) and not _present(path):
                missing[path] = None
    if not missing:
        return
    listed = ', '.join(missing)
    raise UserError(f'the data of this config is missing in {Path.cwd()}: {listed}\n'
                    f'{_where_data_goes(list(missing))}')


def check_class_names(cfg: Config, splits: Sequence[str]) -> None:
    """Refuses class names that mmdet would drop, renumber or outnumber without a word.

    mmdet numbers labels by the order of the annotation file's categories and drops names that
    the file does not have.

    Args:
        cfg: The config, with all options applied; its data must be present.
        splits: Of ``'train'``, ``'val'``, ``'test'``: those that will be used.

    Raises:
        UserError: With the name and the names available.
    """
    read: dict[Path, tuple[str, ...]] = {}
    for split in splits:
        for dataset in _datasets(cfg, split):
            if not _is_coco(dataset) or _is_remote(dataset):
                continue
            path = Path(_joined(dataset, dataset['ann_file']))
            classes = _class_names(dataset, split)
            if path.is_file() and path.stat().st_size <= _MAX_BYTES_TO_READ:
                if path not in read:
                    read[path] = category_names(load_json(path), path)
                _compare_names(classes, read[path], path, split)
            _compare_heads(cfg, classes, split)


def class_names(cfg: Config, split: str) -> tuple[str, ...]:
    """Class names of the first data set of a split, or () if it has none that are known."""
    for dataset in _datasets(cfg, split):
        if _is_coco(dataset) or (dataset.get('metainfo') or {}).get('classes') is not None:
            return _class_names(dataset, split)
        # ImageNet's folders have other names than its classes.
        return (class_folders(dataset) if dataset_kind(dataset) == 'CustomDataset' else None) or ()
    return ()


def _where_data_goes(missing: list[str]) -> str:
    if any('shapes' in Path(path).parts for path in missing):
        return ('Make it: python tools/make_shapes_dataset.py, or run `make demo`, which makes '
                'it, trains and draws.')
    if any('shape_classes' in Path(path).parts for path in missing):
        return 'Make it: python tools/make_shape_classes.py'
    if any('imagenet' in part for path in missing for part in Path(path).parts):
        return ('ImageNet-1k (https://image-net.org) goes to data/imagenet, as '
                'data/imagenet/train/CLASS/ and data/imagenet/val/CLASS/; a symbolic link will '
                'do, and so will your own images in that layout.')
    own = ('To train on your own COCO-format data add --data ROOT --train-ann A.json --val-ann '
           'B.json. `make demo` needs no data at all.')
    if any('coco' in part for path in missing for part in Path(path).parts):
        return ('COCO 2017 (https://cocodataset.org/#download) goes to data/coco, as '
                'data/coco/annotations/, data/coco/train2017/ and data/coco/val2017/; a '
                f'symbolic link will do. {own}')
    return own


def _datasets(cfg: Config, split: str) -> Iterator[dict]:
    loader = cfg.get(f'{split}_dataloader')
    if loader:
        for _, node in walk_dicts(loader.dataset):
            if node.get('ann_file') or ('type' in node and image_folder(node) is not None):
                yield node


def _is_coco(dataset: dict) -> bool:
    return dataset_kind(dataset) == 'CocoDataset'


def _image_dir(dataset: dict) -> str | None:
    folder = image_folder(dataset)
    if folder is not None:
        return folder
    prefix = dataset.get('data_prefix')
    return prefix.get('img') if isinstance(prefix, dict) else None


def _joined(dataset: dict, path: str) -> str:
    # os.path.join drops the root before an absolute path, as mmengine does.
    return os.path.join(dataset.get('data_root') or '', path)


def _present(path: str) -> bool:
    return '://' in path or os.path.exists(path)


def _is_remote(node: dict) -> bool:
    backend = (node.get('backend_args') or {}).get('backend', 'local')
    return backend != 'local' or '://' in str(node.get('data_root'))


def _class_names(dataset: dict, split: str) -> tuple[str, ...]:
    classes = (dataset.get('metainfo') or {}).get('classes')
    if classes is None:
        from mmdet.datasets import CocoDataset  # costs seconds, needed only here
        return tuple(CocoDataset.METAINFO['classes'])
    if isinstance(classes, str):
        if os.path.isfile(classes):
            return tuple(list_from_file(classes))
        raise UserError(f'metainfo.classes of {split}_dataloader is the text {classes!r}; for '
                        f'one class write a tuple with a comma: ({classes!r}, )')
    return tuple(classes)


def _compare_names(classes: tuple[str, ...], available: tuple[str, ...], path: Path,
                   split: str) -> None:
    unknown = [name for name in classes if name not in available]
    listed = ', '.join(available)
    if unknown:
        raise UserError(
            f'{len(unknown)} of {len(classes)} classes of {split}_dataloader are no category of '
            f'{path}, e.g. {unknown[0]!r}; the categories of the file are: {listed}; write '
            'them into metainfo.classes or use --data, which reads them')
    in_file_order = tuple(name for name in available if name in classes)
    if classes != in_file_order:
        raise UserError(
            f'the classes of {split}_dataloader are not in the order of {path}, by which mmdet '
            f'numbers labels; write metainfo.classes as {", ".join(in_file_order)}')


def _compare_heads(cfg: Config, classes: tuple[str, ...], split: str) -> None:
    for path, node in walk_dicts(cfg.model, 'model'):
        is_head = {'bbox_head', 'mask_head'} & set(path.split('.'))
        if is_head and node.get('num_classes', len(classes)) != len(classes):
            raise UserError(f'{path}.num_classes is {node["num_classes"]}, but {split}_dataloader '
                            f'has {len(classes)} classes')
