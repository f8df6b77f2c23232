"""``tools/train.py`` and ``tools/test.py`` on classification configs of mmpretrain."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import torch
from mmengine.config import Config

DEMO = Path(__file__).resolve().parents[2] / 'configs' / 'demo'


def last_metrics(work_dir: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for file in sorted(work_dir.rglob('*.json')):
        for line in file.read_text().splitlines():
            found.update({key: value for key, value in json.loads(line).items()
                          if key.startswith('accuracy/')})
    return found


def test_it_trains_and_evaluates(classifier):
    log = next(classifier['work_dir'].glob('*/*.log')).read_text()
    assert 'Epoch(val) [1][1/1]' in log
    assert 0 <= last_metrics(classifier['work_dir'])['accuracy/top1'] <= 100
    checkpoint = torch.load(classifier['checkpoint'], weights_only=False)
    assert checkpoint['meta']['iter'] == 2
    assert tuple(checkpoint['meta']['dataset_meta']['classes']) == ('circle', 'square', 'triangle')


def test_the_test_tool_repeats_the_evaluation(tool, classifier, tmp_path, capfd):
    status = tool('test').main([
        str(classifier['work_dir'] / 'tiny_classifier.py'), str(classifier['checkpoint']),
        '--work-dir', str(tmp_path / 'test'), '--out', str(tmp_path / 'out.pkl'), '--show-dir',
        'pictures'])
    assert status == 0
    assert last_metrics(tmp_path / 'test') == last_metrics(classifier['work_dir'])
    predictions = pickle.loads((tmp_path / 'out.pkl').read_bytes())
    assert [prediction['pred_score'].shape for prediction in predictions] == [(3, )] * 3
    assert f'pictures: {tmp_path / "test" / "pictures"}' in capfd.readouterr().out
    assert sorted(path.name for path in (tmp_path / 'test' / 'pictures').iterdir()) == [
        f'00000{i}.png_0.png' for i in (1, 2, 3)]


def test_mirror_images_are_averaged(tool, classifier, tmp_path):
    scores = {}
    for name, flags in (('plain', []), ('tta', ['--tta'])):
        assert tool('test').main([
            str(classifier['config']), str(classifier['checkpoint']), *flags, '--work-dir',
            str(tmp_path / name), '--out', str(tmp_path / f'{name}.pkl')]) == 0
        predictions = pickle.loads((tmp_path / f'{name}.pkl').read_bytes())
        scores[name] = torch.stack([prediction['pred_score'] for prediction in predictions])
    torch.testing.assert_close(scores['tta'].sum(1), torch.ones(3))
    assert not torch.equal(scores['tta'], scores['plain'])
    torch.testing.assert_close(scores['tta'], scores['plain'], atol=0.1, rtol=0)


def test_the_backbone_is_the_demo_detectors():
    classifier = Config.fromfile(DEMO / 'laplacian_shapes_classification.py')
    detector = Config.fromfile(DEMO / 'mask_rcnn_laplacian_shapes_short.py')
    assert classifier.model.backbone.arch == detector.model.backbone.arch
    preprocessor = detector.model.data_preprocessor
    assert classifier.data_preprocessor.mean == preprocessor.mean
    assert classifier.data_preprocessor.std == preprocessor.std
    assert detector.param_scheduler[1].end == detector.train_cfg.max_epochs == 3


def test_missing_images(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refused('train', DEMO / 'laplacian_shapes_classification.py')
    assert f'is missing in {tmp_path}: data/shape_classes/train, data/shape_classes/val' in error
    assert 'Make it: python tools/make_shape_classes.py' in error
    error = refused('train', DEMO / 'laplacian_shapes_classification.py', '--cfg-options',
                    'train_dataloader.dataset.data_root=data/imagenet',
                    'val_dataloader.dataset.data_root=data/imagenet')
    assert 'data/imagenet/train, data/imagenet/val' in error
    assert 'ImageNet-1k (https://image-net.org) goes to data/imagenet' in error
    checkpoint = tmp_path / 'a.pth'
    torch.save({}, checkpoint)
    error = refused('test', DEMO / 'laplacian_shapes_classification.py', checkpoint)
    assert error.count('data/shape_classes/') == 1


def test_folders_of_classes_agree(refused, classifier, tmp_path):
    root = shutil.copytree(classifier['root'], tmp_path / 'own')
    options = ['--cfg-options', *(f'{split}_dataloader.dataset.data_root={root}'
                                  for split in ('train', 'val', 'test'))]
    config, checkpoint = classifier['config'], classifier['checkpoint']
    assert 'model.head.num_classes is 4, but ' + str(root / 'train') + ' has 3 folders' in \
        refused('train', config, *options, 'model.head.num_classes=4')
    shutil.rmtree(root / 'val' / 'square')
    assert (f'the classes differ: {root / "train"} has a folder square, {root / "val"} has none'
            in refused('train', config, *options))
    assert 'model.head.num_classes is 3, but ' + str(root / 'val') + ' has 2 folders' in refused(
        'test', config, checkpoint, *options)
    shutil.rmtree(root / 'val')
    (root / 'val').mkdir()
    assert f'{root / "val"} has no folders' in refused('test', config, checkpoint, *options)


def test_own_classes_meet_a_checkpoint_of_others(refused, classifier, tmp_path):
    root = shutil.copytree(classifier['root'], tmp_path / 'own')
    (root / 'val' / 'square').rename(root / 'val' / 'star')
    error = refused('test', classifier['config'], classifier['checkpoint'], '--cfg-options',
                    f'test_dataloader.dataset.data_root={root}',
                    'test_dataloader.dataset.type=CustomDataset',
                    'test_dataloader.dataset.data_prefix=val',
                    'test_dataloader.dataset.metainfo=None')
    assert 'trained on the classes circle, square, triangle; the data has circle, star' in error


def test_own_detection_data_do_not_fit_a_classifier(refused, classifier, data_flags):
    assert '--data needs one CocoDataset in val_dataloader' in refused(
        'train', classifier['config'], *data_flags)


def test_loaders_get_what_mmpretrain_adds(final_config, classifier):
    loader = final_config(classifier['config']).train_dataloader
    assert loader.collate_fn == dict(type='default_collate')
    assert loader.persistent_workers is False
    loader = final_config(classifier['config'], '--cfg-options',
                          'train_dataloader.num_workers=1').train_dataloader
    assert loader.persistent_workers is True
