"""Shared fixtures of the config tests: generated data in the layouts that the configs read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer
from mmpretrain.visualization import UniversalVisualizer

CONFIGS = Path(__file__).resolve().parents[2] / 'configs'
CLASSES = ('n01440764', 'n01443537')


@pytest.fixture
def load() -> Iterator[Callable[[str], Config]]:
    """``load(name)``: a shipped config, whose scope becomes the default one of the test."""
    with contextlib.ExitStack() as stack:

        def load(name: str) -> Config:
            config = Config.fromfile(CONFIGS / name)
            stack.enter_context(DefaultScope.overwrite_default_scope(config.default_scope))
            torch.manual_seed(0)
            return config

        yield load


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """A Runner leaves scope, loggers and visualizers behind, which no other test may inherit."""
    registries = [cls._instance_dict for cls in (
        DefaultScope, MMLogger, MessageHub, Visualizer, UniversalVisualizer)]
    before = [dict(instances) for instances in registries]
    yield
    for instances, kept in zip(registries, before, strict=True):
        instances.clear()
        instances.update(kept)


def _write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), pixels)


@pytest.fixture(scope='session')
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images of 96 x 64 px with two squares each, for training and validation alike."""
    root = tmp_path_factory.mktemp('coco')
    content = dict(images=[], annotations=[],
                   categories=[dict(id=1, name='person'), dict(id=17, name='cat')])
    for image in range(4):
        name = f'{image}.jpg'
        pixels = np.full((64, 96, 3), 60 + 20 * image, np.uint8)
        for category, x, y, side in ((1, 6, 8, 30), (17, 50, 20, 36)):
            pixels[y:y + side, x:x + side] = (250, 5 * category, 90)
            content['annotations'].append(dict(
                id=len(content['annotations']) + 1, image_id=image, category_id=category,
                bbox=[x, y, side, side], area=side * side, iscrowd=0,
                segmentation=[[x, y, x + side, y, x + side, y + side, x, y + side]]))
        content['images'].append(dict(id=image, file_name=name, width=96, height=64))
        for split in ('train2017', 'val2017'):
            _write(root / split / name, pixels)
    (root / 'annotations').mkdir()
    for split in ('train2017', 'val2017'):
        (root / 'annotations' / f'instances_{split}.json').write_text(json.dumps(content))
    return root


@pytest.fixture(scope='session')
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of two images of 96 x 64 px in ImageNet's folder layout."""
    root = tmp_path_factory.mktemp('imagenet')
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        for name in CLASSES:
            for image in range(2):
                pixels = rng.integers(0, 256, (64, 96, 3), dtype=np.uint8)
                _write(root / split / name / f'{image}.JPEG', pixels)
    return root


@pytest.fixture(scope='session')
def ade20k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of 160 x 128 px with two classes and a border without a label."""
    root = tmp_path_factory.mktemp('ade20k')
    rng = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for image in range(2):
            pixels = rng.integers(0, 256, (128, 160, 3), dtype=np.uint8)
            labels = np.zeros((128, 160), np.uint8)
            labels[4:, :80], labels[4:, 80:] = 1, 150
            pixels[labels == 1] //= 4
            _write(root / 'images' / split / f'{image}.jpg', pixels)
            _write(root / 'annotations' / split / f'{image}.png', labels)
    return root
