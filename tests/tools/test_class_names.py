"""Class names and category ids from the annotation file to the results (B34)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

CATEGORIES = {1: 'cat', 7: 'dog', 900: 'bird'}


@pytest.fixture
def pets(data_root, content) -> Path:
    """The tiny data with the categories of the report."""
    ids = dict(zip((7, 17, 27), CATEGORIES, strict=True))
    content['categories'] = [dict(id=i, name=name) for i, name in CATEGORIES.items()]
    for ann in content['annotations']:
        ann['category_id'] = ids[ann['category_id']]
    for name in ('train', 'val'):
        (data_root / f'{name}.json').write_text(json.dumps(content))
    return data_root


@pytest.fixture
def by_hand(make_config, pets):
    """A config that names data and classes itself, as users write it; ``{split: metainfo}``."""

    def make(**metainfo: dict | None) -> Path:
        lines = [f'root = {str(pets)!r}']
        for split in ('train', 'val'):
            own = metainfo.get(split, dict(classes=tuple(CATEGORIES.values())))
            lines.append(f"{split}_dataloader['dataset'].update(data_root=root, "
                         f"ann_file='{split}.json', data_prefix=dict(img='images'), "
                         f'metainfo={own!r})')
        return make_config('box', '\n'.join([
            *lines, "model['bbox_head']['num_classes'] = 3",
            "model['test_cfg']['score_thr'] = 0.",
            "val_evaluator['ann_file'] = root + '/val.json'",
            'test_dataloader, test_evaluator = val_dataloader, val_evaluator']))

    return make


@pytest.mark.parametrize(('classes', 'named'), [
    (('cat', 'dgo', 'bird'), "e.g. 'dgo'"), (('Cat', 'Dog', 'Bird'), "e.g. 'Cat'"),
    ('cat', "is the text 'cat'; for one class write a tuple with a comma"),
    (('cat', 'dog', 'bird '), "e.g. 'bird '"), (('cat', 'cat', 'dog'), 'write metainfo.classes'),
    (('bird', 'dog', 'cat'), 'write metainfo.classes as cat, dog, bird')])
def test_b34_names_that_mmdet_would_drop_or_shift(refused, by_hand, classes, named):
    for split in ('train', 'val'):
        message = refused('train', by_hand(**{split: dict(classes=classes)}))
        assert named in message
        assert 'cat, dog' in message or classes == 'cat'
        assert f'{split}_dataloader' in message


def test_b34_names_in_the_training_data_alone(refused, by_hand):
    """COCO's 80 would be drawn and evaluated."""
    assert '77 of 80 classes of val_dataloader' in refused('train', by_hand(val=None))


def test_b34_another_number_of_classes(refused, by_hand):
    config = by_hand()
    config.write_text(config.read_text() + "\nmodel['bbox_head']['num_classes'] = 80\n")
    assert 'num_classes is 80, but train_dataloader has 3 classes' in refused('train', config)


@pytest.mark.parametrize('text', ['cat\ndog\nbird', 'cat\ndog\nbird\n',
                                  'cat\r\ndog\r\nbird\r\n'])
def test_b34_a_file_of_class_names_is_read_as_mmengine_reads_it(final_config, by_hand, tmp_path,
                                                                text):
    names = tmp_path / 'classes.txt'
    names.write_bytes(text.encode())
    cfg = final_config(by_hand(train=dict(classes=str(names)), val=dict(classes=str(names))))

    from mmdet.registry import DATASETS
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    assert list(dataset.metainfo['classes']) == list(CATEGORIES.values())


def test_b34_names_and_ids_survive_training_and_testing(tool, by_hand, tmp_path):
    from mmdet.apis import init_detector

    config, work_dir = by_hand(), tmp_path / 'run'
    assert tool('train').main([str(config), '--work-dir', str(work_dir)]) == 0
    checkpoint = work_dir / 'epoch_1.pth'
    meta = torch.load(checkpoint, weights_only=False)['meta']
    assert tuple(meta['dataset_meta']['classes']) == tuple(CATEGORIES.values())
    # The class names are the checkpoint's: those of the config are gone.
    bare = Config.fromfile(config)
    for split in ('train', 'val', 'test'):
        del bare[f'{split}_dataloader'].dataset['metainfo']
    model = init_detector(bare, str(checkpoint), device='cpu')
    assert tuple(model.dataset_meta['classes']) == tuple(CATEGORIES.values())

    assert tool('test').main([
        str(config), str(checkpoint), '--work-dir', str(tmp_path / 'tested'), '--cfg-options',
        f'test_evaluator.outfile_prefix={tmp_path / "results"}']) == 0
    results = json.loads((tmp_path / 'results.bbox.json').read_text())
    assert {result['category_id'] for result in results} == set(CATEGORIES)
