"""Reads a COCO instance annotation file and refuses what would fail later in training."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cli import UserError
from coco_masks import segmentation_fault

_ID = (int, str)
_NUMBER = (int, float)
_LARGEST = 2**53


@dataclass(frozen=True)
class CocoImage:
    """One image of an annotation file.

    Args:
        id: As the file says.
        file_name: Path below the image folder.
        width: In pixels, as the file says.
        height: In pixels, as the file says.
        has_annotation: Whether any annotation belongs to it, which decides over the filter of
            ``mmdet.CocoDataset``.
        has_object: Whether any annotation is an object to train on: neither dropped nor a crowd
            region.
    """

    id: int | str
    file_name: str
    width: float
    height: float
    has_annotation: bool
    has_object: bool


@dataclass(frozen=True)
class CocoFile:
    """What the tools need to know of an annotation file.

    Args:
        path: The file.
        class_names: Category names in the order of the file, which is the
            order in which ``mmdet.CocoDataset`` numbers its labels.
        images: All images.
        num_annotations: Number of annotations.
        num_dropped: How many of them ``mmdet.CocoDataset`` drops.
        first_unused: Id and fault of the first annotation that is dropped or a crowd region;
            empty if there is none.
    """

    path: Path
    class_names: tuple[str, ...]
    images: tuple[CocoImage, ...]
    num_annotations: int
    num_dropped: int
    first_unused: str

    def num_training_images(self, filter_empty_gt: bool, min_size: float) -> int:
        """Number of images that pass ``mmdet.CocoDataset``'s ``filter_cfg``."""
        return sum(1 for image in self.images
                   if min(image.width, image.height) >= min_size
                   and (image.has_annotation or not filter_empty_gt))


def load_json(path: Path) -> dict:
    """Loads a JSON file whose top level is an object.

    Raises:
        UserError: If the file is missing, no text, no JSON or no object.
    """
    try:
        with path.open(encoding='utf-8') as stream:
            content = json.load(stream)
    except FileNotFoundError as error:
        raise UserError(f'annotation file {path} does not exist') from error
    except OSError as error:
        raise UserError(f'annotation file {path} cannot be read: {error.strerror}') from error
    except UnicodeDecodeError as error:
        raise UserError(f'annotation file {path} is not UTF-8 text: {error.reason} at byte '
                        f'{error.start}') from error
    except json.JSONDecodeError as error:
        if 'BOM' in error.msg:
            # Reading it here would only move the failure to pycocotools.
            raise UserError(f'annotation file {path} starts with a byte order mark (BOM), which '
                            'pycocotools does not read; save it as UTF-8 without BOM') from error
        raise UserError(f'annotation file {path} is not valid JSON: {error.msg} at line '
                        f'{error.lineno}, column {error.colno}') from error
    if not isinstance(content, dict):
        raise UserError(f'annotation file {path} must hold a JSON object with images, '
                        f'annotations and categories, not a {type(content).__name__}')
    return content


def category_names(content: dict, path: Path) -> tuple[str, ...]:
    """Category names in the order of the file.

    Args:
        content: The loaded file.
        path: Its path, for messages.

    Raises:
        UserError: If categories are missing, malformed or not unique.
    """
    categories = _entries(content, 'categories', dict(id=_ID, name=str), path)
    if not categories:
        raise UserError(f'annotation file {path} lists no categories')
    names = [category['name'] for category in categories]
    _refuse_repeated(names, 'category name', path)
    _refuse_repeated([category['id'] for category in categories], 'category id', path)
    return tuple(names)


def read_structure(path: Path, *, is_evaluated: bool) -> dict:
    """Reads an annotation file whose sections, fields and ids are right.

    Args:
        path: COCO instance annotation file.
        is_evaluated: Whether pycocotools evaluates on it, which needs ``iscrowd``.

    Raises:
        UserError: With the file and the reason.
    """
    content = load_json(path)
    category_names(content, path)
    images = _entries(
        content, 'images', dict(id=_ID, file_name=str, height=_NUMBER, width=_NUMBER), path)
    fields = dict(id=_ID, image_id=_ID, category_id=_ID, bbox=list, area=_NUMBER)
    if is_evaluated:
        fields['iscrowd'] = (int, bool)
    annotations = _entries(content, 'annotations', fields, path)
    if not images:
        raise UserError(f'annotation file {path} lists no images')
    _refuse_repeated([image['id'] for image in images], 'image id', path)
    _refuse_repeated([ann['id'] for ann in annotations], 'annotation id', path)
    return content


def read_coco_file(path: Path, *, needs_masks: bool, is_evaluated: bool) -> CocoFile:
    """Reads and checks an annotation file.

    Args:
        path: COCO instance annotation file.
        needs_masks: Whether every annotation must have a segmentation.
        is_evaluated: Whether pycocotools evaluates on it, which needs ``iscrowd``.

    Raises:
        UserError: With the file and the reason, if mmdet could not train or evaluate on it.
    """
    content = read_structure(path, is_evaluated=is_evaluated)
    names = tuple(category['name'] for category in content['categories'])
    images, annotations = content['images'], content['annotations']
    checks = AnnotationChecks.of(content, needs_masks)
    annotated: set = set()
    with_object: set = set()
    maskless = []
    num_dropped = 0
    first_unused = ''
    for ann in annotations:
        if fault := checks.fault(ann):
            raise UserError(f'annotation file {path}: {fault}')
        if not ann.get('segmentation'):
            maskless.append(ann['id'])
        annotated.add(ann['image_id'])
        fault = checks.reason_to_drop(ann)
        num_dropped += fault is not None
        if fault is None and not ann.get('iscrowd'):
            with_object.add(ann['image_id'])
        elif not first_unused:
            first_unused = f'annotation {ann["id"]}: {fault or "it is a crowd region (iscrowd)"}'
    if needs_masks and maskless:
        raise UserError(
            f'annotation file {path}: {len(maskless)} of {len(annotations)} annotations have no '
            f'segmentation (first: annotation {maskless[0]}), but this model trains masks; use '
            'a box detector such as configs/retinanet_laplacian_t.py or add the segmentations')
    return CocoFile(
        path=path,
        class_names=names,
        images=tuple(
            CocoImage(image['id'], image['file_name'], image['width'], image['height'],
                      image['id'] in annotated, image['id'] in with_object) for image in images),
        num_annotations=len(annotations),
        num_dropped=num_dropped,
        first_unused=first_unused)


@dataclass(frozen=True)
class AnnotationChecks:
    """Checks of single annotations whose fields have the right types.

    Args:
        category_ids: In the order of the file.
        images: By id.
        needs_masks: Whether segmentations are read.
    """

    category_ids: dict[int | str, None]
    images: dict[int | str, dict]
    needs_masks: bool

    @classmethod
    def of(cls, content: dict, needs_masks: bool) -> AnnotationChecks:
        """Those of a file whose images and categories have been checked."""
        return cls(dict.fromkeys(category['id'] for category in content['categories']),
                   {image['id']: image for image in content['images']}, needs_masks)

    def fault(self, ann: dict) -> str | None:
        """Why training on the annotation is refused, or None."""
        if ann['category_id'] not in self.category_ids:
            return (f'annotation {ann["id"]} has category_id {ann["category_id"]!r}, but the '
                    f'categories are {_shortened(list(self.category_ids))}')
        if ann['image_id'] not in self.images:
            return (f'annotation {ann["id"]} has image_id {ann["image_id"]!r}, which is not the '
                    'id of any image')
        box = ann['bbox']
        if len(box) != 4 or not all(isinstance(value, _NUMBER) for value in box):
            return (f'annotation {ann["id"]} has bbox {box!r} instead of four numbers x, y, '
                    'width, height')
        # Of NaN neither is true. Larger integers do not fit into a tensor.
        if not all(abs(value) < _LARGEST for value in (*box, ann['area'])):
            return (f'annotation {ann["id"]} has bbox {box!r} and area {ann["area"]!r}, but all '
                    'must be finite and below 2^53 in size')
        if ann.get('iscrowd', 0) not in (0, 1):
            return f'annotation {ann["id"]} has iscrowd {ann["iscrowd"]!r} instead of 0 or 1'
        image = self.images[ann['image_id']]
        if self.needs_masks and ann.get('segmentation') and (fault := segmentation_fault(
                ann['segmentation'], image['height'], image['width'])):
            return f'the segmentation of annotation {ann["id"]} is malformed: {fault}'
        return None

    def reason_to_drop(self, ann: dict) -> str | None:
        """Why ``mmdet.CocoDataset`` drops an annotation without a word, or None."""
        image = self.images[ann['image_id']]
        if ann.get('ignore'):
            return 'it is marked as ignore'
        x, y, width, height = box = ann['bbox']
        if width < 1 or height < 1:
            return (f'its bbox {box!r} is less than a pixel wide or high (bbox is x, y, width, '
                    'height in pixels)')
        if ann['area'] <= 0:
            return f'its area is {ann["area"]!r}'
        if (min(x + width, image['width']) <= max(x, 0)
                or min(y + height, image['height']) <= max(y, 0)):
            return (f'its bbox {box!r} lies outside the image of {image["width"]} x '
                    f'{image["height"]} pixels')
        return None


def _entries(content: dict, section: str, fields: dict[str, type | tuple[type, ...]],
             path: Path) -> list[dict]:
    """The list ``content[section]``, checked to hold dicts with fields of these types."""
    if section not in content:
        raise UserError(f'annotation file {path} has no {section!r}; a COCO instance file has '
                        'images, annotations and categories')
    entries = content[section]
    if not isinstance(entries, list):
        raise UserError(f'annotation file {path}: {section!r} is a {type(entries).__name__}, '
                        'not a list')
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise UserError(f'annotation file {path}: entry {number} of {section!r} is a '
                            f'{type(entry).__name__}, not an object')
        for field, kinds in fields.items():
            if field not in entry:
                raise UserError(f'annotation file {path}: entry {number} of {section!r} has no '
                                f'{field!r}')
            if not isinstance(entry[field], kinds):
                kinds = kinds if isinstance(kinds, tuple) else (kinds, )
                raise UserError(
                    f'annotation file {path}: entry {number} of {section!r} has {field} '
                    f'{entry[field]!r}, not of type {" or ".join(k.__name__ for k in kinds)}')
    return entries


def _refuse_repeated(values: list, what: str, path: Path) -> None:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise UserError(f'annotation file {path}: {what} {repeated[0]!r} occurs more than once')


def _shortened(values: list, limit: int = 20) -> str:
    text = ', '.join(repr(value) for value in values[:limit])
    return f'{text}, ... ({len(values)} in all)' if len(values) > limit else text
