"""AP of ONNX files over the validation set of a config, by mmdet's own metric."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.evaluator import Evaluator
from mmengine.registry import DATASETS, DefaultScope
from parts import ROOT

sys.path.append(str(ROOT / 'tools'))
from config_file import load_config  # noqa: E402
from export_onnx import main as export  # noqa: E402
from onnx_demo import Detector, read  # noqa: E402

__all__ = ['average_precisions', 'export', 'load_config']


def average_precisions(cfg: Config, files: Sequence[Path], threads: int) -> list[dict[str, float]]:
    """What mmdet's metric says of each file: ``coco/bbox_mAP``, of masks ``coco/segm_mAP``, ...

    Args:
        cfg: With ``val_dataloader`` and ``val_evaluator``.
        files: Detectors written by ``tools/export_onnx.py``.
        threads: Threads of onnxruntime.
    """
    with DefaultScope.overwrite_default_scope('mmdet'):
        dataset: BaseDataset = DATASETS.build({**cfg.val_dataloader.dataset, 'test_mode': True})
        return [_evaluate(Detector(str(file), threads), dataset, Evaluator(cfg.val_evaluator))
                for file in files]


def _evaluate(detector: Detector, dataset: BaseDataset, evaluator: Evaluator) -> dict[str, float]:
    evaluator.dataset_meta = dataset.metainfo
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        found = detector(read(Path(info['img_path'])))
        names = {'boxes': 'bboxes'}
        instances = {names.get(key, key): torch.from_numpy(value) for key, value in found.items()}
        for metric in evaluator.metrics:
            metric.process({}, [dict(img_id=info['img_id'],
                                     ori_shape=(info['height'], info['width']),
                                     pred_instances=instances)])
    return evaluator.evaluate(len(dataset))
