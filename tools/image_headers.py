"""Compares the headers of image files with the sizes that an annotation file gives."""

from __future__ import annotations

import struct
from pathlib import Path

from cli import UserError
from coco_file import CocoFile
from PIL import Image

# Only headers are read here, so a large image is no danger.
Image.MAX_IMAGE_PIXELS = None

_ORIENTATION = 0x0112
_SWAPS_SIDES = (5, 6, 7, 8)
# OpenCV, which reads the images of mmdet, obeys EXIF in these formats and not in WebP or AVIF;
# Pillow has already turned the size of a TIFF file.
_TURNED_FORMATS = ('JPEG', 'MPO', 'PNG')


def check_image_sizes(file: CocoFile, image_dir: Path, *, obeys_exif: bool = True) -> None:
    """Refuses images that cannot be opened or have another size than the annotations say.

    Args:
        file: The annotation file; its images must exist.
        image_dir: Folder below which they lie.
        obeys_exif: Whether the data pipeline turns the pixels by the EXIF orientation.

    Raises:
        UserError: With the first such image and both sizes.
    """
    for image in file.images:
        path = image_dir / image.file_name
        try:
            with Image.open(path) as header:
                size, turned = header.size, obeys_exif and _swaps_sides(header)
        except (OSError, ValueError) as error:
            raise UserError(f'image {path} of {file.path} cannot be read as an image') from error
        seen = size[::-1] if turned else size
        if seen == (image.width, image.height):
            continue
        reason = (f'; its pixels are stored as {size[0]} x {size[1]} and turned by its EXIF '
                  'orientation, and the annotations must be in the displayed orientation'
                  if turned else '')
        raise UserError(f'image {path} is {seen[0]} x {seen[1]} pixels (width x height), but '
                        f'{file.path} says {image.width} x {image.height}{reason}')


def _swaps_sides(header: Image.Image) -> bool:
    if header.format not in _TURNED_FORMATS or 'exif' not in header.info:
        return False
    try:
        return header.getexif().get(_ORIENTATION) in _SWAPS_SIDES
    except (OSError, SyntaxError, struct.error):
        return False  # OpenCV ignores a broken EXIF block, too
