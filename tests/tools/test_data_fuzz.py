"""Annotation and image files damaged at drawn places: refused in a sentence, or read by mmdet."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, configuration, given, settings, strategies
from mmengine.config import Config
from PIL import Image

FEW, MANY = 40, 3000
JUNK = (None, True, False, 0, 1, -1, 3, 0.5, -0.5, 1e-9, 1e300, 2**31, 2**70, 10**400,
        float('nan'), float('inf'), '', 'a', '0', '\0', 'é', '../0.png', '/dev/null', 'sub/0.png',
        [], {}, [1], [[]], [None], dict(a=1), [0, 0, 9, 9], [1, 2, 3, 4, 5, 6],
        [[1, 2, 3, 4, 5, 6]], dict(size=[64, 64], counts=[4096]),
        dict(size=[64, 64], counts='PPPP'))
FORMATS = ('PNG', 'JPEG', 'GIF', 'BMP', 'TIFF', 'WEBP')

counts = pytest.mark.parametrize('count', [FEW, pytest.param(MANY, marks=pytest.mark.soak)])


def run_drawn(check: Callable[[random.Random], None], count: int, folder: Path) -> None:
    """Draws without a random seed, and shrinks a case that fails."""
    configuration.set_hypothesis_home_dir(folder)
    settings(max_examples=count, derandomize=True, database=None, deadline=None,
             suppress_health_check=[HealthCheck.too_slow])(
        given(strategies.randoms(use_true_random=False))(check))()


def places(node: object) -> list[tuple[dict | list, object]]:
    """Every container of a nest with each of its keys or indices."""
    found = []
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(
        node, list) else ()
    for key in keys:
        found += [(node, key), *places(node[key])]
    return found


def damage(content: dict, draw: random.Random) -> None:
    """Up to three values replaced, removed or repeated."""
    for _ in range(draw.randint(1, 3)):
        spots = places(content)
        if not spots:
            return
        container, key = draw.choice(spots)
        kind = draw.choice(['junk', 'junk', 'swap', 'remove', 'repeat'])
        if kind == 'junk':
            container[key] = copy.deepcopy(draw.choice(JUNK))
        elif kind == 'swap':
            other, place = draw.choice(spots)
            container[key] = copy.deepcopy(other[place])
        elif kind == 'remove':
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))


def read_by_mmdet(cfg: Config) -> None:
    """Loads what training and evaluation load."""
    from mmdet.registry import DATASETS
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    for split in ('train', 'val'):
        dataset = DATASETS.build(cfg[f'{split}_dataloader'].dataset)
        if split == 'train':
            assert len(dataset) > 0
        for index in range(len(dataset)):
            dataset.prepare_data(index)
    truth = COCO(cfg.val_evaluator.ann_file)
    boxes = [dict(image_id=image, category_id=category, bbox=[1, 2, 20, 30], score=0.5)
             for image in truth.getImgIds() for category in truth.getCatIds()]
    evaluation = COCOeval(truth, truth.loadRes(boxes), 'bbox')
    evaluation.evaluate()
    evaluation.accumulate()


@counts
@pytest.mark.parametrize('kind', ['box', 'mask'])
def test_damaged_annotations(tool, make_config, data_root, content, capsys, tmp_path, kind,
                             count):
    coco_data, user_error = tool('coco_data'), tool('cli').UserError
    config = Config.fromfile(make_config(kind))
    paths = data_root / 'train.json', data_root / 'val.json'
    accepted = 0

    def check(draw: random.Random) -> None:
        nonlocal accepted
        damaged = copy.deepcopy(content)
        damage(damaged, draw)
        for path in paths:
            path.write_text(json.dumps(damaged))
        cfg = copy.deepcopy(config)
        try:
            coco_data.apply_own_data(cfg, coco_data.OwnData(
                data_root, *paths, data_root / 'images', data_root / 'images'))
            coco_data.num_training_images(cfg)
        except user_error as error:
            assert '\n' not in str(error) and '.json' in str(error)
            return
        accepted += 1
        read_by_mmdet(cfg)

    run_drawn(check, count, tmp_path)
    assert 0 < accepted < count


@counts
def test_damaged_images(tool, tmp_path, count):
    from mmcv.transforms import LoadImageFromFile

    coco_file, headers = tool('coco_file'), tool('image_headers')
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    whole = {}
    for name in FORMATS:
        stream = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(pixels).save(stream, name, **(dict(exif=exif) if name in (
            'PNG', 'JPEG', 'WEBP', 'TIFF') else {}))
        whole[name] = stream.getvalue()
    path = tmp_path / 'image'
    taken = 0

    def check(draw: random.Random) -> None:
        nonlocal taken
        content = bytearray(whole[draw.choice(FORMATS)])
        for _ in range(draw.randint(1, 4)):
            if draw.random() < 0.2:
                del content[draw.randint(0, len(content)):]
            elif content:
                # Where the structure is, mostly.
                last = draw.choice([30, 120, len(content)])
                content[draw.randint(0, min(last, len(content)) - 1)] = draw.randint(0, 255)
        path.write_bytes(content)
        for sides in ((60, 40), (40, 60)):
            image = coco_file.CocoImage(3, 'image', *sides, True, True)
            fault = headers.image_fault(image, tmp_path, Path('a.json'), obeys_exif=True)
            if fault is None and headers.is_decodable(path):
                taken += 1
                read = LoadImageFromFile()(dict(img_path=str(path)))['img']
                # Of damaged EXIF data OpenCV and Pillow may read another orientation.
                assert sorted(read.shape) == [3, *sorted(sides)]
                headers.has_deep_pixels(path)
            elif fault is not None:
                assert fault.startswith(f'image 3, {path}') and '\n' not in fault

    run_drawn(check, count, tmp_path)
    assert taken > 0
