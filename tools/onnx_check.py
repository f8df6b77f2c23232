"""Compares an exported file, run by onnxruntime, with mmdet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import mmcv
import numpy as np
import onnxruntime
import torch
from cli import UserError
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData
from torch import Tensor, nn

FEATURES_TOLERANCE, SCORE_TOLERANCE, BOX_TOLERANCE = 1e-4, 1e-3, .5
# Of an image's pixels: those that lie at the threshold within rounding.
MASK_TOLERANCE = 1e-3


class CheckError(Exception):
    """The file and mmdet differ; the text says where and by how much."""


def check(model: nn.Module, file: Path, sizes: Sequence[tuple[int, int]], images: Sequence[str], *,
          features: bool) -> None:
    """Compares on a generated picture and on images, at every size, and prints the differences.

    Args:
        model: The detector in eval mode.
        file: What was exported of it.
        sizes: Heights and widths.
        images: Files of pictures, resized to each.
        features: Whether the file is backbone and neck alone.

    Raises:
        CheckError: A difference beyond the tolerances of this module, or no detection at all.
        UserError: An image cannot be read.
    """
    session = onnxruntime.InferenceSession(str(file), providers=['CPUExecutionProvider'])
    pictures = [generated_picture(), *map(_read, images)]
    count = 0
    for height, width in sizes:
        for picture in pictures:
            pixels = cv2.resize(picture, (width, height))
            image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float().contiguous()
            found = [torch.from_numpy(x) for x in session.run(None, {'image': image.numpy()})]
            with torch.no_grad():
                text, compared = (_compare_features if features else _compare_detections)(
                    model, image, found)
            print(f'{height} x {width}: {text}', flush=True)
            count += compared
    if not count:
        raise CheckError('no picture has a detection to compare; name pictures that have: '
                         '--check IMAGES...')


def generated_picture() -> np.ndarray:
    """Coloured patches of many sizes, RGB ``(800, 1344, 3)``, the same at every call."""
    generator = np.random.default_rng(0)
    picture = sum(cv2.resize(generator.random((side, 2 * side, 3)), (1344, 800),
                             interpolation=cv2.INTER_CUBIC) for side in (3, 9, 27, 81))
    return np.uint8(np.clip(255 * (picture / 2 - .5), 0, 255))


def _read(path: str) -> np.ndarray:
    image = mmcv.imread(path, channel_order='rgb') if Path(path).is_file() else None
    if image is None:
        raise UserError(f'image {path} cannot be read as an image')
    return image


def _compare_features(model: nn.Module, image: Tensor, found: Sequence[Tensor]) -> tuple[str, int]:
    expected = model.extract_feat(_prepared(model, image)[0])
    worst = max(float((a - b).abs().max() / b.abs().max())
                for a, b in zip(found, expected, strict=True))
    if not worst <= FEATURES_TOLERANCE:
        raise CheckError(f'maps at {tuple(image.shape[2:])} differ by {worst:.1e} of the largest '
                         f'value, allowed is {FEATURES_TOLERANCE:.0e}')
    return f'{len(found)} maps, largest relative difference {worst:.1e}', len(found)


def _prepared(model: nn.Module, image: Tensor) -> tuple[Tensor, list[DetDataSample]]:
    """The image as mmdet's pipeline hands it on: BGR, with the sizes that it has."""
    size = tuple(image.shape[2:])
    sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1., 1.)))
    data = model.data_preprocessor(dict(inputs=[image[0].flip(0)], data_samples=[sample]), False)
    return data['inputs'], data['data_samples']


def _compare_detections(model: nn.Module, image: Tensor,
                        found: Sequence[Tensor]) -> tuple[str, int]:
    expected = model.predict(*_prepared(model, image))[0].pred_instances
    pairs = match(expected, *found[:3])
    differences = compare(expected, found, pairs)
    left = len(expected) + len(found[0]) - 2 * len(pairs)
    if left > _at_the_cut(expected, found[2], pairs):
        raise CheckError(
            f'of {len(expected)} detections at {tuple(image.shape[2:])} {len(pairs)} have a '
            f'counterpart within {BOX_TOLERANCE} px and {SCORE_TOLERANCE} of the score, the file '
            f'has {len(found[0])}')
    if differences.get('mask pixels', 0) > MASK_TOLERANCE:
        raise CheckError(f'masks at {tuple(image.shape[2:])} differ in '
                         f'{differences["mask pixels"]:.1e} of the pixels, allowed is '
                         f'{MASK_TOLERANCE:.0e}')
    return (f'{len(pairs)} detections' + ''.join(f', {name} {value:.1e}'
                                                 for name, value in differences.items()),
            len(pairs))


def match(expected: InstanceData, boxes: Tensor, labels: Tensor,
          scores: Tensor) -> list[tuple[int, int]]:
    """Pairs of detections that agree in label, box and score, each used once."""
    free = set(range(len(boxes)))
    pairs = []
    for i in range(len(expected)):
        for j in sorted(free):
            if labels[j] == expected.labels[i] \
                    and (boxes[j] - expected.bboxes[i]).abs().max() <= BOX_TOLERANCE \
                    and (scores[j] - expected.scores[i]).abs() <= SCORE_TOLERANCE:
                free.remove(j)
                pairs.append((i, j))
                break
    return pairs


def _at_the_cut(expected: InstanceData, scores: Tensor, pairs: list[tuple[int, int]]) -> int:
    """Detections without a counterpart that rounding alone may cut, having the lowest score."""
    if not len(expected) or not len(scores):
        return 0
    cut = max(expected.scores.min(), scores.min()) + SCORE_TOLERANCE
    left = ((expected.scores, {i for i, _ in pairs}), (scores, {j for _, j in pairs}))
    return sum(int(values[i] <= cut) for values, used in left
               for i in range(len(values)) if i not in used)


def compare(expected: InstanceData, found: Sequence[Tensor],
            pairs: list[tuple[int, int]]) -> dict[str, float]:
    """The largest differences of pairs: of boxes in pixels, of scores, of masks in a share of
    the image's pixels."""
    if not pairs:
        return {}
    i, j = map(list, zip(*pairs, strict=True))
    differences = {'boxes (px)': float((expected.bboxes[i] - found[0][j]).abs().max()),
                   'scores': float((expected.scores[i] - found[2][j]).abs().max())}
    if len(found) > 3:
        differences['mask pixels'] = float(
            (expected.masks[i] != found[3][j]).float().mean((1, 2)).max())
    return differences
