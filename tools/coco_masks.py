"""Checks COCO segmentations, which pycocotools would read out of bounds or refuse in training."""

from __future__ import annotations

import math

# In sides of the image. pycocotools walks every edge in steps of a fifth of a pixel: far corners
# take all memory, and those beyond 32-bit integers end the process.
_FARTHEST = 10


def segmentation_fault(segmentation: object, height: float, width: float) -> str | None:
    """What is wrong with a segmentation, or None.

    Args:
        segmentation: A list of polygons, or a run-length encoding.
        height: Height of its image in pixels.
        width: Width of its image in pixels.
    """
    if isinstance(segmentation, list):
        for number, polygon in enumerate(segmentation):
            if not _is_polygon(polygon):
                return (f'polygon {number} is {_shortened(polygon)} instead of a list of 6 or '
                        'more finite numbers x1, y1, x2, y2, x3, y3, ...')
            if max(max(polygon), -min(polygon)) > _FARTHEST * max(height, width):
                return (f'polygon {number} is {_shortened(polygon)}, which reaches more than '
                        f'{_FARTHEST} times the sides of its image of {width} x {height} pixels')
        return None
    if not isinstance(segmentation, dict):
        return (f'it is {_shortened(segmentation)} instead of a list of polygons or a '
                "run-length encoding with 'size' and 'counts'")
    if segmentation.get('size') != [height, width]:
        return (f'the size of its run-length encoding is {segmentation.get("size")!r} instead of '
                f'[height, width] of the image, {[height, width]}')
    counts = segmentation.get('counts')
    try:
        runs = _decoded(counts) if isinstance(counts, str) else counts
    except ValueError as error:
        return f'the counts {_shortened(counts)} of its run-length encoding {error}'
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs):
        return (f'the counts {_shortened(counts)} of its run-length encoding are neither a list '
                'of lengths of 0 or more pixels nor such a list in the compressed form')
    if sum(runs) != height * width:
        return (f'its run-length encoding covers {sum(runs)} pixels, but the image has '
                f'{height * width}')
    return None


def _is_polygon(polygon: object) -> bool:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        return False
    try:
        # One NaN or infinity makes the sum one; COCO has too many numbers for a Python loop.
        return math.isfinite(sum(polygon))
    except (TypeError, OverflowError):
        return False


def _decoded(counts: str) -> list[int]:
    """Run lengths of a compressed encoding: signed groups of 5 bits, least significant first.

    Raises:
        ValueError: If it has other characters than ``0`` to ``o``, or ends inside a number.
    """
    runs: list[int] = []
    value = shift = 0
    for character in counts:
        group = ord(character) - 48
        if not 0 <= group < 64:
            raise ValueError(f'have the character {character!r}, which no encoder writes')
        value |= (group & 31) << shift
        shift += 5
        if not group & 32:
            if group & 16:
                value -= 1 << shift
            # From the fourth on, the difference to the run before the last is stored.
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    if shift:
        raise ValueError('end inside a number')
    return runs


def _shortened(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f'{text[:limit]}...'
