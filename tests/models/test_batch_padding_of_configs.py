"""Padding is not masked, so no shipped detector is evaluated on padded batches (B40)."""

from pathlib import Path

import pytest
from mmengine.config import Config

CONFIGS = sorted((Path(__file__).resolve().parents[2] / 'configs').glob('*_laplacian_*.py'))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_b40_detectors_are_evaluated_image_by_image(path: Path) -> None:
    config = Config.fromfile(path)
    assert config.val_dataloader.batch_size == config.test_dataloader.batch_size == 1


def test_configs_are_found() -> None:
    assert len(CONFIGS) >= 10
