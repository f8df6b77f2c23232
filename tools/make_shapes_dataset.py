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
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from generated_set import (
    COUNT_LIMITS,
    SEED_LIMITS,
    GeneratedSet,
    check_limits,
    exit_status,
    stop_on_signals,
    track,
)
from PIL import Image
from shape_drawing import (
    CATEGORIES,
    MIN_GAP,
    SPLITS,
    Shape,
    box_sides,
    draw_outline,
    paint_scene,
    place_shape,
    random_stream,
)
from shapely.geometry import MultiPolygon, Polygon
from shapely.geometry.polygon import orient

OBJECTS_PER_IMAGE = (3, 6)
MIN_SIDE, MAX_SIDE = 12.0, 64.0  # px, longer side of an object's box
DRAWN_SIDE = (13.0, 63.5)  # inside the limits, so that rounded coordinates keep them
MIN_VISIBLE_SHARE = 0.4
MIN_VISIBLE_SHORT_SIDE = 8.0  # px
MIN_PART_AREA = 12.0  # px^2, of each piece a covered shape falls into
OVERLAP_SHARE = (0.1, 0.5)  # intersection over the smaller of the two shapes
EXTRA_OVERLAP_PROBABILITY = 0.2  # of each object after the first pair

IMAGE_SIZE_LIMITS = (128, 1024)
VERSION = 1  # raise it whenever the same arguments give other data


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


def overlap_share(first: Polygon, second: Polygon) -> float:
    """Intersection of two outlines over the area of the smaller one."""
    return first.intersection(second).area / min(first.area, second.area)


# Geometry -------------------------------------------------------------------------------------


def draw_shape(rng: np.random.Generator) -> Shape:
    """Draw a category, size and rotation; the shape's box is centred on the origin."""
    category = int(rng.integers(len(CATEGORIES)))
    return draw_outline(rng, category, rng.uniform(*DRAWN_SIDE))


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
    rng = random_stream(seed, split, index)
    shapes = compose_shapes(rng, image_size)
    pixels, labels = paint_scene(rng, shapes, image_size)
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
    check_limits(arguments, dict(num_train=COUNT_LIMITS, num_val=COUNT_LIMITS,
                                 image_size=IMAGE_SIZE_LIMITS, seed=SEED_LIMITS))
    counts = dict(train=num_train, val=num_val)

    def write(folder: Path) -> list[str]:
        return [f'{split:5}: {write_split(folder, split, counts[split], image_size, seed)}'
                for split in SPLITS]

    return GeneratedSet(
        generator='make_shapes_dataset',
        version=VERSION,
        marker='shapes_dataset.json',
        folders='train|val|annotations',
        files=r'(train|val)/\d{6}\.png|annotations/(train|val)\.json',
    ).make(out, arguments, num_files=num_train + num_val + len(SPLITS), write=write)


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
    return exit_status(args.out, lambda: make_dataset(
        args.out, args.num_train, args.num_val, args.image_size, args.seed))


if __name__ == '__main__':
    stop_on_signals()
    sys.exit(main())
