"""Make the shapes data set: COCO-format instance segmentation that needs no download.

Circles, squares and triangles lie on textured backgrounds, drawn one over another. Layout::

    OUT/train/000001.png ...          OUT/annotations/train.json
    OUT/val/000001.png ...            OUT/annotations/val.json
    OUT/shapes_dataset.json           arguments of the run, written last

Guarantees:

- Every image is a square RGB PNG of at least 128 px with 3 to 6 objects, none cut by the border.
- The longer side of an object's box is 12 to 64 px, for the shape as drawn and for its visible
  part. At least 40 % of every shape is visible, and the shorter side of the visible box is at
  least 8 px.
- Every image holds at least one pair that overlaps by 10 % to 50 % of the smaller shape, so at
  least 2 of at most 6 objects, a third, are overlapped in every image. Two shapes that do not
  overlap are at least 2 px apart.
- Annotations follow COCO: `segmentation` holds the polygons of the visible region in continuous
  pixel coordinates (pixel `i` spans `[i, i + 1]`), `area` and `bbox` belong to these polygons,
  `iscrowd` is 0, and the categories are 1 circle, 2 square, 3 triangle.
- Image `i` of a split depends on the seed, the split, `i` and the image size only, never on the
  number of images. Train and val draw from separate random streams. The same arguments in the
  same environment give the same bytes of JSON and the same pixels.
- A set is complete or absent: it is built in a staging folder inside OUT and moved into place as
  a whole. A complete set with the same arguments is left as it is. A folder that holds
  anything else is refused.

Example::

    python tools/make_shapes_dataset.py --out data/shapes --num-train 1200 --num-val 200
"""
import argparse
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import cv2
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from shapely.affinity import translate
from shapely.geometry import MultiPolygon, Polygon
from shapely.geometry.polygon import orient

CATEGORIES = ('circle', 'square', 'triangle')
SPLITS = ('train', 'val')

OBJECTS_PER_IMAGE = (3, 6)
MIN_SIDE, MAX_SIDE = 12.0, 64.0  # px, longer side of an object's box
DRAWN_SIDE = (13.0, 63.5)  # inside the limits, so that rounded coordinates keep them
MIN_VISIBLE_SHARE = 0.4
MIN_VISIBLE_SHORT_SIDE = 8.0  # px
MIN_PART_AREA = 12.0  # px^2, of each piece a covered shape falls into
OVERLAP_SHARE = (0.1, 0.5)  # intersection over the smaller of the two shapes
EXTRA_OVERLAP_PROBABILITY = 0.2  # of each object after the first pair
MIN_GAP = 2.0  # px between shapes that do not overlap
BORDER = 1.0  # px kept free along the image border
CIRCLE_VERTICES = 48  # the polygon holds 99.7 % of the disc
MIN_BACKGROUND_CONTRAST = 110.0  # Euclidean RGB distance of base colours, 0 to 441
MIN_SHAPE_CONTRAST = 80.0

IMAGE_SIZE_LIMITS = (128, 1024)
COUNT_LIMITS = (1, 100_000)
SEED_LIMITS = (0, 2**32 - 1)

GENERATOR = 'make_shapes_dataset'
VERSION = 1  # raise it whenever the same arguments give other data
MARKER = 'shapes_dataset.json'
STAGING = f'.{GENERATOR}.partial'


class UserError(Exception):
    """A mistake the user can put right; its text is the one sentence to show."""


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


@dataclass(frozen=True)
class Sample:
    """One image with its objects.

    Attributes:
        image: RGB pixels, uint8, shape (H, W, 3).
        shapes: Drawn objects; a later one lies over an earlier one.
        visible: Visible region of each object.
        labels: Drawn visible masks, int, shape (H, W): 0 is background, `k` is `shapes[k - 1]`.
    """

    image: np.ndarray
    shapes: list[Shape]
    visible: list[MultiPolygon]
    labels: np.ndarray


def box_sides(region: Polygon | MultiPolygon) -> tuple[float, float]:
    """Width and height in px of the region's box."""
    left, top, right, bottom = region.bounds
    return right - left, bottom - top


def overlap_share(first: Polygon, second: Polygon) -> float:
    """Intersection of two outlines over the area of the smaller one."""
    return first.intersection(second).area / min(first.area, second.area)


# Geometry -------------------------------------------------------------------------------------


def draw_shape(rng: np.random.Generator) -> Shape:
    """Draw a category, size and rotation; the shape's box is centred on the origin."""
    category = int(rng.integers(len(CATEGORIES)))
    side = rng.uniform(*DRAWN_SIDE)
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


def visible_regions(shapes: list[Shape]) -> list[MultiPolygon]:
    """Part of each shape that no later shape covers."""
    regions = []
    for index, shape in enumerate(shapes):
        region = shape.outline
        for cover in shapes[index + 1:]:
            region = region.difference(cover.outline)
        parts = [part for part in getattr(region, 'geoms', [region]) if part.area > 0]
        regions.append(MultiPolygon(parts))
    return regions


def is_recognisable(shape: Shape, visible: MultiPolygon) -> bool:
    """Whether enough of a shape is visible, in pieces that COCO polygons can hold."""
    if visible.is_empty or visible.area < MIN_VISIBLE_SHARE * shape.outline.area:
        return False
    sides = box_sides(visible)
    # COCO polygons have no holes.
    return (max(sides) >= MIN_SIDE + 0.01 and min(sides) >= MIN_VISIBLE_SHORT_SIDE + 0.01
            and all(part.area >= MIN_PART_AREA and not part.interiors for part in visible.geoms))


def fits(candidate: Shape, shapes: list[Shape], overlapping: bool) -> bool:
    """Whether a candidate drawn over `shapes` overlaps one of them, or none, as asked."""
    overlaps = 0
    for shape in shapes:
        if candidate.outline.distance(shape.outline) >= MIN_GAP:
            continue
        if not overlapping:
            return False
        share = overlap_share(candidate.outline, shape.outline)
        if not OVERLAP_SHARE[0] <= share <= OVERLAP_SHARE[1]:
            return False
        overlaps += 1
    if overlapping != bool(overlaps):
        return False
    stack = [*shapes, candidate]
    return all(map(is_recognisable, stack, visible_regions(stack)))


def compose_shapes(rng: np.random.Generator, image_size: int) -> list[Shape]:
    """Draw the objects of one image; the first two always overlap."""
    for _ in range(1000):
        count = int(rng.integers(OBJECTS_PER_IMAGE[0], OBJECTS_PER_IMAGE[1] + 1))
        shapes = [place_shape(rng, draw_shape(rng), image_size, None)]
        while len(shapes) < count:
            overlapping = len(shapes) == 1 or rng.random() < EXTRA_OVERLAP_PROBABILITY
            for _ in range(50):
                near = shapes[int(rng.integers(len(shapes)))] if overlapping else None
                candidate = place_shape(rng, draw_shape(rng), image_size, near)
                if fits(candidate, shapes, overlapping):
                    shapes.append(candidate)
                    break
            else:
                break
        if len(shapes) == count:
            return shapes
    raise RuntimeError(f'no arrangement of shapes found for image size {image_size}')


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


def make_sample(seed: int, split: str, index: int, image_size: int) -> Sample:
    """Make image `index` of a split.

    Args:
        seed: Seed of the data set.
        split: One of `SPLITS`.
        index: Position in the split, from 0.
        image_size: Height and width in px.

    Returns:
        The image, its objects and their visible regions.
    """
    entropy = np.random.SeedSequence([seed, SPLITS.index(split), index])
    rng = np.random.default_rng(entropy)
    shapes = compose_shapes(rng, image_size)

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
    return Sample(pixels, shapes, visible_regions(shapes), labels)


# COCO -----------------------------------------------------------------------------------------


def to_annotation(shape: Shape, visible: MultiPolygon) -> dict[str, Any]:
    """COCO fields of one object, without its ids."""
    rings = [np.round(orient(part).exterior.coords[:-1], 2) for part in visible.geoms]
    # Area and box belong to the rounded polygons that the file holds.
    region = MultiPolygon([Polygon(ring) for ring in rings])
    left, top, right, bottom = region.bounds
    box = [left, top, right - left, bottom - top]
    return dict(category_id=shape.category + 1,
                segmentation=[ring.ravel().tolist() for ring in rings],
                area=round(region.area, 2),
                bbox=[round(value, 2) for value in box],
                iscrowd=0)


def overlapped_count(shapes: list[Shape]) -> int:
    """Number of shapes that cover another one or are covered by one."""
    return sum(any(other is not shape and shape.outline.intersects(other.outline)
                   for other in shapes) for shape in shapes)


def track(total: int, label: str) -> Iterator[int]:
    """Yield 0 to `total - 1` with a progress bar, or with four lines where output is no terminal.

    Args:
        total: Number of steps.
        label: Text in front of the bar.
    """
    console = Console()
    if console.is_interactive:
        columns = (TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            yield from progress.track(range(total), description=label)
        return
    for index in range(total):
        yield index
        done = index + 1
        if done * 4 // total > index * 4 // total:
            print(f'{label}: {done}/{total} images', flush=True)


@dataclass
class Summary:
    """Figures of a set: counts, and the range of the drawn shapes' longer sides in px."""

    images: int = 0
    objects: int = 0
    overlapped: int = 0
    smallest: float = math.inf
    largest: float = 0.0

    def add(self, shapes: list[Shape]) -> None:
        """Count one image."""
        self.images += 1
        self.objects += len(shapes)
        self.overlapped += overlapped_count(shapes)
        self.smallest = min(self.smallest, *(shape.side for shape in shapes))
        self.largest = max(self.largest, *(shape.side for shape in shapes))

    def __str__(self) -> str:
        return (f'{self.images} images, {self.objects} objects, '
                f'{self.overlapped / self.objects:.1%} of them overlapped, '
                f'{self.smallest:.0f} to {self.largest:.0f} px')


def write_split(folder: Path, split: str, count: int, image_size: int, seed: int) -> Summary:
    """Write the images and the annotation file of one split below `folder`."""
    (folder / split).mkdir(parents=True)
    (folder / 'annotations').mkdir(exist_ok=True)
    images, annotations, summary = [], [], Summary()
    for index in track(count, f'{split:5}'):
        sample = make_sample(seed, split, index, image_size)
        name = f'{index + 1:06d}.png'
        Image.fromarray(sample.image).save(folder / split / name, compress_level=3)
        images.append(dict(id=index + 1, file_name=name, width=image_size, height=image_size))
        for shape, visible in zip(sample.shapes, sample.visible, strict=True):
            annotations.append(dict(id=len(annotations) + 1, image_id=index + 1,
                                    **to_annotation(shape, visible)))
        summary.add(sample.shapes)
    content = dict(
        info=dict(description=f'Shapes, {split}: circles, squares and triangles',
                  version=str(VERSION)),
        licenses=[],
        images=images,
        annotations=annotations,
        categories=[dict(id=number, name=name, supercategory='shape')
                    for number, name in enumerate(CATEGORIES, start=1)])
    text = json.dumps(content, separators=(',', ':'))
    (folder / 'annotations' / f'{split}.json').write_text(text + '\n', encoding='utf-8')
    return summary


# Folder ---------------------------------------------------------------------------------------


def read_marker(out: Path) -> dict[str, Any] | None:
    """Content of the marker in `out`, or None where there is no marker of this tool."""
    try:
        marker = json.loads((out / MARKER).read_text(encoding='utf-8'))
    except (FileNotFoundError, ValueError):
        return None
    is_own = isinstance(marker, dict) and marker.get('generator') == GENERATOR
    return marker if is_own else None


def write_marker(out: Path, complete: bool, arguments: dict[str, int]) -> None:
    """Replace the marker in one step."""
    marker = dict(generator=GENERATOR, version=VERSION, complete=complete, arguments=arguments)
    temporary = out / STAGING / MARKER
    temporary.write_text(json.dumps(marker, indent=2) + '\n', encoding='utf-8')
    os.replace(temporary, out / MARKER)


def find_foreign(out: Path, marker: dict[str, Any] | None) -> Path | None:
    """First entry of `out` that this tool did not make, or None."""
    for entry in sorted(out.iterdir()):
        if entry.name == STAGING:
            continue
        # Without a marker, folders with the usual names may be somebody's own data.
        if marker is None or entry.name not in (*SPLITS, 'annotations', MARKER):
            return entry
        if entry.name == MARKER:
            continue
        if entry.is_symlink() or not entry.is_dir():
            return entry
        for child in sorted(entry.iterdir()):
            if entry.name == 'annotations':
                is_own = child.name in [f'{split}.json' for split in SPLITS]
            else:
                is_own = child.suffix == '.png' and len(child.stem) == 6 and child.stem.isdigit()
            if not is_own or child.is_dir():
                return child
    return None


def is_complete(out: Path, marker: dict[str, Any] | None, arguments: dict[str, int]) -> bool:
    """Whether `out` holds the whole set of these arguments, made by this version."""
    expected = dict(generator=GENERATOR, version=VERSION, complete=True, arguments=arguments)
    return marker == expected and all(
        (out / 'annotations' / f'{split}.json').is_file()
        and sum(1 for _ in (out / split).glob('*.png')) == arguments[f'num_{split}']
        for split in SPLITS)


def make_dataset(out: Path, num_train: int, num_val: int, image_size: int, seed: int) -> bool:
    """Make the data set, unless the same one is there already.

    Args:
        out: Folder of the set; made if absent.
        num_train: Number of training images.
        num_val: Number of validation images.
        image_size: Height and width of the images in px.
        seed: Seed of all random streams.

    Returns:
        Whether a set was made.

    Raises:
        UserError: If a number is out of range or `out` holds anything but a set of this tool.
        OSError: If the folder cannot be read or written.
    """
    arguments = dict(num_train=num_train, num_val=num_val, image_size=image_size, seed=seed)
    limits = dict(num_train=COUNT_LIMITS, num_val=COUNT_LIMITS, image_size=IMAGE_SIZE_LIMITS,
                  seed=SEED_LIMITS)
    for name, (low, high) in limits.items():
        if not low <= arguments[name] <= high:
            option = '--' + name.replace('_', '-')
            raise UserError(f'{option} must be from {low} to {high}, got {arguments[name]}.')
    if out.exists() and not out.is_dir():
        raise UserError(f'--out must be a folder, but {out} is a file.')
    out.mkdir(parents=True, exist_ok=True)
    marker = read_marker(out)
    foreign = find_foreign(out, marker)
    if foreign is not None:
        raise UserError(f'--out must be a new or empty folder or an earlier set of this tool, '
                        f'but {out} holds {foreign.relative_to(out)}, which this tool did not '
                        f'make.')
    if is_complete(out, marker, arguments):
        print(f'{out} is already complete with these arguments: nothing to do.')
        return False

    staging = out / STAGING
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir()
    try:
        print(f'Making {num_train} training and {num_val} validation images in {out}', flush=True)
        counts = dict(train=num_train, val=num_val)
        summaries = {split: write_split(staging, split, counts[split], image_size, seed)
                     for split in SPLITS}
        # From here to the last line the folder is marked as incomplete.
        write_marker(out, False, arguments)
        for name in (*SPLITS, 'annotations'):
            if (out / name).exists():
                shutil.rmtree(out / name)
            os.replace(staging / name, out / name)
        write_marker(out, True, arguments)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for split, summary in summaries.items():
        print(f'{split:5}: {summary}')
    print(f'Complete: {out}')
    return True


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn a termination signal into an exit that clears the staging folder."""
    raise SystemExit(128 + signum)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(
        description='Make a COCO-format instance segmentation set of circles, squares and '
        'triangles. A complete set with the same arguments is left as it is.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('data/shapes'), help='folder of the set')
    parser.add_argument('--num-train', type=int, default=1200, help='training images')
    parser.add_argument('--num-val', type=int, default=200, help='validation images')
    parser.add_argument('--image-size', type=int, default=128,
                        help='height and width in px, 128 to 1024')
    parser.add_argument('--seed', type=int, default=0, help='seed of all random streams')
    args = parser.parse_args(argv)
    try:
        make_dataset(args.out, args.num_train, args.num_val, args.image_size, args.seed)
    except UserError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except OSError as error:
        print(f'error: cannot write the data set to {args.out}: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    sys.exit(main())
