"""The photograph that commands behind docs/claims look at."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.cbook
import numpy as np
import torch
import torch.nn.functional as F
from claim import UserError
from PIL import Image
from torch import Tensor

# Of ImageNet, in units of 255.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def add_image_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--image``; its default is a photograph in the public domain, 512 x 600 pixels."""
    parser.add_argument(
        '--image', type=Path, metavar='FILE',
        default=matplotlib.cbook.get_sample_data('grace_hopper.jpg', asfileobj=False),
        help="photograph (default: matplotlib's sample grace_hopper.jpg)")


def square_photograph(file: Path, side: int) -> Tensor:
    """The largest square at the top of a photograph, resized.

    Args:
        file: Any format that Pillow reads.
        side: Side of the result; a smaller photograph is enlarged.

    Returns:
        ``(1, 3, side, side)``, float32 from 0 to 1.

    Raises:
        UserError: The file cannot be read as an image.
    """
    try:
        with Image.open(file) as image:
            pixels = np.array(image.convert('RGB'))
    except OSError as error:
        raise UserError(f'--image must be a readable image, got {file}: {error}') from error
    photograph = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    crop = min(photograph.shape[2:])
    left = (photograph.shape[3] - crop) // 2
    photograph = photograph[:, :, :crop, left:left + crop]
    return F.interpolate(photograph, (side, side), mode='bicubic', antialias=True).clamp(0, 1)


def normalized(photograph: Tensor) -> Tensor:
    """With the mean and spread of ImageNet, as a backbone takes it."""
    mean, std = (photograph.new_tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return (photograph - mean) / std
