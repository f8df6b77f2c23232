"""``tools/resized_images.py``: images that resizing would leave without rows or columns."""

from __future__ import annotations

import json

import mmcv
import numpy as np
import pytest
from PIL import Image

PLAIN = dict(type='Resize', scale=(64, 64), keep_ratio=True)
CROP = dict(type='RandomCrop', crop_size=(8, 8))
LOAD = dict(type='LoadImageFromFile')


@pytest.mark.parametrize(('step', 'scales'), [
    (PLAIN, [(64, 64)]),
    (dict(PLAIN, scale=64), [(64, 64)]),
    (dict(PLAIN, keep_ratio=False), []),
    (dict(PLAIN, scale_factor=.5, scale=None), []),
    (dict(type='RandomResize', scale=[(60, 40), (50, 90)], keep_ratio=True), [(50, 40)]),
    (dict(type='RandomResize', scale=(60, 40), ratio_range=(.1, 2.), keep_ratio=True), [(6, 4)]),
    (dict(type='RandomChoiceResize', scales=[(60, 40), (50, 90)], keep_ratio=True),
     [(60, 40), (50, 90)])])
def test_smallest_scales(tool, step, scales):
    assert tool('resized_images').smallest_scales(step) == scales


@pytest.mark.parametrize(('pipeline', 'count'), [
    ([LOAD, PLAIN, PLAIN], 1), ([LOAD, CROP, PLAIN], 0), ([LOAD], 0),
    ([LOAD, dict(type='RandomChoice', transforms=[[PLAIN], [CROP, PLAIN], [PLAIN]]), PLAIN], 2),
    ([LOAD, dict(type='RandomApply', transforms=dict(PLAIN)), PLAIN], 1)])
def test_first_resizes(tool, pipeline, count):
    assert list(tool('resized_images').first_resizes(pipeline)) == [PLAIN] * count


@pytest.mark.parametrize(('split', 'tool_name'), [('train', 'train'), ('val', 'train'),
                                                  ('val', 'test')])
def test_b38_an_image_that_vanishes_is_refused(tool, trained, tmp_path, capsys, split,
                                               tool_name):
    """4000 x 30 within 64 x 64, where mmcv would hand OpenCV an image without rows."""
    with pytest.raises(Exception, match='resize'):
        mmcv.imresize(np.zeros((30, 4000, 3), np.uint8), mmcv.rescale_size((4000, 30), (64, 64)))
    root = tmp_path / 'own'
    root.mkdir()
    (root / 'images').symlink_to(trained['root'] / 'images')
    Image.new('RGB', (4000, 30)).save(tmp_path / 'strip.png')
    for name in ('train', 'val'):
        content = json.loads((trained['root'] / f'{name}.json').read_text())
        if name == split:
            content['images'].append(dict(id=77, file_name=str(tmp_path / 'strip.png'),
                                          width=4000, height=30))
        (root / f'{name}.json').write_text(json.dumps(content))
    pipeline = [LOAD, dict(type='LoadAnnotations', with_bbox=True, with_mask=True), PLAIN,
                dict(type='PackDetInputs')]
    config = tmp_path / 'narrow.py'
    config.write_text(f'_base_ = {str(trained["config"])!r}\n' + ''.join(
        f'{name}_dataloader = dict(dataset=dict(pipeline={pipeline!r}{rules}))\n'
        for name, rules in (('train', ', filter_cfg=dict(min_size=0)'), ('val', ''),
                            ('test', ''))))
    arguments = [str(config), *([str(trained['checkpoint'])] if tool_name == 'test' else []),
                 '--data', str(root), '--val-ann', 'val.json', '--img-prefix', 'images',
                 '--work-dir', str(tmp_path / 'run')]
    if tool_name == 'train':
        arguments += ['--train-ann', 'train.json']
    assert tool(tool_name).main(arguments) == 2
    dataloader = 'test' if tool_name == 'test' else split
    said = capsys.readouterr().err
    assert 'image 77, ' in said and (
        f'is 4000 x 30 pixels (width x height), which {dataloader}_dataloader resizes to 64 x 0, '
        'within (64, 64)') in said
    assert not (tmp_path / 'run').exists()


def test_images_that_training_leaves_out_are_not_refused(tool, trained, tmp_path):
    content = json.loads((trained['root'] / 'train.json').read_text())
    content['images'].append(dict(id=77, file_name='strip.png', width=4000, height=30))
    file = tmp_path / 'train.json'
    file.write_text(json.dumps(content))
    dataset = dict(type='CocoDataset', ann_file=str(file), pipeline=[PLAIN],
                   filter_cfg=dict(min_size=32))
    check = tool('resized_images').check_resized_sizes
    check(dict(train_dataloader=_Loader(dataset)), ('train', ))
    with pytest.raises(tool('cli').UserError, match='image 77'):
        check(dict(val_dataloader=_Loader(dataset)), ('val', ))


class _Loader:
    """Attribute access, as of a config."""

    def __init__(self, dataset: dict) -> None:
        self.dataset = dataset
