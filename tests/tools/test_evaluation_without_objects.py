"""Evaluations that find nothing, or have nothing to find, do not end a training (B35)."""

from __future__ import annotations

import json

import pytest

SAVE_BEST = "default_hooks['checkpoint']['save_best'] = "


@pytest.fixture
def train(tool, make_config, data_flags, tmp_path):
    """Trains an epoch with ``extra`` in the config; returns the log and the metrics."""

    def run(kind: str, extra: str) -> tuple[str, list[dict]]:
        config = make_config(kind, extra)
        work_dir = tmp_path / 'run'
        assert tool('train').main([str(config), *data_flags, '--work-dir', str(work_dir)]) == 0
        assert (work_dir / 'epoch_1.pth').is_file()
        log, = work_dir.glob('*/*.log')
        lines = next(work_dir.glob('*/vis_data/scalars.json')).read_text().splitlines()
        return log.read_text(), [found for line in lines if (found := {
            key: value for key, value in json.loads(line).items() if key.startswith('coco/')})]

    return run


@pytest.mark.parametrize(('kind', 'save_best'), [
    ('box', "'auto'"),
    pytest.param('mask', "['coco/bbox_mAP', 'coco/segm_mAP']", marks=pytest.mark.soak)])
def test_b35_no_predictions_at_all(train, tmp_path, kind, save_best):
    threshold = "model['test_cfg']['score_thr'] = 1.1" if kind == 'box' else \
        "model['test_cfg']['rcnn']['score_thr'] = 1.1"
    log, metrics = train(kind, f'{threshold}\n{SAVE_BEST}{save_best}')
    assert 'The testing results of the whole dataset is empty' in log
    assert metrics == [] and not list((tmp_path / 'run').glob('best_*'))


def all_crowd(content: dict) -> None:
    for ann in content['annotations']:
        ann['iscrowd'] = 1


def negatives(content: dict) -> None:
    content['annotations'] = []


def one_class(content: dict) -> None:
    content['annotations'] = [a for a in content['annotations'] if a['category_id'] == 7]


@pytest.mark.parametrize('change', [
    pytest.param(all_crowd, marks=pytest.mark.soak), negatives, one_class])
def test_b35_a_validation_set_with_nothing_to_find(train, data_root, content, change):
    change(content)
    (data_root / 'val.json').write_text(json.dumps(content))
    _, metrics = train('box', f"model['test_cfg']['score_thr'] = 0.\n{SAVE_BEST}'coco/bbox_mAP'")
    found, = metrics
    # -1 is COCO's own value for an average over nothing.
    assert found['coco/bbox_mAP'] >= 0 if change is one_class else found['coco/bbox_mAP'] == -1
