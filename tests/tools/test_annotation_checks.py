"""Annotations and image files that mmdet or pycocotools would misread without a word."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image, ImageFile, PngImagePlugin
from pycocotools import mask as coco_mask


@pytest.fixture
def check(tool, make_config, data_root, content):
    """Writes ``content`` as ``train.json``, applies it; returns the lines for the user."""

    def run(kind: str = 'box', extra: str = '') -> list[str]:
        (data_root / 'train.json').write_text(json.dumps(content))
        coco_data = tool('coco_data')
        return coco_data.apply_own_data(Config.fromfile(make_config(kind, extra)), (
            coco_data.OwnData(data_root, data_root / 'train.json', data_root / 'val.json',
                              data_root / 'images', data_root / 'images')))

    return run


@pytest.fixture
def refused(tool, check):
    """Runs :func:`check`, which must refuse; returns the sentence."""

    def run(kind: str = 'box', extra: str = '') -> str:
        with pytest.raises(tool('cli').UserError) as error:
            check(kind, extra)
        assert '\n' not in str(error.value)
        return str(error.value)

    return run


UNUSED = [
    (dict(area=0), 'its area is 0'),
    (dict(bbox=[0.1, 0.1, 0.3, 0.4]), 'its bbox [0.1, 0.1, 0.3, 0.4] is less than a pixel'),
    (dict(bbox=[10, 10, -5, -5]), 'its bbox [10, 10, -5, -5] is less than a pixel'),
    (dict(bbox=[64, 10, 5, 5]), 'lies outside the image of 64 x 64 pixels'),
    (dict(bbox=[10, -5, 5, 5]), 'lies outside the image of 64 x 64 pixels'),
    (dict(ignore=1), 'it is marked as ignore'),
]


@pytest.mark.parametrize(('change', 'reason'), [
    *UNUSED, (dict(iscrowd=1), 'it is a crowd region (iscrowd)')])
def test_training_on_nothing_is_refused(refused, content, change, reason):
    for ann in content['annotations']:
        ann.update(change)
    message = refused()
    assert 'none of the 8 annotations' in message
    assert 'first annotation 0: ' in message
    assert reason in message


@pytest.mark.parametrize(('change', 'reason'), UNUSED)
def test_what_mmdet_drops_is_counted(tool, check, make_config, data_root, content, change,
                                     reason):
    for number in (2, 3):
        content['annotations'][number].update(change)
    lines = check()
    assert len(lines) == 1
    assert '2 of 8 annotations' in lines[0]
    assert 'first annotation 2: ' in lines[0]
    assert reason in lines[0]

    from mmdet.datasets import CocoDataset
    dataset = CocoDataset(ann_file=str(data_root / 'train.json'), pipeline=[], metainfo=dict(
        classes=('nut', 'fig', 'date')), data_prefix=dict(img=''),
        filter_cfg=dict(filter_empty_gt=True))
    assert sum(len(dataset.get_data_info(i)['instances']) for i in range(len(dataset))) == 6
    file = tool('coco_file').read_coco_file(
        data_root / 'train.json', needs_masks=False, is_evaluated=False)
    assert [image.has_object for image in file.images] == [True, False, True, True]
    assert file.num_training_images(True, 0) == len(dataset)


def test_crowds_are_no_loss(check, content):
    content['annotations'][0]['iscrowd'] = 1
    assert check() == []


@pytest.mark.parametrize('change', [
    dict(area=float('nan')), dict(bbox=[0, 0, float('inf'), 4]), dict(bbox=[float('nan')] * 4),
    dict(area=10**400), dict(bbox=[0, 0, 2**70, 4]), dict(bbox=[-1e300, 0, 1e300, 4])])
def test_numbers_must_be_finite(refused, content, change):
    content['annotations'][5].update(change)
    message = refused()
    assert 'annotation 5 has bbox' in message
    assert 'must be finite' in message


@pytest.mark.parametrize('value', [2, -1, None, 'no', 2**70])
def test_iscrowd_is_0_or_1(refused, content, value):
    content['annotations'][5]['iscrowd'] = value
    assert f'annotation 5 has iscrowd {value!r} instead of 0 or 1' in refused()


def encodings() -> list[dict]:
    """Masks of all kinds as run-length encodings, compressed and not."""
    rng = np.random.default_rng(0)
    masks = [np.zeros((64, 64)), np.ones((64, 64)), rng.random((64, 64)) < 0.5,
             rng.random((64, 64)) < 0.01]
    found = []
    for mask in masks:
        flat = np.concatenate([[0], mask.astype(np.uint8).T.ravel(), [2]])
        edges = np.flatnonzero(np.diff(flat))
        runs = np.diff(np.concatenate([[0], edges])).tolist()
        rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
        found += [dict(size=[64, 64], counts=runs),
                  dict(size=[64, 64], counts=rle['counts'].decode())]
    return found


def test_valid_masks_pass(check, content):
    for ann, rle in zip(content['annotations'], encodings(), strict=True):
        ann['segmentation'] = rle
    assert check('mask') == []


def test_run_lengths_are_decoded_as_pycocotools_encodes_them(tool):
    rles = encodings()
    for plain, compressed in zip(rles[::2], rles[1::2], strict=True):
        assert tool('coco_masks')._decoded(compressed['counts']) == plain['counts']


@pytest.mark.parametrize(('segmentation', 'reason'), [
    ('abc', "it is 'abc' instead of a list of polygons"),
    ([1, 2, 3, 4, 5, 6], 'polygon 0 is 1 instead of'),
    ([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]], 'polygon 1 is [1, 2, 3, 4] instead of'),
    ([[1, 2, 3, 4, 5, 6, 7]], 'polygon 0 is [1, 2, 3, 4, 5, 6, 7]'),
    ([['1', '2', '3', '4', '5', '6']], 'polygon 0 is'),
    ([[]], 'polygon 0 is []'),
    ([[1, 2, 3, 4, 5, float('nan')]], 'polygon 0 is'),
    ([[1, 2, 3, 4, 5, 10**400]], 'polygon 0 is'),
    ([[1, 2, 3, 4, 5, 641]], 'reaches more than 10 times the sides of its image of 64 x 64'),
    ([[0] * 6, [1, 2, -1e300, 4, 5, 6]], 'polygon 1 is [1, 2, -1e+300, 4, 5, 6], which reaches'),
    (dict(size=[32, 32], counts=[1024]), 'the size of its run-length encoding is [32, 32]'),
    (dict(counts=[4096]), 'is None instead of [height, width]'),
    (dict(size=[64, 64]), 'counts None'),
    (dict(size=[64, 64], counts=[96, 4001]), 'covers 4097 pixels, but the image has 4096'),
    (dict(size=[64, 64], counts=[-1, 4097]), 'neither a list of lengths'),
    (dict(size=[64, 64], counts=[4096.0]), 'neither a list of lengths'),
    (dict(size=[64, 64], counts='zzzz'), "have the character 'z'"),
    (dict(size=[64, 64], counts='00P'), 'end inside a number'),
    (dict(size=[64, 64], counts='0'), 'covers 0 pixels'),
    (dict(size=[64, 64], counts='@'), 'neither a list of lengths'),
])
def test_malformed_masks_are_refused(refused, check, content, segmentation, reason):
    content['annotations'][3]['segmentation'] = segmentation
    message = refused('mask')
    assert 'train.json: the segmentation of annotation 3 is malformed: ' in message
    assert reason in message
    # A box detector never reads them.
    assert check('box') == []


def write_turned(path: Path, orientation: int) -> None:
    """A 64 x 48 image whose EXIF orientation is ``orientation``."""
    image = Image.new('RGB', (64, 48))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(path, exif=exif)


@pytest.mark.parametrize('suffix', ['jpg', 'png', 'webp', 'tif'])
def test_sizes_are_those_that_mmcv_reads(tool, tmp_path, suffix):
    import mmcv
    coco_file, check_sizes = tool('coco_file'), tool('image_headers').check_image_sizes
    path = tmp_path / f'turned.{suffix}'
    for orientation in (1, 3, 6, 8):
        write_turned(path, orientation)
        height, width = mmcv.imread(str(path)).shape[:2]
        for sides, fits in (((width, height), True), ((height, width), False)):
            image = coco_file.CocoImage(7, path.name, *sides, True, True)
            file = coco_file.CocoFile(tmp_path / 'a.json', ('nut', ), (image, ), 0, 0, '')
            if fits:
                check_sizes(file, tmp_path)
                continue
            with pytest.raises(tool('cli').UserError,
                               match=f'image 7, {path} is {width} x {height} pixels'):
                check_sizes(file, tmp_path)


def test_turned_images_are_explained(data_root, check, refused, content):
    write_turned(data_root / 'images' / 'turned.jpg', 6)
    content['images'][2].update(file_name='turned.jpg', width=64, height=48)
    message = refused()
    assert 'turned.jpg is 48 x 64 pixels (width x height), but' in message
    assert 'train.json says 64 x 48' in message
    assert 'must be in the displayed orientation' in message
    assert check('box', "load['color_type'] = 'color_ignore_orientation'\n"
                 "train_dataloader['dataset']['pipeline'] = [load]") == []


def test_other_sizes_are_refused(refused, content):
    content['images'][1].update(width=640, height=32)
    message = refused()
    assert '1.png is 64 x 64 pixels (width x height)' in message
    assert 'says 640 x 32' in message
    assert 'orientation' not in message


@pytest.mark.parametrize('text', ['', 'hello'])
def test_files_that_are_no_images(refused, data_root, content, text):
    (data_root / 'images' / 'bad.jpg').write_text(text)
    content['images'][1]['file_name'] = 'bad.jpg'
    assert f'image 1, {data_root / "images" / "bad.jpg"} of ' in (message := refused())
    assert 'cannot be read as an image' in message


def test_pixels_are_not_decoded(check, monkeypatch):
    def decode(self: Image.Image) -> None:
        raise AssertionError('20 000 images would take minutes')

    monkeypatch.setattr(ImageFile.ImageFile, 'load', decode)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, 'load', decode)
    assert check() == []


def test_a_byte_order_mark_is_named(refused, data_root, content):
    (data_root / 'val.json').write_bytes(b'\xef\xbb\xbf' + json.dumps(content).encode())
    assert 'val.json starts with a byte order mark (BOM)' in refused()
