"""Draws detected instances so that small pictures stay readable."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
from mmdet.structures.mask import bitmap_to_polygon
from mmdet.visualization.palette import get_palette
from mmengine.structures import InstanceData
from mmengine.visualization import Visualizer

_MIN_LONG_SIDE = 800


def draw_instances(image: np.ndarray, instances: InstanceData, classes: Sequence[str],
                   palette: str | Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Draws boxes, masks (if any), class names and scores.

    An image whose long side is below 800 px is enlarged by a whole number first, because
    labels of a readable size would cover its objects.

    Args:
        image: RGB image ``(H, W, 3)``, uint8.
        instances: ``bboxes`` ``(n, 4)`` in pixels, ``labels``, ``scores`` and
            optionally ``masks`` ``(n, H, W)``.
        classes: Class names by label.
        palette: RGB colours by label, or a palette name of mmdet.

    Returns:
        RGB image of the enlarged size.
    """
    scale = max(1, math.ceil(_MIN_LONG_SIDE / max(image.shape[:2])))
    image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    visualizer = Visualizer()
    visualizer.set_image(image)
    if len(instances) == 0:
        return visualizer.get_image()

    if not isinstance(palette, str) and len(palette) < len(classes):
        palette = 'random'
    colors_by_label = get_palette(palette, len(classes))
    best_last = instances.scores.argsort()
    instances = instances.cpu()[best_last.cpu()]
    labels = instances.labels.tolist()
    colors = [tuple(int(channel) for channel in colors_by_label[label]) for label in labels]
    height, width = image.shape[:2]
    line_width = max(2, round(max(height, width) / 500))
    font_size = max(9, round(max(height, width) / 85))

    if 'masks' in instances:
        masks = np.asarray(instances.masks, dtype=bool)
        masks = masks.repeat(scale, axis=1).repeat(scale, axis=2)
        visualizer.draw_binary_masks(masks, colors=colors, alphas=0.45)
        for mask, color in zip(masks, colors, strict=True):
            outlines, _ = bitmap_to_polygon(mask)
            outlines = [outline.clip(0, (width - 1, height - 1)) for outline in outlines]
            visualizer.draw_polygons(outlines, edge_colors=color, line_widths=line_width)
    boxes = instances.bboxes * scale
    boxes[:, 0::2] = boxes[:, 0::2].clamp(0, width - 1)
    boxes[:, 1::2] = boxes[:, 1::2].clamp(0, height - 1)
    visualizer.draw_bboxes(boxes, edge_colors=colors, line_widths=line_width)
    for box, label, score, color in zip(boxes.tolist(), labels, instances.scores.tolist(), colors,
                                        strict=True):
        fits_above = box[1] > 2 * font_size
        visualizer.draw_texts(
            f'{classes[label]} {score:.2f}', np.array([box[0], box[1]]),
            font_sizes=font_size, colors='white',
            vertical_alignments='bottom' if fits_above else 'top',
            bboxes=dict(facecolor=tuple(channel / 510 for channel in color), alpha=0.8, pad=1,
                        edgecolor='none'))
    return visualizer.get_image()
