"""Make the shape classes set: image classification in ImageNet's folder layout, no download.

The largest shape of an image is its class: a circle, a square or a triangle, on the same
textured backgrounds as in the shapes data set of the detectors. Layout::

    OUT/train/circle/000001.png ...     OUT/val/circle/000001.png ...
    OUT/train/square/000002.png ...     OUT/val/square/000002.png ...
    OUT/train/triangle/000003.png ...   OUT/val/triangle/000003.png ...
    OUT/shape_classes.json              arguments of the run, written last

Guarantees:

- Every image is a square RGB PNG of at least 64 px with one dominant shape, whose box's longer
  side is 50 % to 80 % of the image's, and at most one smaller shape of another class, of at most
  half that side. No shape is cut by the border, and the two are at least 2 px apart.
- The classes have the same number of images, to within one. No two images of a split have the
  same name.
- Image `i` of a split depends on the seed, the split, `i` and the image size only. Train and val
  draw from separate random streams. The same arguments in the same environment give the same
  pixels.
- A set is complete or absent, as `make_shapes_dataset.py` has it.

Example::

    python tools/make_shape_classes.py --out data/shape_classes --num-train 3000 --num-val 600
"""
import argparse
import sys
from itertools import islice
from pathlib import Path

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
    draw_outline,
    paint_scene,
    place_shape,
    random_stream,
)

DOMINANT_SHARE = (0.5, 0.8)  # longer side of the class's shape over the image's
OTHER_SHARE = (0.3, 0.5)  # longer side of the smaller shape over that of the class's
OTHER_PROBABILITY = 0.5
PLACES = 50  # tries before the smaller shape is left out

IMAGE_SIZE_LIMITS = (64, 1024)
VERSION = 1  # raise it whenever the same arguments give other data


def make_sample(seed: int, split: str, index: int,
                image_size: int) -> tuple[np.ndarray, list[Shape]]:
    """Make image `index` of a split; its class is `index` modulo the number of classes.

    Args:
        seed: Seed of the data set.
        split: One of `SPLITS`.
        index: Position in the split, from 0.
        image_size: Height and width in px.

    Returns:
        RGB pixels, uint8, shape (H, W, 3), and the shapes, the dominant one first.
    """
    rng = random_stream(seed, split, index)
    label = index % len(CATEGORIES)
    side = image_size * rng.uniform(*DOMINANT_SHARE)
    dominant = place_shape(rng, draw_outline(rng, label, side), image_size, None)
    shapes = [dominant]
    if rng.random() < OTHER_PROBABILITY:
        category = (label + int(rng.integers(1, len(CATEGORIES)))) % len(CATEGORIES)
        other = draw_outline(rng, category, side * rng.uniform(*OTHER_SHARE))
        places = (place_shape(rng, other, image_size, None) for _ in range(PLACES))
        apart = (place for place in places
                 if place.outline.distance(dominant.outline) >= MIN_GAP)
        shapes += islice(apart, 1)
    pixels, _ = paint_scene(rng, shapes, image_size)
    return pixels, shapes


def write_split(folder: Path, split: str, count: int, image_size: int, seed: int) -> str:
    """Write the images of one split below `folder` and say how many each class has."""
    numbers = [0] * len(CATEGORIES)
    for name in CATEGORIES:
        (folder / split / name).mkdir(parents=True)
    for index in track(count, f'{split:5}'):
        pixels, shapes = make_sample(seed, split, index, image_size)
        label = shapes[0].category
        numbers[label] += 1
        path = folder / split / CATEGORIES[label] / f'{index + 1:06d}.png'
        Image.fromarray(pixels).save(path, compress_level=3)
    listed = ', '.join(f'{number} {name}' for number, name in
                       zip(numbers, CATEGORIES, strict=True))
    return f'{split:5}: {count} images, {listed}'


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
    # One image of each class at least: labels are numbered by the folders that hold images.
    counts = (len(CATEGORIES), COUNT_LIMITS[1])
    check_limits(arguments, dict(num_train=counts, num_val=counts,
                                 image_size=IMAGE_SIZE_LIMITS, seed=SEED_LIMITS))

    def write(folder: Path) -> list[str]:
        return [write_split(folder, split, arguments[f'num_{split}'], image_size, seed)
                for split in SPLITS]

    names = '|'.join(CATEGORIES)
    return GeneratedSet(
        generator='make_shape_classes',
        version=VERSION,
        marker='shape_classes.json',
        folders=f'(train|val)(/({names}))?',
        files=rf'(train|val)/({names})/\d{{6}}\.png',
    ).make(out, arguments, num_files=num_train + num_val, write=write)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, or 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(
        description='Make an image classification set of circles, squares and triangles in '
        "ImageNet's folder layout. A complete set with the same arguments is left as it is.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('data/shape_classes'),
                        help='folder of the set')
    parser.add_argument('--num-train', type=int, default=3000, help='training images')
    parser.add_argument('--num-val', type=int, default=600, help='validation images')
    parser.add_argument('--image-size', type=int, default=64,
                        help='height and width in px, 64 to 1024')
    parser.add_argument('--seed', type=int, default=0, help='seed of all random streams')
    args = parser.parse_args(argv)
    return exit_status(args.out, lambda: make_dataset(
        args.out, args.num_train, args.num_val, args.image_size, args.seed))


if __name__ == '__main__':
    stop_on_signals()
    sys.exit(main())
