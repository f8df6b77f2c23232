"""The images of ``distant_parts.py`` as a COCO data set.

Every region is an object. Its class is the colour of the dot on its stripes, which one region of
each kind shows and the others do not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import distant_parts
import torch
from PIL import Image
from recall_task import REGIONS, layout
from tqdm import tqdm

CLASSES = ('red', 'green', 'blue', 'yellow', 'magenta', 'cyan', 'orange', 'brown')
# Half of distant_parts.py's 128 px: a detector needs more steps than a linear layer on cells.
SIDE = 64
_WIDTH = SIDE // REGIONS
_CHUNK = 50


def write_set(out: Path, num_train: int, num_val: int, seed: int) -> None:
    """Writes ``OUT/{train,val}/*.png`` and ``OUT/annotations/{train,val}.json``.

    Args:
        out: A folder that is there has a complete set and is left as it is.
        num_train: Training images.
        num_val: Validation images.
        seed: Of all images.
    """
    if out.exists():
        return
    part = out.with_name(out.name + '.part')
    shutil.rmtree(part, ignore_errors=True)
    for i, (split, count) in enumerate((('train', num_train), ('val', num_val))):
        _write_split(part, split, count, torch.Generator().manual_seed(2 * seed + i))
    part.rename(out)


def _write_split(out: Path, split: str, count: int, generator: torch.Generator) -> None:
    folder = out / split
    folder.mkdir(parents=True)
    images, annotations = [], []
    for first in tqdm(range(0, count, _CHUNK), desc=f'{split} images'):
        size = min(_CHUNK, count - first)
        # The same layout as the images of the next line.
        twin = torch.Generator()
        twin.set_state(generator.get_state())
        types, colours, _ = layout(size, twin)
        pixels, _ = distant_parts.batch(size, generator, SIDE)
        pixels = (pixels + .5).clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1)
        labels = colours.gather(1, types)
        for own, regions in zip(pixels, labels.tolist(), strict=True):
            images.append(dict(id=len(images) + 1, file_name=f'{len(images) + 1:06}.png',
                               width=SIDE, height=SIDE))
            Image.fromarray(own.numpy()).save(folder / images[-1]['file_name'], compress_level=1)
            for place, label in enumerate(regions):
                annotations.append(_annotation(len(annotations) + 1, images[-1]['id'], place,
                                               label))
    file = out / 'annotations' / f'{split}.json'
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(dict(
        images=images, annotations=annotations,
        categories=[dict(id=i + 1, name=name) for i, name in enumerate(CLASSES)])),
        encoding='utf-8')


def _annotation(number: int, image: int, place: int, label: int) -> dict[str, object]:
    row, column = divmod(place, REGIONS)
    box = [column * _WIDTH, row * _WIDTH, _WIDTH, _WIDTH]
    return dict(id=number, image_id=image, category_id=label + 1, bbox=box, area=_WIDTH**2,
                iscrowd=0)
