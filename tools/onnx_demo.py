"""Draws the predictions of an ONNX file: ``python tools/onnx_demo.py model.onnx IMAGES...``.

For files of ``tools/export_onnx.py``. Needs onnxruntime, NumPy and Pillow alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_errors
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont, ImageOps

IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')
_MIN_LONG_SIDE = 800
_PALETTE = ((220, 60, 60), (60, 160, 60), (60, 90, 220), (200, 140, 20), (150, 60, 200),
            (20, 160, 170), (230, 90, 160), (120, 120, 60))


# They have no base class of their own.
_LOAD_ERRORS = (onnxruntime_errors.Fail, onnxruntime_errors.InvalidArgument,
                onnxruntime_errors.InvalidGraph, onnxruntime_errors.InvalidProtobuf,
                onnxruntime_errors.NotImplemented)


class DemoError(Exception):
    """A mistake in the input; its text is the one sentence the user reads."""


class Detector:
    """A detector in an ONNX file.

    Args:
        file: Written by ``tools/export_onnx.py``.
        threads: Threads of onnxruntime; 0 for its own number. Default 0.

    Raises:
        DemoError: No such file, no ONNX file, or none of a whole detector.
    """

    def __init__(self, file: str, threads: int = 0) -> None:
        if not Path(file).is_file():
            raise DemoError(f'model {file} does not exist (looked in {Path.cwd()})')
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        try:
            self.session = onnxruntime.InferenceSession(
                file, options, providers=['CPUExecutionProvider'])
        except _LOAD_ERRORS as error:
            raise DemoError(f'model {file} cannot be loaded: {str(error).splitlines()[0]}') \
                from error
        text = self.session.get_modelmeta().custom_metadata_map.get('mmlaplacian')
        if text is None or self.session.get_outputs()[0].name != 'boxes':
            raise DemoError(f'model {file} is no detector written by tools/export_onnx.py')
        self.metadata = json.loads(text)
        self.size = tuple(side if isinstance(side, int) else None
                          for side in self.session.get_inputs()[0].shape[2:])

    def name(self, label: int) -> str:
        """The name of a class."""
        classes = self.metadata['classes']
        return classes[label] if label < len(classes) else f'class {label}'

    def color(self, label: int) -> tuple[int, int, int]:
        """The RGB colour of a class."""
        palette = self.metadata['palette']
        own = isinstance(palette, list) and label < len(palette)
        return tuple(palette[label]) if own else _PALETTE[label % len(_PALETTE)]

    def input_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image is resized to: the test pipeline's, within the file's."""
        scale = self.metadata['scale'] or (width, height)
        if None not in self.size:
            fitting = min(self.size[0] / height, self.size[1] / width)
            return _scaled(height, width, fitting)
        if self.metadata['keep_ratio']:
            size = _scaled(height, width, min(max(scale) / max(height, width),
                                              min(scale) / min(height, width)))
        else:
            size = scale[1], scale[0]
        if min(size) < self.metadata['least_side']:
            raise DemoError(f'{height} x {width} pixels become {size[0]} x {size[1]}, and this '
                            f'file takes images from {self.metadata["least_side"]} pixels a side')
        return size

    def __call__(self, image: np.ndarray) -> dict[str, np.ndarray]:
        """Detections in an image.

        Args:
            image: RGB ``(H, W, 3)``, uint8.

        Returns:
            ``boxes`` ``(n, 4)`` in the image's pixels, ``labels``, ``scores``, and of a Mask
            R-CNN ``masks`` ``(n, H, W)``.

        Raises:
            DemoError: The image is too small for a file of any size.
        """
        height, width = image.shape[:2]
        rows, columns = self.input_size(height, width)
        pixels = resize(image, rows, columns)
        if None not in self.size:
            # The mean colour is what padding is after the normalisation.
            canvas = np.empty((*self.size, 3), np.float32)
            canvas[:] = self.metadata['mean']
            canvas[:rows, :columns] = pixels
            pixels = canvas
        names = [output.name for output in self.session.get_outputs()]
        found = dict(zip(names, self.session.run(
            None, {'image': pixels.astype(np.float32).transpose(2, 0, 1)[None]}), strict=True))
        ratio = np.array([width / columns, height / rows] * 2, np.float32)
        found['boxes'] = (found['boxes'] * ratio).clip(0, [width, height] * 2)
        if 'masks' in found:
            y = (np.arange(height) + .5) * rows / height
            x = (np.arange(width) + .5) * columns / width
            found['masks'] = found['masks'][:, y.astype(int)[:, None], x.astype(int)]
        return found


def _scaled(height: int, width: int, factor: float) -> tuple[int, int]:
    return max(1, int(height * factor + .5)), max(1, int(width * factor + .5))


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear resizing as OpenCV does, without smoothing: Pillow's own smooths.

    Args:
        image: ``(H, W, 3)``, uint8.
        height: Of the result.
        width: Of the result.
    """
    if image.shape[:2] == (height, width):
        return image
    (top, bottom, down), (left, right, along) = (
        _neighbours(old, new) for old, new in zip(image.shape, (height, width), strict=False))
    rows = image[top] * (1 - down)[:, None, None] + image[bottom] * down[:, None, None]
    pixels = rows[:, left] * (1 - along)[:, None] + rows[:, right] * along[:, None]
    return np.uint8(pixels + .5)


def _neighbours(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both source pixels of every pixel along a side, and the weight of the second."""
    place = ((np.arange(new) + .5) * old / new - .5).clip(0, old - 1)
    first = place.astype(int)
    return first, np.minimum(first + 1, old - 1), place - first


def draw(image: np.ndarray, found: dict[str, np.ndarray], detector: Detector) -> Image.Image:
    """Draws boxes, masks, class names and scores, best last; small images are enlarged first."""
    scale = max(1, math.ceil(_MIN_LONG_SIDE / max(image.shape[:2])))
    height, width = (side * scale for side in image.shape[:2])
    picture = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    line_width = max(2, round(max(height, width) / 500))
    font = ImageFont.load_default(max(12, round(max(height, width) / 60)))
    order = np.argsort(found['scores'], kind='stable')
    colors = {i: detector.color(int(found['labels'][i])) for i in order}
    for i in order if 'masks' in found else ():
        mask = Image.fromarray(found['masks'][i]).convert('L').resize(
            (width, height), Image.Resampling.NEAREST)
        picture.paste(Image.blend(picture, Image.new('RGB', picture.size, colors[i]), .45),
                      mask=mask)
        inside = mask.filter(ImageFilter.MinFilter(2 * line_width - 1))
        picture.paste(colors[i], mask=ImageChops.subtract(mask, inside))
    canvas = ImageDraw.Draw(picture)
    for i in order:
        left, top, right, bottom = (found['boxes'][i] * scale).tolist()
        right, bottom = max(left, min(right, width - 1)), max(top, min(bottom, height - 1))
        canvas.rectangle((left, top, right, bottom), outline=colors[i], width=line_width)
        text = f'{detector.name(int(found["labels"][i]))} {found["scores"][i]:.2f}'
        box = canvas.textbbox((left, top), text, font=font, anchor='lb')
        if box[1] < 0:
            box = canvas.textbbox((left, top), text, font=font, anchor='lt')
        canvas.rectangle(box, fill=tuple(channel // 2 for channel in colors[i]))
        canvas.text(box[:2], text, font=font, anchor='lt', fill='white')
    return picture


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description='Draw boxes, masks, class names and scores of an exported detector.')
    parser.add_argument('model', help='file of tools/export_onnx.py')
    parser.add_argument('images', nargs='+', help='image files, or folders of images')
    parser.add_argument('--out-dir', required=True, metavar='DIR',
                        help='where the pictures go, as PNG files')
    parser.add_argument('--score-thr', type=float, default=0.3, metavar='SCORE',
                        help='draw detections above this score, 0 to 1 (default: 0.3)')
    parser.add_argument('--threads', type=int, default=0, metavar='N',
                        help='threads of onnxruntime (default: its own number)')
    return parser


def find_images(paths: Sequence[str]) -> list[Path]:
    """Image files, and those of folders.

    Raises:
        DemoError: A path does not exist, a folder holds none, or two have one name.
    """
    images: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
            if not found:
                raise DemoError(f'folder {path} holds no image ({", ".join(IMAGE_SUFFIXES)})')
            images.extend(found)
        elif path.is_file():
            images.append(path)
        else:
            raise DemoError(f'image {path} does not exist (looked in {Path.cwd()})')
    twice = [stem for stem, count in Counter(image.stem for image in images).items() if count > 1]
    if twice:
        raise DemoError(f'pictures are named after images, and {twice[0]} is the name of several')
    return images


def read(path: Path) -> np.ndarray:
    """An image as RGB ``(H, W, 3)``, turned by its EXIF tag.

    Raises:
        DemoError: It cannot be read.
    """
    try:
        with Image.open(path) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert('RGB'))
    except OSError as error:
        raise DemoError(f'image {path} cannot be read as an image') from error


def run(args: argparse.Namespace) -> None:
    """Draws every image.

    Raises:
        DemoError: Something of the input is wrong.
    """
    images = find_images(args.images)
    out_dir = Path(args.out_dir)
    targets = [out_dir / f'{image.stem}.png' for image in images]
    sources = {image.resolve() for image in images}
    for target in targets:
        if target.resolve() in sources:
            raise DemoError(f'the picture {target} would replace an image; name another folder')
    detector = Detector(args.model, args.threads)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f'--out-dir {out_dir} cannot be made: {error.strerror}') from error
    for source, target in zip(images, targets, strict=True):
        image = read(source)
        found = detector(image)
        kept = {key: value[found['scores'] > args.score_thr] for key, value in found.items()}
        draw(image, kept, detector).save(target)
        counts = Counter(detector.name(int(label)) for label in kept['labels'])
        said = ', '.join(f'{count} {name}' for name, count in counts.items())
        print(f'{source}: {said or "nothing above the score threshold"} -> {target}', flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status, 0 or 2.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if not 0 <= args.score_thr <= 1:
        parser.error(f'argument --score-thr: {args.score_thr} is not between 0 and 1')
    if args.threads < 0:
        parser.error(f'argument --threads: expected at least 0, got {args.threads}')
    try:
        run(args)
    except DemoError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
