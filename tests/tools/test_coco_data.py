"""Own data in one line: what the flags change, and what they refuse before any work."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import PARAM_SCHEDULERS


def parse(tool, flags: list[str], needs_train: bool = True):
    parser = argparse.ArgumentParser()
    coco_data = tool('coco_data')
    coco_data.add_data_arguments(parser)
    return coco_data.parse_own_data(parser, parser.parse_args(flags), needs_train=needs_train)


@pytest.fixture
def apply(tool) -> Callable[[Path, list[str]], Config]:
    """Loads a config and applies the flags."""

    def run(config: Path, flags: list[str], needs_train: bool = True) -> Config:
        cfg = Config.fromfile(config)
        tool('coco_data').apply_own_data(cfg, parse(tool, flags, needs_train))
        return cfg

    return run


@pytest.mark.parametrize('kind', ['box', 'mask'])
def test_everything_is_set(apply, make_config, data_root, data_flags, kind):
    cfg = apply(make_config(kind), data_flags)
    for split, file in (('train', 'train.json'), ('val', 'val.json'), ('test', 'val.json')):
        dataset = cfg[f'{split}_dataloader'].dataset
        assert dataset.ann_file == str(data_root / file)
        assert dataset.data_prefix == dict(img=str(data_root / 'images'))
        assert dataset.metainfo.classes == ('nut', 'fig', 'date')
        assert len(set(dataset.metainfo.palette)) == 3
    assert cfg.val_evaluator.ann_file == cfg.test_evaluator.ann_file == str(
        data_root / 'val.json')
    heads = ([cfg.model.bbox_head] if kind == 'box' else
             [cfg.model.roi_head.bbox_head, cfg.model.roi_head.mask_head])
    assert [head.num_classes for head in heads] == [3] * len(heads)


def test_cascade_heads_and_wrappers(apply, make_config, data_root, data_flags):
    config = make_config('box', '''
train_dataloader = dict(batch_size=2, dataset=dict(
    type='RepeatDataset', times=3, dataset=dict(
        type='ClassBalancedDataset', oversample_thr=0.1, dataset=train_dataloader['dataset'])))
model['bbox_head'] = [dict(num_classes=80), dict(num_classes=80)]
model['rpn_head'] = dict(type='RPNHead', num_classes=1)
''')
    cfg = apply(config, data_flags)
    assert cfg.train_dataloader.dataset.dataset.dataset.ann_file == str(data_root / 'train.json')
    assert [head.num_classes for head in cfg.model.bbox_head] == [3, 3]
    assert cfg.model.rpn_head.num_classes == 1


def test_labels_follow_the_order_of_the_file(apply, make_config, data_root, data_flags, content):
    content['categories'].reverse()  # date 27, fig 17, nut 7
    for name in ('train', 'val'):
        (data_root / f'{name}.json').write_text(json.dumps(content))
    cfg = apply(make_config(), data_flags)

    from mmdet.registry import DATASETS
    instances = DATASETS.build(cfg.val_dataloader.dataset).get_data_info(0)['instances']
    ids = [ann['category_id'] for ann in content['annotations'] if ann['image_id'] == 0]
    names = {category['id']: category['name'] for category in content['categories']}
    assert [cfg.val_dataloader.dataset.metainfo.classes[i['bbox_label']] for i in instances] == [
        names[i] for i in ids]


def test_names_survive_the_dumped_config(apply, make_config, data_root, data_flags, content,
                                         tmp_path):
    names = ["O'Neil's nut", 'a "quoted" \\ name', 'Haselnuß']
    for category, name in zip(content['categories'], names, strict=True):
        category['name'] = name
    for file in ('train', 'val'):
        (data_root / f'{file}.json').write_text(json.dumps(content))
    cfg = apply(make_config(), data_flags)
    cfg.dump(tmp_path / 'dumped.py')
    dumped = Config.fromfile(tmp_path / 'dumped.py')
    assert list(dumped.train_dataloader.dataset.metainfo.classes) == names


def test_relative_paths_become_absolute(apply, make_config, data_root, monkeypatch):
    monkeypatch.chdir(data_root.parent)
    (data_root / 'images').rename(data_root.parent / 'elsewhere')
    cfg = apply(make_config(), [
        '--data', 'own', '--train-ann', str(data_root / 'train.json'), '--val-ann', 'val.json',
        '--img-prefix', str(data_root.parent / 'elsewhere')])
    assert cfg.train_dataloader.dataset.data_prefix.img == str(data_root.parent / 'elsewhere')
    assert cfg.val_dataloader.dataset.ann_file == str(data_root / 'val.json')


def test_testing_needs_no_training_annotations(apply, make_config, data_root):
    (data_root / 'train.json').unlink()
    cfg = apply(make_config(), ['--data', str(data_root), '--val-ann', 'val.json',
                                '--img-prefix', 'images'], needs_train=False)
    assert cfg.test_dataloader.dataset.ann_file == str(data_root / 'val.json')
    assert cfg.model.bbox_head.num_classes == 3


@pytest.mark.parametrize('needs_train', [True, False])
def test_two_image_folders(apply, make_config, data_root, data_flags, needs_train):
    (data_root / 'elsewhere').mkdir()
    for image in (data_root / 'images').iterdir():
        image.rename(data_root / 'elsewhere' / image.name)
        if needs_train:
            (data_root / 'images' / image.name).symlink_to(data_root / 'elsewhere' / image.name)
    flags = [*data_flags, '--val-img-prefix', 'elsewhere']
    if not needs_train:
        del flags[2:4]
    cfg = apply(make_config(), flags, needs_train)
    folders = [cfg[f'{split}_dataloader'].dataset.data_prefix.img
               for split in ('train', 'val', 'test')]
    assert folders[1:] == [str(data_root / 'elsewhere')] * 2
    assert (folders[0] == str(data_root / 'images')) == needs_train


@pytest.mark.parametrize('ann', ['val.json', 'train.json'])
@pytest.mark.parametrize(('folder', 'flag'), [('images', '--val-img-prefix'),
                                              ('elsewhere', '--img-prefix')])
def test_both_image_folders_are_checked(tool, apply, make_config, data_root, data_flags, folder,
                                        flag, ann):
    """Also where one annotation file serves both."""
    (data_root / 'elsewhere').mkdir()
    for image in (data_root / 'images').iterdir():
        (data_root / 'elsewhere' / image.name).symlink_to(image)
    empty = 'elsewhere' if folder == 'images' else 'images'
    (data_root / empty / '2.png').unlink()
    (data_root / empty / '2.png').mkdir()
    flags = [*data_flags, '--val-img-prefix', 'elsewhere']
    flags[5] = ann
    with pytest.raises(tool('cli').UserError) as error:
        apply(make_config(), flags)
    assert f'1 of 4 images of {data_root}/' in str(error.value)
    assert f'e.g. image 2, {data_root / empty / "2.png"}; set ' in str(error.value)
    assert flag in str(error.value)
    assert ('--val-img-prefix' in str(error.value)) == (folder == 'images')


@pytest.mark.parametrize(('flags', 'message'), [
    (['--data', 'own'], '--data needs --train-ann and --val-ann'),
    (['--data', 'own', '--train-ann', 'a.json'], '--data needs --val-ann'),
    (['--val-ann', 'a.json'], '--val-ann needs --data ROOT'),
    (['--img-prefix', 'images'], '--img-prefix needs --data ROOT'),
    (['--val-img-prefix', 'images'], '--val-img-prefix needs --data ROOT'),
])
def test_flags_that_do_not_go_together(tool, capsys, flags, message):
    with pytest.raises(SystemExit) as exit_info:
        parse(tool, flags)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def break_categories(content: dict) -> None:
    content['categories'][1]['name'] = 'nut'


def break_category_id(content: dict) -> None:
    content['categories'][1]['id'] = 7


def break_category_of_annotation(content: dict) -> None:
    content['annotations'][3]['category_id'] = 99


def break_image_of_annotation(content: dict) -> None:
    content['annotations'][3]['image_id'] = 99


def break_box(content: dict) -> None:
    content['annotations'][3]['bbox'] = [1, 2, 3]


def drop(section: str, key: str | None = None) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        if key is None:
            del content[section]
        else:
            del content[section][2][key]
    return change


def empty(section: str) -> Callable[[dict], None]:
    def change(content: dict) -> None:
        content[section] = []
    return change


def number_as_file_name(content: dict) -> None:
    content['images'][2]['file_name'] = 12


def lose_an_image(content: dict) -> None:
    content['images'][2]['file_name'] = 'lost.png'


def rename_category(content: dict) -> None:
    content['categories'][2]['name'] = 'Date'


def reorder_categories(content: dict) -> None:
    content['categories'].reverse()


@pytest.mark.parametrize(('change', 'message'), [
    (break_categories, "category name 'nut' occurs more than once"),
    (break_category_id, 'category id 7 occurs more than once'),
    (break_category_of_annotation,
     'annotation 3 has category_id 99, but the categories are 7, 17'),
    (break_image_of_annotation, 'annotation 3 has image_id 99'),
    (break_box, 'annotation 3 has bbox [1, 2, 3]'),
    (drop('categories'), "has no 'categories'"),
    (drop('images'), "has no 'images'"),
    (drop('annotations'), "has no 'annotations'"),
    (drop('annotations', 'area'), "entry 2 of 'annotations' has no 'area'"),
    (drop('images', 'height'), "entry 2 of 'images' has no 'height'"),
    (drop('annotations', 'segmentation'),
     '1 of 8 annotations have no segmentation (first: annotation 2)'),
    (empty('categories'), 'lists no categories'),
    (empty('images'), 'lists no images'),
    (empty('annotations'), 'has no image with annotations'),
    (number_as_file_name, "entry 2 of 'images' has file_name 12, not of type str"),
    (lose_an_image, 'e.g. image 2, '),
    (rename_category, 'lists nut, fig, Date'),
    (reorder_categories, 'lists date, fig, nut'),
])
def test_bad_annotations_are_refused(tool, apply, make_config, data_root, data_flags, content,
                                     change, message):
    change(content)
    (data_root / 'train.json').write_text(json.dumps(content))
    with pytest.raises(tool('cli').UserError) as error:
        apply(make_config('mask'), data_flags)
    assert message in str(error.value)
    assert str(data_root / 'train.json') in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(('text', 'message'), [
    (b'{"images": [1, 2,\n  oops]}', 'not valid JSON: Expecting value at line 2, column 3'),
    (b'[]', 'must hold a JSON object with images, annotations and categories, not a list'),
    (b'\xff\xfe\x00', 'is not UTF-8 text'),
    (None, 'does not exist'),
])
def test_files_that_are_no_annotations(tool, apply, make_config, data_root, data_flags, text,
                                       message):
    (data_root / 'val.json').unlink()
    if text is not None:
        (data_root / 'val.json').write_bytes(text)
    with pytest.raises(tool('cli').UserError, match='val.json') as error:
        apply(make_config(), data_flags)
    assert message in str(error.value)


def test_evaluation_needs_iscrowd_and_training_does_not(tool, apply, make_config, data_root,
                                                        data_flags, content):
    for ann in content['annotations']:
        del ann['iscrowd']
    (data_root / 'train.json').write_text(json.dumps(content))
    apply(make_config(), data_flags)
    (data_root / 'val.json').write_text(json.dumps(content))
    with pytest.raises(tool('cli').UserError, match="val.json: entry 0 .* has no 'iscrowd'"):
        apply(make_config(), data_flags)


def test_boxes_are_enough_for_a_box_detector(apply, make_config, data_root, data_flags, content):
    for ann in content['annotations']:
        del ann['segmentation']
    (data_root / 'train.json').write_text(json.dumps(content))
    assert apply(make_config('box'), data_flags).model.bbox_head.num_classes == 3


@pytest.mark.parametrize(('index', 'value', 'message'), [
    (1, 'nowhere', 'nowhere is not a folder'),
    (7, 'pictures', 'pictures does not exist; --img-prefix is relative to --data'),
    (7, '', '4 of 4 images of'),
])
def test_folders_that_do_not_fit(tool, apply, make_config, data_flags, index, value, message):
    data_flags[index] = value
    with pytest.raises(tool('cli').UserError) as error:
        apply(make_config(), data_flags)
    assert message in str(error.value)


def test_the_second_folder_must_exist(tool, apply, make_config, data_flags):
    with pytest.raises(tool('cli').UserError) as error:
        apply(make_config(), [*data_flags, '--val-img-prefix', 'gone'])
    assert 'gone does not exist; --val-img-prefix is relative to --data' in str(error.value)


def test_other_data_set_types_are_refused(tool, apply, make_config, data_flags):
    config = make_config('box', "train_dataloader['dataset']['type'] = 'VOCDataset'")
    with pytest.raises(tool('cli').UserError, match='needs one CocoDataset.*VOCDataset'):
        apply(config, data_flags)


@pytest.mark.parametrize(('images', 'batch', 'drop_last', 'processes', 'end'), [
    (18, 2, False, 1, 9),
    (19, 2, False, 1, 10),
    (19, 2, True, 1, 9),
    (19, 2, False, 4, 3),
    (4, 8, False, 1, 2),
    (5000, 2, False, 1, 500),
])
def test_warm_up_lasts_at_most_an_epoch(tool, make_config, monkeypatch, images, batch, drop_last,
                                        processes, end):
    monkeypatch.setenv('WORLD_SIZE', str(processes))
    cfg = Config.fromfile(make_config())
    cfg.launcher = 'pytorch' if processes > 1 else 'none'
    cfg.train_dataloader.update(batch_size=batch, drop_last=drop_last)
    changes = tool('coco_data').shorten_warm_up(cfg, images)
    assert cfg.param_scheduler[0].end == end
    if end == 500:
        assert changes == []
    else:
        assert len(changes) == 1
        assert f'warm-up shortened from 500 to {end} iterations' in changes[0]
        assert f'{images} images, batch size {batch}, {processes} process' in changes[0]


@pytest.mark.parametrize('iters', [1, 2, 7])
def test_the_learning_rate_arrives(tool, make_config, iters):
    cfg = Config.fromfile(make_config())
    cfg.train_dataloader.batch_size = 1
    tool('coco_data').shorten_warm_up(cfg, iters)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = PARAM_SCHEDULERS.build(cfg.param_scheduler[0], default_args=dict(
        optimizer=optimizer))
    rates = []
    for _ in range(iters + 1):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.001)
    assert rates[-1] == pytest.approx(1.0)


def test_a_follower_starts_where_the_warm_up_ends(tool, make_config):
    cfg = Config.fromfile(make_config())
    cfg.param_scheduler[1] = dict(type='CosineAnnealingLR', by_epoch=False, begin=500, T_max=900)
    tool('coco_data').shorten_warm_up(cfg, 18)
    assert cfg.param_scheduler[1]['begin'] == cfg.param_scheduler[0].end == 9


@pytest.mark.parametrize('key', ['param_scheduler', 'param_scheduler.0.end'])
def test_a_chosen_warm_up_stays(tool, make_config, key):
    cfg = Config.fromfile(make_config())
    changes = tool('coco_data').shorten_warm_up(cfg, 18, chosen={key: 500})
    assert cfg.param_scheduler[0].end == 500
    assert changes[0].startswith('warm-up left at the 500 iterations of --cfg-options')


def test_training_images_are_those_that_mmdet_keeps(tool, apply, make_config, data_root,
                                                    data_flags, content):
    content['images'][0]['width'] = 31  # filter_cfg.min_size is 32
    content['images'][0]['file_name'] = 'narrow.png'
    cv2.imwrite(str(data_root / 'images' / 'narrow.png'), np.zeros((64, 31, 3), np.uint8))
    content['annotations'] = [ann for ann in content['annotations'] if ann['image_id'] != 1]
    (data_root / 'train.json').write_text(json.dumps(content))
    cfg = apply(make_config(), data_flags)

    from mmdet.registry import DATASETS
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    assert tool('coco_data').num_training_images(cfg) == len(dataset) == 2

    cfg.train_dataloader.dataset.filter_cfg.min_size = 65
    with pytest.raises(tool('cli').UserError, match='no image .* passes the filter'):
        tool('coco_data').num_training_images(cfg)


@pytest.fixture
def own_config(apply, make_config, data_flags) -> Config:
    """A config with own data, as a user may have written it by hand."""
    return apply(make_config(), data_flags)


@pytest.mark.parametrize(('classes', 'message'), [
    (('nut', 'fgi', 'date'), "1 of 3 classes .* e.g. 'fgi'; .*nut, fig, date"),
    (('Nut', 'Fig', 'Date'), "3 of 3 classes .* e.g. 'Nut'; .*nut, fig, date"),
    (('date', 'fig', 'nut'), 'not in the order of .* write metainfo.classes as nut, fig, date'),
    (('nut', 'fig'), 'num_classes is 3, but train_dataloader has 2 classes'),
    (('nut'), "is the text 'nut'; for one class write a tuple with a comma"),
    (None, "80 of 80 classes .* e.g. 'person'; .*nut, fig, date"),
])
def test_class_names_must_match_the_file(tool, own_config, classes, message):
    checks = tool('data_checks')
    checks.check_class_names(own_config, ('train', 'val'))
    own_config.train_dataloader.dataset.metainfo = (
        None if classes is None else dict(classes=classes))
    with pytest.raises(tool('cli').UserError, match=message):
        checks.check_class_names(own_config, ('train', 'val'))


def test_class_names_of_val_are_checked_too(tool, own_config):
    del own_config.val_dataloader.dataset['metainfo']
    with pytest.raises(tool('cli').UserError, match='classes of val_dataloader'):
        tool('data_checks').check_class_names(own_config, ('train', 'val'))


def test_missing_data_is_listed_once(tool, own_config, data_root):
    check = tool('data_checks').check_data_present
    check(own_config, ('train', 'val', 'test'))
    (data_root / 'val.json').unlink()
    (data_root / 'images').rename(data_root / 'gone')
    with pytest.raises(tool('cli').UserError) as error:
        check(own_config, ('train', 'val', 'test'))
    assert str(error.value).count(str(data_root / 'val.json')) == 1
    assert str(error.value).count(str(data_root / 'images')) == 1
    assert 'train.json' not in str(error.value)
    check(own_config, ())


def test_remote_data_is_not_looked_up(tool, own_config):
    for split in ('train', 'val'):
        own_config[f'{split}_dataloader'].dataset.update(
            data_root='s3://bucket/', ann_file='a.json', data_prefix=dict(img='images'))
    own_config.val_evaluator.ann_file = 's3://bucket/a.json'
    tool('data_checks').check_data_present(own_config, ('train', 'val'))
