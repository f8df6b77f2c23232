"""Reads the headers of image files, and of those that end too early the pixels."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import cv2
import numpy as np
from cli import UserError
from coco_file import CocoFile, CocoImage
from PIL import Image

# Only headers are read here, so a large image is no danger.
Image.MAX_IMAGE_PIXELS = None

_ORIENTATION = 0x0112
_SWAPS_SIDES = (5, 6, 7, 8)
# OpenCV, which reads the images of mmdet, obeys EXIF in these formats and not in WebP or AVIF;
# Pillow has already turned the size of a TIFF file.
_TURNED_FORMATS = ('JPEG', 'MPO', 'PNG')
_PNG_DEPTH_AT = 24
# Of 32-bit samples.
_UNREADABLE_MODES = ('I', 'F')
# The end marker of a JPEG file, the last chunk of a PNG file.
_LAST_BYTES = {'JPEG': b'\xff\xd9', 'MPO': b'\xff\xd9', 'PNG': b'\0\0\0\0IEND\xaeB`\x82'}


def check_image_sizes(file: CocoFile, image_dir: Path, *, obeys_exif: bool = True) -> None:
    """Refuses images that cannot be read or have another size than the annotations say.

    Args:
        file: The annotation file; its images must exist.
        image_dir: Folder below which they lie.
        obeys_exif: Whether the data pipeline turns the pixels by the EXIF orientation.

    Raises:
        UserError: With the first such image and the reason.
    """
    for image in file.images:
        if fault := image_fault(image, image_dir, file.path, obeys_exif=obeys_exif):
            raise UserError(fault)


def image_fault(image: CocoImage, image_dir: Path, file: Path, *,
                obeys_exif: bool) -> str | None:
    """Why training on an image is refused, or None.

    Args:
        image: What the annotation file says of it; the image must exist.
        image_dir: Folder below which it lies.
        file: The annotation file, for the message.
        obeys_exif: Whether the data pipeline turns the pixels by the EXIF orientation.
    """
    path = image_dir / image.file_name
    who = f'image {image.id}, {path}'
    try:
        with Image.open(path) as header:
            size, turned = header.size, obeys_exif and _swaps_sides(header)
            kind, mode = header.format, header.mode
    except (OSError, ValueError):
        return f'{who} of {file} cannot be read as an image'
    if kind == 'TIFF' and mode in _UNREADABLE_MODES:
        return (f'{who} of {file} has 32-bit samples, which OpenCV does not read; store it '
                'with 8 or 16 bits')
    if _ends_early(path, kind) and not is_decodable(path):
        return (f'{who} of {file} is truncated: its header says {size[0]} x {size[1]} '
                'pixels, but not all of them are there')
    seen = size[::-1] if turned else size
    if seen == (image.width, image.height):
        return None
    reason = (f'; its pixels are stored as {size[0]} x {size[1]} and turned by its EXIF '
              'orientation, and the annotations must be in the displayed orientation'
              if turned else '')
    return (f'{who} is {seen[0]} x {seen[1]} pixels (width x height), but {file} says '
            f'{image.width} x {image.height}{reason}')


def has_deep_pixels(path: Path) -> bool:
    """Whether a readable image has 16 bits a channel, of which OpenCV gives the upper 8."""
    with Image.open(path) as header:
        if header.format == 'PNG':
            # Pillow reads colours of 16 bits as 8: the depth stands in the first chunk.
            with path.open('rb') as stream:
                return stream.read(_PNG_DEPTH_AT + 1)[_PNG_DEPTH_AT] == 16
        return header.mode.startswith('I;16')


def is_decodable(path: Path) -> bool:
    """Whether OpenCV, which reads the images of mmdet, gives pixels for a file."""
    content = np.fromfile(path, np.uint8)
    try:
        return content.size > 0 and cv2.imdecode(content, cv2.IMREAD_COLOR) is not None
    except cv2.error:
        return False


def _ends_early(path: Path, kind: str | None) -> bool:
    """Whether a file lacks the last bytes of its format; some that have more do, too."""
    end = _LAST_BYTES.get(kind or '', b'')
    with path.open('rb') as stream:
        stream.seek(-min(len(end), path.stat().st_size), os.SEEK_END)
        return stream.read() != end


def _swaps_sides(header: Image.Image) -> bool:
    if header.format not in _TURNED_FORMATS or 'exif' not in header.info:
        return False
    try:
        return header.getexif().get(_ORIENTATION) in _SWAPS_SIDES
    except (OSError, SyntaxError, struct.error):
        return False  # OpenCV ignores a broken EXIF block, too
