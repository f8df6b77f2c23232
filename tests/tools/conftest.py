"""Shared fixtures of the tool tests: the tools as modules, tiny data, tiny detectors."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer

REPO = Path(__file__).resolve().parents[2]
TOOLS = REPO / 'tools'
CONFIGS = REPO / 'configs'
NAMES = ('nut', 'fig', 'date')


def _load_tool(name: str) -> ModuleType:
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    # tools/test.py by another name, because `test` is a standard library package.
    module_name = 'test_tool' if name == 'test' else name
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, TOOLS / f'{name}.py')
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


@pytest.fixture(scope='session')
def tool() -> Callable[[str], ModuleType]:
    """Imports ``tools/NAME.py`` as a module."""
    return _load_tool


@contextlib.contextmanager
def _fresh_process_state() -> Iterator[None]:
    """A Runner leaves scope, loggers and visualizers behind, which no other test may inherit."""
    from mmdet.visualization import DetLocalVisualizer
    from mmpretrain.visualization import UniversalVisualizer
    registries = [cls._instance_dict for cls in (
        DefaultScope, MMLogger, MessageHub, Visualizer, DetLocalVisualizer, UniversalVisualizer)]
    before = [dict(instances) for instances in registries]
    yield
    for instances, kept in zip(registries, before, strict=True):
        instances.clear()
        instances.update(kept)


class Built(Exception):
    """Raised in place of building a runner; carries the config."""


@pytest.fixture
def no_runner(tool: Callable[[str], ModuleType],
              monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Makes building a runner raise the exception that is returned, with the config."""

    def refuse(cfg: Config, *_: object) -> None:
        raise Built(cfg)

    for name in ('train', 'test'):
        monkeypatch.setattr(tool(name), 'build_runner', refuse)
    # It would make the work dir.
    monkeypatch.setattr(tool('train'), 'claimed', lambda *_: contextlib.nullcontext())
    return Built


@pytest.fixture
def final_config(tool: Callable[[str], ModuleType],
                 no_runner: type[Exception]) -> Callable[..., Config]:
    """Runs ``train.py`` up to the runner and returns the config it would be built from."""

    def run(*args: str | Path) -> Config:
        with pytest.raises(no_runner) as built:
            tool('train').main([str(arg) for arg in args])
        return built.value.args[0]

    return run


@pytest.fixture
def refused(tool: Callable[[str], ModuleType], no_runner: type[Exception],
            capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a tool that must stop with status 2; returns what it says on stderr."""

    def run(name: str, *args: str | Path) -> str:
        assert tool(name).main([str(arg) for arg in args]) == 2
        error = capsys.readouterr().err
        assert error.startswith('error: ')
        assert 'Traceback' not in error
        return error

    return run


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    with _fresh_process_state():
        yield


def _coco_content() -> dict:
    """Four 64 x 64 images with two squares each; category ids 7, 17 and 27."""
    content = dict(
        images=[dict(id=i, file_name=f'{i}.png', width=64, height=64) for i in range(4)],
        annotations=[],
        categories=[dict(id=7 + 10 * i, name=name) for i, name in enumerate(NAMES)])
    for image in range(4):
        for x, y, side in ((4, 6, 20), (30, 28, 26)):
            number = len(content['annotations'])
            content['annotations'].append(dict(
                id=number, image_id=image, category_id=7 + 10 * (number % len(NAMES)),
                bbox=[x, y, side, side], area=side * side, iscrowd=0,
                segmentation=[[x, y, x + side, y, x + side, y + side, x, y + side]]))
    return content


def _write_data(root: Path) -> Path:
    content = _coco_content()
    (root / 'images').mkdir(parents=True)
    colors = {7: (40, 200, 60), 17: (200, 60, 40), 27: (60, 40, 200)}
    for image in content['images']:
        pixels = np.full((64, 64, 3), 90 + 20 * image['id'], np.uint8)
        for ann in content['annotations']:
            if ann['image_id'] == image['id']:
                x, y, w, h = ann['bbox']
                pixels[y:y + h, x:x + w] = colors[ann['category_id']]
        cv2.imwrite(str(root / 'images' / image['file_name']), pixels)
    for name in ('train', 'val'):
        (root / f'{name}.json').write_text(json.dumps(content))
    return root


def _flags(root: Path) -> list[str]:
    return ['--data', str(root), '--train-ann', 'train.json', '--val-ann', 'val.json',
            '--img-prefix', 'images']


@pytest.fixture
def content() -> dict:
    """A fresh copy of what ``train.json`` and ``val.json`` hold."""
    return _coco_content()


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    """A folder with ``train.json``, ``val.json`` and their four images in ``images``."""
    return _write_data(tmp_path / 'own')


@pytest.fixture
def data_flags(data_root: Path) -> list[str]:
    """The own-data flags for ``data_root``."""
    return _flags(data_root)


@functools.cache
def _flat_config(kind: str) -> str:
    """The complete text of a tiny config: mmdet's bases take a second to resolve, each time."""
    data, model, heads = {
        'box': ('detection', 'retinanet_r50_fpn', '''
    bbox_head=dict(in_channels=16, feat_channels=16, stacked_convs=1)'''),
        'mask': ('instance', 'mask-rcnn_r50_fpn', '''
    rpn_head=dict(in_channels=16, feat_channels=16),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16),
        bbox_head=dict(in_channels=16, fc_out_channels=32),
        mask_roi_extractor=dict(out_channels=16),
        mask_head=dict(in_channels=16, conv_out_channels=16, num_convs=1)),
    train_cfg=dict(rpn_proposal=dict(max_per_img=40), rcnn=dict(sampler=dict(num=32))),
    test_cfg=dict(rpn=dict(max_per_img=40), rcnn=dict(score_thr=0., max_per_img=6))'''),
    }[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'tiny.py'
        path.write_text(f'''
_base_ = [
    'mmdet::_base_/models/{model}.py', 'mmdet::_base_/datasets/coco_{data}.py',
    'mmdet::_base_/schedules/schedule_1x.py', 'mmdet::_base_/default_runtime.py']
model = dict(
    backbone=dict(depth=18, base_channels=8, init_cfg=None, norm_eval=False),
    neck=dict(in_channels=[8, 16, 32, 64], out_channels=16),{heads})
load = dict(type='LoadImageFromFile')
annotations = dict(type='LoadAnnotations', with_bbox=True, with_mask={kind == 'mask'})
pack = dict(type='PackDetInputs', meta_keys=(
    'img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))
loader = dict(batch_size=2, num_workers=0, persistent_workers=False)
train_dataloader = dict(**loader, dataset=dict(pipeline=[load, annotations, pack]))
val_dataloader = dict(**loader, dataset=dict(pipeline=[
    load, dict(type='Resize', scale=(64, 64), keep_ratio=True), annotations, pack]))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=1)
randomness = dict(seed=0)
''')
        return Config.fromfile(path).pretty_text


def _write_config(folder: Path, kind: str, extra: str = '') -> Path:
    path = folder / f'tiny_{kind}.py'
    path.write_text(f'{_flat_config(kind)}\n{extra}\n')
    return path


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Path]:
    """Writes ``tiny_KIND.py``, a ResNet-18 RetinaNet (box) or Mask R-CNN (mask)."""

    def make(kind: str = 'box', extra: str = '') -> Path:
        return _write_config(tmp_path, kind, extra)

    return make


@pytest.fixture(scope='session')
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One epoch of the tiny Mask R-CNN on own data: ``root``, ``config``, ``work_dir``."""
    folder = tmp_path_factory.mktemp('trained')
    root = _write_data(folder / 'own')
    config = _write_config(folder, 'mask')
    work_dir = folder / 'run'
    with _fresh_process_state():
        status = _load_tool('train').main(
            [str(config), *_flags(root), '--work-dir', str(work_dir)])
    assert status == 0
    return dict(root=root, config=config, work_dir=work_dir, dumped=work_dir / 'tiny_mask.py',
                checkpoint=work_dir / 'epoch_1.pth')


@pytest.fixture(scope='session')
def classifier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One epoch of the demo's classifier with EMA on 8 images: ``config``, ``work_dir``."""
    folder = tmp_path_factory.mktemp('classifier')
    root = folder / 'shape_classes'
    assert _load_tool('make_shape_classes').make_dataset(root, 8, 3, 64, 0)
    config = folder / 'tiny_classifier.py'
    config.write_text(f'''
_base_ = {str(CONFIGS / 'demo' / 'laplacian_shapes_classification.py')!r}
custom_hooks = [dict(type='EMAHook', momentum=0.5)]
loader = dict(num_workers=0, dataset=dict(data_root={str(root)!r}))
train_dataloader = dict(batch_size=4, **loader)
val_dataloader = loader
test_dataloader = loader
train_cfg = dict(max_epochs=1, val_interval=1)
''')
    work_dir = folder / 'run'
    with _fresh_process_state():
        status = _load_tool('train').main([str(config), '--work-dir', str(work_dir)])
    assert status == 0
    return dict(root=root, config=config, work_dir=work_dir, checkpoint=work_dir / 'epoch_1.pth')
