"""``tools/check_dataset.py``: every finding, with the words and the effect of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image


@pytest.fixture
def found(tool, data_root, content):
    """Writes ``content`` and returns ``(effect, kind, detail)`` of every finding."""

    def run(needs_masks: bool = False, decodes: bool = True) -> list[tuple[str, str, str]]:
        path = data_root / 'train.json'
        path.write_text(json.dumps(content))
        findings = tool('dataset_findings').findings_of(
            tool('coco_file').read_structure(path, is_evaluated=True), path,
            data_root / 'images', needs_masks=needs_masks, decodes=decodes)
        return [(finding.effect, finding.kind, finding.detail) for finding in findings]

    return run


@pytest.fixture
def refused_by_training(tool, make_config, data_root):
    """What ``--data`` says of ``train.json``, or '' where it takes it."""

    def run(kind: str) -> str:
        coco_data = tool('coco_data')
        try:
            coco_data.apply_own_data(Config.fromfile(make_config(kind)), coco_data.OwnData(
                data_root, data_root / 'train.json', data_root / 'val.json',
                data_root / 'images', data_root / 'images'))
        except tool('cli').UserError as error:
            return str(error)
        return ''

    return run


def test_good_data(found):
    assert found(needs_masks=True) == []


def set_annotation(**change: object) -> Callable[[dict, Path], None]:
    return lambda content, folder: content['annotations'][3].update(change)


def set_image(**change: object) -> Callable[[dict, Path], None]:
    return lambda content, folder: content['images'][1].update(change)


def truncate(content: dict, folder: Path) -> None:
    (folder / '1.png').write_bytes((folder / '1.png').read_bytes()[:-20])


def write_text(content: dict, folder: Path) -> None:
    (folder / '1.png').write_text('<html>404</html>')


def damage_the_pixels(content: dict, folder: Path) -> None:
    """The file ends as it should; what it says in between makes no sense."""
    path = folder / '1.png'
    data = bytearray(path.read_bytes())
    start = data.index(b'IDAT') + 4
    data[start:start + 20] = bytes(20)
    path.write_bytes(data)


def lose_segmentation(content: dict, folder: Path) -> None:
    del content['annotations'][3]['segmentation']


REFUSED = [
    (set_annotation(category_id=8), 'annotation 3 has category_id 8, but the categories are 7'),
    (set_annotation(image_id=9), 'annotation 3 has image_id 9'),
    (set_annotation(bbox=[1, 2, 3]), 'annotation 3 has bbox [1, 2, 3]'),
    (set_annotation(bbox=['1', 2, 3, 4]), "annotation 3 has bbox ['1', 2, 3, 4]"),
    (set_annotation(area=float('inf')), 'annotation 3 has bbox'),
    (set_image(file_name='gone.png'), 'gone.png'),
    (set_image(width=63), '1.png is 64 x 64 pixels'),
    (truncate, '1.png of'),
    (write_text, 'cannot be read as an image'),
]


@pytest.mark.parametrize(('change', 'text'), REFUSED)
@pytest.mark.parametrize('decodes', [True, False])
def test_what_training_refuses(found, refused_by_training, content, data_root, change, text,
                               decodes):
    change(content, data_root / 'images')
    (effect, _, detail), = (f for f in found(decodes=decodes) if f[0] == 'refused')
    assert text in detail
    # In the same words, and the tool misses nothing that training sees.
    assert text in refused_by_training('box')


@pytest.mark.parametrize(('change', 'text'), [
    (lose_segmentation, 'annotation 3'),
    (set_annotation(segmentation=[[1, 2, 3, 4]]), 'the segmentation of annotation 3 is malformed'),
    (set_annotation(segmentation=dict(size=[64, 64], counts=[5])), 'covers 5 pixels')])
def test_masks_count_for_models_with_masks(found, refused_by_training, content, data_root, change,
                                           text):
    change(content, data_root / 'images')
    assert found() == []
    (effect, _, detail), = found(needs_masks=True)
    assert effect == 'refused' and text in detail
    assert text in refused_by_training('mask') and refused_by_training('box') == ''


def test_damaged_pixels_show_when_decoded(found, content, data_root):
    damage_the_pixels(content, data_root / 'images')
    assert found(decodes=False) == []
    assert found() == [('refused', 'image that cannot be decoded', 'image 1, 1.png')]


@pytest.mark.parametrize(('change', 'effect', 'text'), [
    (set_annotation(area=0), 'left out', 'annotation 3: its area is 0'),
    (set_annotation(bbox=[64, 0, 5, 5]), 'left out', 'lies outside the image'),
    (set_annotation(iscrowd=1), 'left out', 'annotation 3'),
    (set_annotation(bbox=[50, 50, 20, 10]), 'note', 'bbox [50, 50, 20, 10] in 64 x 64 pixels'),
    (set_annotation(bbox=[4, 6, 20, 20], category_id=27), 'note', 'annotation 3 repeats 2'),
    (set_image(file_name='0.png'), 'note', '0.png: images 0 and 1')])
def test_what_training_does_not_refuse(found, refused_by_training, content, data_root, change,
                                       effect, text):
    change(content, data_root / 'images')
    assert [(e, d) for e, _, d in found() if text in d and e == effect] != []
    assert refused_by_training('box') == ''


def test_images_and_categories_without_objects(found, content):
    content['annotations'] = [a for a in content['annotations']
                              if a['image_id'] != 2 and a['category_id'] != 17]
    content['categories'][0]['name'] = 'nut '
    details = [detail for _, _, detail in found()]
    assert details == ["'nut '", "'fig'", 'image 2, 2.png']


def test_no_annotations(found, content):
    content['annotations'] = []
    kinds = [kind for _, kind, _ in found()]
    assert kinds[0] == 'no annotations' and kinds.count('category without an annotation') == 3
    assert sum(kind.startswith('image without an object') for kind in kinds) == 4


@pytest.mark.parametrize(('kind', 'deep'), [
    ('gray16.png', True), ('rgb16.png', True), ('gray16.tif', True), ('gray8.png', False),
    ('rgb8.png', False), ('rgb8.jpg', False), ('gray8.tif', False)])
def test_deep_images_are_named(found, content, data_root, kind, deep):
    import cv2
    shape = (64, 64) if kind.startswith('gray') else (64, 64, 3)
    pixels = np.full(shape, 200, np.uint16 if '16' in kind else np.uint8)
    cv2.imwrite(str(data_root / 'images' / kind), pixels)
    content['images'][1]['file_name'] = kind
    expected = [('note', 'image of 16 bits, of which the upper 8 are read', f'image 1, {kind}')]
    assert found() == (expected if deep else [])


@pytest.mark.parametrize(('sides', 'told'), [((4000, 30), False), ((4000, 2), True),
                                             ((1, 1), False)])
def test_narrow_images(found, content, data_root, sides, told):
    Image.new('RGB', sides).save(data_root / 'images' / 'narrow.png')
    content['images'][1].update(file_name='narrow.png', width=sides[0], height=sides[1])
    content['annotations'] = [a for a in content['annotations'] if a['image_id'] != 1]
    assert any('too narrow' in kind for _, kind, _ in found()) == told


def test_the_table(tool, data_root, content, capsys):
    for number in (1, 2, 3, 4):
        content['annotations'][number]['area'] = 0
    content['images'][3]['file_name'] = 'gone.png'
    (data_root / 'train.json').write_text(json.dumps(content))
    main = tool('check_dataset').main
    args = [str(data_root / 'train.json'), '--img-prefix', str(data_root / 'images')]
    assert main([*args, '--examples', '2']) == 1
    assert capsys.readouterr().out.splitlines() == [
        f'{data_root}/train.json: 4 images, 8 annotations, 3 categories',
        'effect      count  finding',
        'refused         1  image that does not exist',
        f'                   - image 3, gone.png: no {data_root}/images/gone.png',
        '                   (refused: stops tools/train.py --data)',
        'left out        4  annotation that mmdet drops',
        '                   - annotation 1: its area is 0',
        '                   - annotation 2: its area is 0',
        '                   - ... and 2 more',
        '                   (left out: mmdet trains without it)']
    content['images'][3]['file_name'] = '3.png'
    (data_root / 'train.json').write_text(json.dumps(content))
    assert main([*args, '--examples', '0', '--masks', '--evaluated', '--no-decode']) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main([str(data_root / 'val.json'), '--img-prefix', str(data_root / 'images')]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ['nothing to report']


@pytest.mark.parametrize(('change', 'message'), [
    (lambda content: content['images'].append(content['images'][0]),
     'image id 0 occurs more than once'),
    (lambda content: content['annotations'].append(content['annotations'][0]),
     'annotation id 0 occurs more than once'),
    (lambda content: content['categories'].clear(), 'lists no categories'),
    (lambda content: content.pop('images'), "has no 'images'"),
    (lambda content: content['annotations'][2].pop('bbox'), "has no 'bbox'"),
])
def test_files_that_cannot_be_examined(refused, data_root, content, change, message):
    change(content)
    (data_root / 'train.json').write_text(json.dumps(content))
    assert message in refused('check_dataset', data_root / 'train.json', '--img-prefix',
                              data_root / 'images')


def test_paths_that_do_not_exist(refused, data_root):
    assert 'gone.json does not exist' in refused('check_dataset', data_root / 'gone.json')
    assert 'gone does not exist' in refused('check_dataset', data_root / 'train.json',
                                            '--img-prefix', data_root / 'gone')
    (data_root / 'bad.json').write_text('{"images": [')
    assert 'bad.json is not valid JSON' in refused('check_dataset', data_root / 'bad.json')


def test_a_negative_number_of_examples(tool, capsys):
    with pytest.raises(SystemExit):
        tool('check_dataset').main(['a.json', '--examples', '-1'])
    assert 'must be 0 or more, got -1' in capsys.readouterr().err
