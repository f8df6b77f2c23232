"""One training with ``--data`` on every kind of image and annotation that is not refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

# Scales as the shipped configs do; small images stay, and so do those without an object.
CONFIG = '''
model['backbone'] = dict(
    type='mmlaplacian.LaplacianFormer', arch=dict(
        embed_dims=(8, 16, 32, 64), depths=(1, ) * 4, num_heads=(1, ) * 4, mlp_ratios=(1, ) * 4))
train_dataloader['dataset'].update(
    filter_cfg=dict(filter_empty_gt=False, min_size=0), pipeline=[
        load, annotations, dict(type='Resize', scale=(160, 96), keep_ratio=True), pack])
for loader in (val_dataloader, test_dataloader):
    loader['dataset']['pipeline'][1]['scale'] = (160, 96)
optim_wrapper['optimizer'] = dict(type='AdamW', lr=1e-4)
'''


def gradient(width: int, height: int, depth: type = np.uint8) -> Image.Image:
    """A gray ramp over the whole range of 8 or 16 bits."""
    row = np.linspace(0, np.iinfo(depth).max, width).astype(depth)
    return Image.fromarray(np.broadcast_to(row, (height, width)).copy())


def turned() -> Image.Image:
    """Stored as 48 x 64, displayed as 64 x 48."""
    image = gradient(48, 64)
    image.getexif()[0x0112] = 6
    return image


IMAGES = {
    '16bit.png': lambda: gradient(64, 48, np.uint16),
    '16bit.tif': lambda: gradient(64, 48, np.uint16),
    'gray.png': lambda: gradient(64, 48),
    'bilevel.png': lambda: gradient(64, 48).convert('1'),
    'cmyk.jpg': lambda: gradient(64, 48).convert('CMYK'),
    'palette.png': lambda: gradient(64, 48).convert('RGB').quantize(16),
    'alpha.png': lambda: gradient(64, 48).convert('RGBA'),
    'turned.jpg': turned,
    'one_pixel.png': lambda: gradient(1, 1),
    'strip.png': lambda: gradient(4000, 30),
    'tower.png': lambda: gradient(30, 4000),
    'no_object.png': lambda: gradient(64, 48),
}


def make_data(root: Path) -> dict:
    """Every image with a polygon, a run length, a crowd and boxes that mmdet drops or cuts."""
    content = dict(images=[], annotations=[], categories=[dict(id=900, name='bird'),
                                                          dict(id=7, name='dog')])
    (root / 'images').mkdir(parents=True)
    for number, (name, make) in enumerate(IMAGES.items()):
        image = make()
        image.save(root / 'images' / name,
                   **(dict(exif=image.getexif()) if name == 'turned.jpg' else {}))
        width, height = image.size[::-1] if name == 'turned.jpg' else image.size
        content['images'].append(dict(id=name, file_name=name, width=width, height=height))
        if name == 'no_object.png':
            continue
        half = np.zeros((height, width), np.uint8, order='F')
        half[:(height + 1) // 2] = 1
        compressed = coco_mask.encode(half)
        compressed['counts'] = compressed['counts'].decode()
        box = [0, 0, width, (height + 1) // 2]
        plain = dict(size=[height, width], counts=[height * width])
        outline = [[0, 0, width, 0, width, height, 0, height]]
        for segmentation, bbox, area, crowd in (
                (outline, [0, 0, width, height], width * height, 0),
                (compressed, box, int(half.sum()), 0),
                (plain, [0, 0, width, height], width * height, 1),
                (outline, [-5, -5, width + 20, height + 20], width * height, 0),
                (outline, [width + 3, 0, 9, 9], 81, 0),
                (outline, box, 0, 0),
                (outline, [0, 0, 0, height], 5, 0)):
            content['annotations'].append(dict(
                id=len(content['annotations']), image_id=name, bbox=bbox, area=area,
                iscrowd=crowd, category_id=(900, 7)[number % 2], segmentation=segmentation))
    for split in ('train', 'val'):
        (root / f'{split}.json').write_text(json.dumps(content))
    return content


@pytest.mark.parametrize('kind', [pytest.param('box', marks=pytest.mark.soak), 'mask'])
def test_it_trains_and_evaluates(tool, make_config, tmp_path, kind):
    content = make_data(tmp_path / 'own')
    work_dir = tmp_path / 'run'
    assert tool('train').main([
        str(make_config(kind, CONFIG)), '--data', str(tmp_path / 'own'), '--train-ann',
        'train.json', '--val-ann', 'val.json', '--img-prefix', 'images', '--work-dir',
        str(work_dir)]) == 0
    log = next(work_dir.glob('*/*.log')).read_text()
    count = len(content['images'])
    assert f'Epoch(train) [1][{count // 2}/{count // 2}]' in log
    assert f'Epoch(val) [1][{count // 2}/{count // 2}]' in log
    dropped = 3 * (count - 1)
    assert f'{dropped} of {len(content["annotations"])} annotations of' in log
    weights = torch.load(work_dir / 'epoch_1.pth', weights_only=False)['state_dict']
    assert all(value.isfinite().all() for value in weights.values())
