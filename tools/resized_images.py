"""Finds images that the first resizing of a data pipeline would leave without rows or columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import mmcv
from cli import UserError, walk_dicts
from coco_file import read_coco_file
from mmengine.config import Config

_RESIZES = ('Resize', 'RandomResize', 'RandomChoiceResize')


def check_resized_sizes(cfg: Config, splits: Sequence[str]) -> None:
    """Refuses images so narrow that OpenCV would stop at them, some time in the run.

    Args:
        cfg: The config, with all options applied; its data sets are COCO files that exist.
        splits: Of ``'train'``, ``'val'``, ``'test'``: those that will be used.

    Raises:
        UserError: With the first such image, its size and what it would become.
    """
    for split in splits:
        for _, dataset in walk_dicts(cfg[f'{split}_dataloader'].dataset):
            if 'ann_file' in dataset:
                _check(dataset, split)


def _check(dataset: Mapping, split: str) -> None:
    scales = [scale for step in first_resizes(dataset.get('pipeline') or ())
              for scale in smallest_scales(step)]
    if not scales:
        return
    rules = dataset.get('filter_cfg') if split == 'train' else None
    least = (rules or {}).get('min_size', 0)
    path = Path(dataset.get('data_root') or '', dataset['ann_file'])
    for image in read_coco_file(path, needs_masks=False, is_evaluated=False).images:
        size = image.width, image.height
        if min(size) < least:
            continue
        for scale in scales:
            new = mmcv.rescale_size(size, scale)
            if min(new) < 1:
                raise UserError(
                    f'image {image.id}, {image.file_name} of {path} is {size[0]} x {size[1]} '
                    f'pixels (width x height), which {split}_dataloader resizes to {new[0]} x '
                    f'{new[1]}, within {scale}: leave it out, cut it or set a larger scale')


def first_resizes(pipeline: Sequence[Mapping]) -> Iterator[Mapping]:
    """The first steps of a pipeline that resize the whole image, one for each of its branches."""
    for step in pipeline:
        if _kind(step) in _RESIZES:
            yield step
            return
        branches = step.get('transforms') or ()
        branches = [branches] if isinstance(branches, Mapping) else branches
        found = [resize for branch in branches
                 for resize in first_resizes([branch] if isinstance(branch, Mapping) else branch)]
        if found or 'Crop' in _kind(step):
            yield from found
            return


def smallest_scales(step: Mapping) -> list[tuple[int, int]]:
    """The scales of a step, of a range its lowest; none where it does not keep the ratio."""
    if not step.get('keep_ratio'):
        return []
    scales = step.get('scales') or step.get('scale') or ()
    if isinstance(scales, int):
        scales = (scales, scales)
    if scales and isinstance(scales[0], int):
        scales = [scales]
    if _kind(step) != 'RandomResize':
        return [tuple(scale) for scale in scales]
    if len(scales) == 2:
        return [tuple(map(min, *scales))]
    ratio = step['ratio_range'][0]
    return [tuple(int(side * ratio) for side in scale) for scale in scales]


def _kind(step: Mapping) -> str:
    return getattr(step['type'], '__name__', step['type']).split('.')[-1]
