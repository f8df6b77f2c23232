"""Everything that is worth a word in an annotation file and its images, not only the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coco_file import AnnotationChecks, CocoImage
from image_headers import has_deep_pixels, image_fault, is_decodable

Effect = Literal['refused', 'left out', 'note']

# Beyond it mmdet's usual scale of 1333 px leaves less than a row.
_LARGEST_ASPECT = 1333


@dataclass(frozen=True)
class DataFinding:
    """One thing about one entry.

    Args:
        effect: ``'refused'``: ``tools/train.py --data`` stops; ``'left out'``: mmdet trains
            without it; ``'note'``: it is trained on, and may not be meant so.
        kind: What it is, the same text for all of its kind.
        detail: Which entry, and what is the matter with it.
    """

    effect: Effect
    kind: str
    detail: str


def findings_of(content: dict, path: Path, image_dir: Path, *, needs_masks: bool,
                decodes: bool) -> Iterator[DataFinding]:
    """All findings of an annotation file, annotations first.

    Args:
        content: What :func:`coco_file.read_structure` gave.
        path: The file, for messages.
        image_dir: Folder below which its images lie.
        needs_masks: Whether masks are to be trained.
        decodes: Whether every image is decoded, not only looked at.
    """
    yield from _of_annotations(content, needs_masks)
    yield from _of_categories(content)
    yield from _of_images(content, path, image_dir, decodes)


def _of_annotations(content: dict, needs_masks: bool) -> Iterator[DataFinding]:
    checks = AnnotationChecks.of(content, needs_masks)
    if not content['annotations']:
        yield DataFinding('note', 'no annotations', 'nothing to train on; a validation set of '
                          'negatives gives an AP of -1')
    seen: dict[tuple, int | str] = {}
    for ann in content['annotations']:
        if fault := checks.fault(ann):
            yield DataFinding('refused', 'malformed annotation', fault)
            continue
        who = f'annotation {ann["id"]}'
        if needs_masks and not ann.get('segmentation'):
            yield DataFinding('refused', 'annotation without segmentation', who)
        if fault := checks.reason_to_drop(ann):
            yield DataFinding('left out', 'annotation that mmdet drops', f'{who}: {fault}')
            continue
        if ann.get('iscrowd'):
            yield DataFinding('left out', 'crowd region', who)
            continue
        x, y, width, height = ann['bbox']
        image = checks.images[ann['image_id']]
        # Half a pixel is a matter of rounding.
        if x < -.5 or y < -.5 or x + width - .5 > image['width'] \
                or y + height - .5 > image['height']:
            yield DataFinding('note', 'box that reaches beyond the image',
                              f'{who}: bbox {ann["bbox"]!r} in {image["width"]} x '
                              f'{image["height"]} pixels')
        key = (ann['image_id'], ann['category_id'], *ann['bbox'])
        if key in seen:
            yield DataFinding('note', 'object annotated twice', f'{who} repeats {seen[key]}')
        seen.setdefault(key, ann['id'])


def _of_categories(content: dict) -> Iterator[DataFinding]:
    used = Counter(ann['category_id'] for ann in content['annotations'])
    for category in content['categories']:
        name = category['name']
        if not used[category['id']]:
            yield DataFinding('note', 'category without an annotation', repr(name))
        if name != name.strip() or not name:
            yield DataFinding('note', 'category name with outer blanks', repr(name))


def _of_images(content: dict, path: Path, image_dir: Path, decodes: bool
               ) -> Iterator[DataFinding]:
    annotated = {ann['image_id'] for ann in content['annotations']}
    names: dict[str, int | str] = {}
    for entry in content['images']:
        name = entry['file_name']
        who = f'image {entry["id"]}, {name}'
        if name in names:
            yield DataFinding('note', 'file of several images',
                              f'{name}: images {names[name]} and {entry["id"]}')
        names.setdefault(name, entry['id'])
        if entry['id'] not in annotated:
            yield DataFinding('left out', 'image without an object '
                              '(kept with filter_cfg.filter_empty_gt=False)', who)
        sides = entry['width'], entry['height']
        if min(sides) <= 0 or max(sides) > _LARGEST_ASPECT * min(sides):
            yield DataFinding('note', 'image too narrow to be resized', f'{who}: {sides[0]} x '
                              f'{sides[1]}')
        yield from _of_file(entry, path, image_dir, who, decodes)


def _of_file(entry: dict, path: Path, image_dir: Path, who: str, decodes: bool
             ) -> Iterator[DataFinding]:
    file = image_dir / entry['file_name']
    if not file.is_file():
        yield DataFinding('refused', 'image that does not exist', f'{who}: no {file}')
        return
    image = CocoImage(entry['id'], entry['file_name'], entry['width'], entry['height'], True,
                      True)
    if fault := image_fault(image, image_dir, path, obeys_exif=True):
        yield DataFinding('refused', 'image that cannot be read or has another size', fault)
    elif decodes and not is_decodable(file):
        yield DataFinding('refused', 'image that cannot be decoded', who)
    elif has_deep_pixels(file):
        yield DataFinding('note', 'image of 16 bits, of which the upper 8 are read', who)
