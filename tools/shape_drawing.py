"""Circles, squares and triangles on textured backgrounds: what the generated sets share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
from shapely.affinity import translate
from shapely.geometry import MultiPolygon, Polygon
from shapely.geometry.polygon import orient

CATEGORIES = ('circle', 'square', 'triangle')
SPLITS = ('train', 'val')

BORDER = 1.0  # px kept free along the image border
MIN_GAP = 2.0  # px between shapes that do not overlap
CIRCLE_VERTICES = 48  # the polygon holds 99.7 % of the disc
MIN_BACKGROUND_CONTRAST = 110.0  # Euclidean RGB distance of base colours, 0 to 441
MIN_SHAPE_CONTRAST = 80.0


@dataclass(frozen=True)
class Shape:
    """One drawn object.

    Attributes:
        category: Index into `CATEGORIES`.
        outline: Full outline in px, covered parts included.
        radius: Radius in px of a circle, 0 for the others.
    """

    category: int
    outline: Polygon
    radius: float = 0.0

    @property
    def side(self) -> float:
        """Longer side of the outline's box in px."""
        return max(box_sides(self.outline))

    def coverage(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Anti-aliased share of each pixel that the shape covers.

        Args:
            x: Pixel centres along x in px, shape (1, W).
            y: Pixel centres along y in px, shape (H, 1).

        Returns:
            Shares in [0, 1], shape (H, W); 0.5 is the outline.
        """
        if self.radius:
            centre = self.outline.centroid
            distance = np.hypot(x - centre.x, y - centre.y) - self.radius
        else:
            # Signed distance to a convex outline: the largest over its edges' half planes.
            corners = np.asarray(orient(self.outline).exterior.coords)
            starts, edges = corners[:-1], np.diff(corners, axis=0)
            normals = np.stack([edges[:, 1], -edges[:, 0]], axis=1)
            normals /= np.linalg.norm(normals, axis=1, keepdims=True)
            offsets = (normals * starts).sum(axis=1)
            distance = np.max([nx * x + ny * y - offset
                               for (nx, ny), offset in zip(normals, offsets, strict=True)], axis=0)
        return np.clip(0.5 - distance, 0.0, 1.0)


def box_sides(region: Polygon | MultiPolygon) -> tuple[float, float]:
    """Width and height in px of the region's box."""
    left, top, right, bottom = region.bounds
    return right - left, bottom - top


def random_stream(seed: int, split: str, index: int) -> np.random.Generator:
    """The random stream of image `index`, from 0, of a split."""
    return np.random.default_rng(np.random.SeedSequence([seed, SPLITS.index(split), index]))


# Geometry -------------------------------------------------------------------------------------


def draw_outline(rng: np.random.Generator, category: int, side: float) -> Shape:
    """Draw the form and rotation of a shape; its box is centred on the origin.

    Args:
        rng: Random stream.
        category: Index into `CATEGORIES`.
        side: Longer side of the shape's box in px.
    """
    if CATEGORIES[category] == 'circle':
        # One vertex on each axis, so that polygon and disc have the same box.
        angles = np.arange(CIRCLE_VERTICES) * (2 * math.pi / CIRCLE_VERTICES)
    elif CATEGORIES[category] == 'square':
        angles = rng.uniform(0, math.pi / 2) + np.arange(4) * (math.pi / 2)
    else:
        jitter = rng.uniform(-math.pi / 9, math.pi / 9, size=3)
        angles = rng.uniform(0, 2 * math.pi) + np.arange(3) * (2 * math.pi / 3) + jitter
    corners = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    low, high = corners.min(axis=0), corners.max(axis=0)
    corners = (corners - (low + high) / 2) * (side / (high - low).max())
    radius = side / 2 if CATEGORIES[category] == 'circle' else 0.0
    return Shape(category, Polygon(corners), radius)


def place_shape(rng: np.random.Generator, shape: Shape, image_size: int,
                near: Shape | None) -> Shape:
    """Move a shape to a random place inside the image, close to `near` if one is given."""
    half = np.array(box_sides(shape.outline)) / 2
    low, high = half + BORDER, image_size - half - BORDER
    if near is None:
        centre = rng.uniform(low, high)
    else:
        reach = (near.side + shape.side) / 2
        target = np.array(near.outline.centroid.coords[0])
        centre = np.clip(target + rng.uniform(-reach, reach, size=2), low, high)
    return Shape(shape.category, translate(shape.outline, *centre), shape.radius)


# Pixels ---------------------------------------------------------------------------------------


def smooth_noise(rng: np.random.Generator, image_size: int, cells: int) -> np.ndarray:
    """Noise in [0, 1] with about `cells` blobs along a side, shape (H, W)."""
    grid = rng.random((cells + 1, cells + 1))
    noise = cv2.resize(grid, (image_size, image_size), interpolation=cv2.INTER_CUBIC)
    low, high = noise.min(), noise.max()
    return (noise - low) / (high - low)


def waves(rng: np.random.Generator, x: np.ndarray, y: np.ndarray, period: float) -> np.ndarray:
    """Stripes in [0, 1] of a random direction; `period` in px, shape (H, W)."""
    angle, phase = rng.uniform(0, 2 * math.pi, size=2)
    along = x * math.cos(angle) + y * math.sin(angle)
    return 0.5 + 0.5 * np.sin(along * (2 * math.pi / period) + phase)


def draw_colour(rng: np.random.Generator, avoid: list[tuple[np.ndarray, float]]) -> np.ndarray:
    """Draw an RGB colour in [20, 235] that keeps its distances.

    Args:
        rng: Random stream.
        avoid: Pairs of a colour and the least Euclidean distance from it.

    Returns:
        The first of 64 colours that keeps all distances, else the one that comes closest to it.
    """
    colours = rng.uniform(20, 235, size=(64, 3))
    slack = np.min([np.linalg.norm(colours - colour, axis=1) - distance
                    for colour, distance in avoid], axis=0)
    keeps = np.flatnonzero(slack >= 0)
    return colours[keeps[0] if keeps.size else slack.argmax()]


def paint_background(rng: np.random.Generator, x: np.ndarray,
                     y: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Paint noise at several scales, stripes or a gradient, then distractor lines.

    Args:
        rng: Random stream.
        x: Pixel centres along x in px, shape (1, W).
        y: Pixel centres along y in px, shape (H, 1).

    Returns:
        Float RGB image in [0, 255], shape (H, W, 3), and the two colours it blends.
    """
    size = x.size
    start = rng.uniform(30, 225, size=3)
    direction = rng.normal(size=3)
    end = np.clip(start + direction * (rng.uniform(50, 110) / np.linalg.norm(direction)), 10, 245)

    noise = sum(weight * smooth_noise(rng, size, max(2, size // scale))
                for weight, scale in ((0.5, 48), (0.3, 16), (0.2, 5)))
    noise = (noise - noise.min()) / (noise.max() - noise.min())
    kind = rng.choice(['noise', 'stripes', 'gradient'])
    if kind == 'stripes':
        blend = 0.6 * waves(rng, x, y, rng.uniform(6, 32)) + 0.4 * noise
    elif kind == 'gradient':
        blend = 0.6 * waves(rng, x, y, 2.5 * size) + 0.4 * noise
    else:
        blend = noise
    image = start + (end - start) * blend[..., None]

    for _ in range(int(rng.integers(2, 6))):
        first, second = rng.uniform(0, size, size=(2, 2))
        along = second - first
        position = ((x - first[0]) * along[0] + (y - first[1]) * along[1]) / (along @ along)
        position = np.clip(position, 0, 1)
        distance = np.hypot(x - first[0] - position * along[0], y - first[1] - position * along[1])
        alpha = np.clip(rng.uniform(0.4, 1.4) + 0.5 - distance, 0, 1) * rng.uniform(0.5, 0.9)
        image += alpha[..., None] * (rng.uniform(0, 255, size=3) - image)
    return image, [start, end]


def paint_texture(rng: np.random.Generator, x: np.ndarray, y: np.ndarray,
                  shape: Shape) -> np.ndarray:
    """Brightness of a shape's own surface: flat, shaded, striped or blotchy, shape (H, W)."""
    kind = rng.choice(['flat', 'shaded', 'striped', 'blotchy'], p=[0.4, 0.25, 0.2, 0.15])
    strength = rng.uniform(20, 45)
    if kind == 'shaded':
        pattern = waves(rng, x, y, 2.5 * shape.side)
    elif kind == 'striped':
        pattern = waves(rng, x, y, rng.uniform(4, 10))
    elif kind == 'blotchy':
        pattern = smooth_noise(rng, x.size, x.size // 6)
    else:
        return np.zeros((y.size, x.size))
    return strength * (pattern - 0.5)


def paint_scene(rng: np.random.Generator, shapes: list[Shape],
                image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Paint shapes on a background, a later one over an earlier one.

    Args:
        rng: Random stream.
        shapes: Shapes with their places in the image.
        image_size: Height and width in px.

    Returns:
        RGB pixels, uint8, shape (H, W, 3), and the visible masks, int, shape (H, W): 0 is
        background, `k` is `shapes[k - 1]`.
    """
    centres = np.arange(image_size) + 0.5
    x, y = centres[None, :], centres[:, None]
    image, background = paint_background(rng, x, y)
    labels = np.zeros((image_size, image_size), dtype=np.int64)
    avoid = [(colour, MIN_BACKGROUND_CONTRAST) for colour in background]
    for number, shape in enumerate(shapes, start=1):
        colour = draw_colour(rng, avoid)
        avoid.append((colour, MIN_SHAPE_CONTRAST))
        surface = colour + paint_texture(rng, x, y, shape)[..., None]
        coverage = shape.coverage(x, y)
        image += coverage[..., None] * (surface - image)
        labels[coverage >= 0.5] = number
    image += rng.normal(scale=rng.uniform(2, 7), size=image.shape)
    pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return pixels, labels
