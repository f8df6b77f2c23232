"""Detectors of mmdet as plain functions of an image tensor, for ``tools/export_onnx.py``.

mmdet's own ``predict`` takes data samples and branches on values, which no graph can hold. These
modules run mmdet's networks, anchors and box coders and write what lies between them with tensors:
NMS and RoIAlign by torchvision's operators, which have ONNX forms. Results are those of mmdet.

An image is ``(1, 3, H, W)``, float32, RGB, 0 to 255; boxes are x1, y1, x2, y2 in its pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import torchvision
from cli import UserError
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.models.dense_heads import RetinaHead, RPNHead
from mmdet.models.detectors import FasterRCNN, MaskRCNN, RetinaNet
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder
from torch import Tensor, nn


class Features(nn.Module):
    """Backbone and neck: an image batch to the maps of the neck.

    Args:
        model: A detector.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        preprocessor = model.data_preprocessor
        _require('data_preprocessor', preprocessor, DetDataPreprocessor)
        if preprocessor.batch_augments or not preprocessor._enable_normalize:
            raise UserError('data_preprocessor must normalise by mean and std and augment nothing '
                            'to be exported')
        self.model = model

    def normalized(self, image: Tensor) -> Tensor:
        """What ``model.data_preprocessor`` makes of images of one size."""
        preprocessor = self.model.data_preprocessor
        if not preprocessor._channel_conversion:
            # Pipelines load BGR: without a conversion the network was trained on BGR.
            image = image.flip(1)
        image = (image - preprocessor.mean) / preprocessor.std
        below, right = (-length % preprocessor.pad_size_divisor for length in image.shape[2:])
        return F.pad(image, (0, right, 0, below), value=preprocessor.pad_value)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """``(B, 3, H, W)`` to the maps, finest first."""
        return tuple(self.model.extract_feat(self.normalized(image)))


class OneStage(Features):
    """RetinaNet: an image to boxes ``(n, 4)``, labels and scores ``(n, )``, best first."""

    def __init__(self, model: RetinaNet) -> None:
        super().__init__(model)
        head = model.bbox_head
        _require('bbox_head', head, RetinaHead)
        _require('bbox_head.bbox_coder', head.bbox_coder, DeltaXYWHBBoxCoder)
        if not head.use_sigmoid_cls:
            raise UserError('bbox_head must classify by sigmoids to be exported')
        _require_nms('bbox_head.test_cfg', head.test_cfg)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        head = self.model.bbox_head
        candidates = _candidates(head, super().forward(image), image.shape[2:])
        return _select(*candidates, head.test_cfg, head.test_cfg.score_thr)


class TwoStage(Features):
    """Faster and Mask R-CNN: an image to boxes ``(n, 4)``, labels and scores ``(n, )``, best
    first, and for Mask R-CNN masks ``(n, H, W)``, bool."""

    def __init__(self, model: FasterRCNN | MaskRCNN) -> None:
        super().__init__(model)
        rpn, roi = model.rpn_head, model.roi_head
        _require('rpn_head', rpn, RPNHead)
        _require('rpn_head.bbox_coder', rpn.bbox_coder, DeltaXYWHBBoxCoder)
        _require('roi_head', roi, StandardRoIHead)
        _require('roi_head.bbox_head', roi.bbox_head, BBoxHead)
        _require('roi_head.bbox_head.bbox_coder', roi.bbox_head.bbox_coder, DeltaXYWHBBoxCoder)
        if roi.bbox_head.custom_cls_channels or not rpn.use_sigmoid_cls:
            raise UserError('rpn_head must classify by sigmoids and roi_head.bbox_head by a '
                            'softmax to be exported')
        extractors = [roi.bbox_roi_extractor]
        if roi.with_mask:
            _require('roi_head.mask_head', roi.mask_head, FCNMaskHead)
            extractors.append(roi.mask_roi_extractor)
        for extractor in extractors:
            _require('roi_head.bbox_roi_extractor', extractor, SingleRoIExtractor)
            layer = extractor.roi_layers[0]
            if type(layer).__name__ != 'RoIAlign' or layer.pool_mode != 'avg':
                raise UserError('roi_layer must be RoIAlign with pool_mode avg to be exported, '
                                f'got {layer}')
        _require_nms('test_cfg.rpn', rpn.test_cfg)
        _require_nms('test_cfg.rcnn', roi.test_cfg)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        rpn, roi = self.model.rpn_head, self.model.roi_head
        maps, size = super().forward(image), image.shape[2:]
        boxes, levels, scores = _candidates(rpn, maps, size)
        proposals, _, _ = _select(boxes, levels, scores, rpn.test_cfg, -1.)
        boxes, labels, scores = self._detections(maps, _with_a_dummy(proposals), size)
        if not roi.with_mask:
            return boxes, labels, scores
        return boxes, labels, scores, self._masks(maps, boxes, labels, size)

    def _detections(self, maps: Sequence[Tensor], proposals: Tensor,
                    size: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes, labels and scores from proposals ``(n + 1, 4)``, the last a dummy."""
        head, cfg = self.model.roi_head.bbox_head, self.model.roi_head.test_cfg
        regions = _regions(self.model.roi_head.bbox_roi_extractor, maps, proposals)
        if self.model.roi_head.with_shared_head:
            regions = self.model.roi_head.shared_head(regions)
        logits, deltas = head(regions)
        scores = logits.softmax(-1)[:, :-1]
        classes = scores.shape[1]
        if head.reg_class_agnostic:
            boxes = head.bbox_coder.decode(proposals, deltas, max_shape=size)
            boxes = boxes[:, None].expand(-1, classes, 4)
        else:
            repeated = proposals[:, None].expand(-1, classes, 4).reshape(-1, 4)
            boxes = head.bbox_coder.decode(repeated, deltas.reshape(-1, 4), max_shape=size)
            boxes = boxes.reshape(-1, classes, 4)
        labels = torch.arange(classes, device=scores.device).expand_as(scores[:-1])
        return _select(boxes[:-1].reshape(-1, 4), labels.reshape(-1), scores[:-1].reshape(-1), cfg,
                       cfg.score_thr)

    def _masks(self, maps: Sequence[Tensor], boxes: Tensor, labels: Tensor,
               size: Sequence[int]) -> Tensor:
        """Masks of detected boxes ``(n, 4)`` in the image, ``(n, H, W)``."""
        roi = self.model.roi_head
        boxes = _with_a_dummy(boxes)
        regions = _regions(roi.mask_roi_extractor, maps, boxes)
        masks = roi.mask_head(regions).sigmoid()
        if roi.mask_head.class_agnostic:
            masks = masks[:, 0]
        else:
            labels = F.pad(labels, (0, 1))[:, None, None, None]
            masks = masks.gather(1, labels.expand(-1, 1, *masks.shape[2:]))[:, 0]
        rows = _interpolation(boxes[:, 1], boxes[:, 3], size[0], masks.shape[1])
        columns = _interpolation(boxes[:, 0], boxes[:, 2], size[1], masks.shape[2])
        return (rows @ masks @ columns.mT >= roi.test_cfg.mask_thr_binary)[:-1]


KINDS: dict[type[nn.Module], Callable[[nn.Module], Features]] = {
    RetinaNet: OneStage, FasterRCNN: TwoStage, MaskRCNN: TwoStage}
"""The graph of each type of detector that is exported as a whole."""


def _require(name: str, part: nn.Module, kind: type) -> None:
    if not isinstance(part, kind):
        raise UserError(f'{name} must be a {kind.__name__} to be exported, got '
                        f'{type(part).__name__}; --features exports backbone and neck alone')


def _require_nms(name: str, cfg: dict) -> None:
    nms = cfg.get('nms') or {}
    if nms.get('type', 'nms') != 'nms' or set(nms) - {'type', 'iou_threshold'}:
        raise UserError(f"{name}.nms must be of type 'nms' with iou_threshold alone to be "
                        f'exported, got {dict(nms)}')
    for key in ('nms_pre', 'max_per_img'):
        if cfg.get(key, 1) < 1:
            raise UserError(f'{name}.{key} must be at least 1 to be exported, got '
                            f'{key}={cfg[key]}')


def _candidates(head: RetinaHead | RPNHead, maps: Sequence[Tensor],
                size: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The best ``nms_pre`` of each level: boxes ``(n, 4)``, what NMS keeps apart, scores.

    NMS keeps apart the classes of a RetinaNet and the levels of an RPN. A level with fewer is
    filled up with scores of -1, so that n does not depend on the image.
    """
    count = head.test_cfg.nms_pre
    logits, deltas = head(maps)
    anchors = head.prior_generator.grid_priors([x.shape[-2:] for x in logits],
                                               dtype=logits[0].dtype, device=logits[0].device)
    classes = head.cls_out_channels
    boxes, groups, scores = [], [], []
    for level, (x, delta, anchor) in enumerate(zip(logits, deltas, anchors, strict=True)):
        score = x[0].permute(1, 2, 0).reshape(-1).sigmoid()
        score, best = F.pad(score, (0, count), value=-1.).topk(count)
        place = (best // classes).clamp_max(anchor.shape[0] - 1)
        boxes.append(head.bbox_coder.decode(
            anchor[place], delta[0].permute(1, 2, 0).reshape(-1, 4)[place], max_shape=size))
        groups.append(torch.full_like(best, level) if isinstance(head, RPNHead)
                      else best % classes)
        scores.append(score)
    return torch.cat(boxes), torch.cat(groups), torch.cat(scores)


def _select(boxes: Tensor, groups: Tensor, scores: Tensor, cfg: dict,
            score_thr: float) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes, groups and scores that pass the thresholds and NMS within a group, best first."""
    valid = scores > score_thr
    if cfg.get('min_bbox_size', -1) >= 0:
        valid = valid & ((boxes[:, 2:] - boxes[:, :2]) > cfg.min_bbox_size).all(1)
    valid = valid.nonzero()[:, 0]
    # Groups are moved apart, as in mmcv: no boxes of two groups overlap.
    apart = boxes + (groups * (boxes.max() + 1))[:, None]
    kept = torchvision.ops.nms(apart[valid], scores[valid], cfg['nms']['iou_threshold'])
    chosen = valid[kept[:cfg['max_per_img']]]
    return boxes[chosen], groups[chosen], scores[chosen]


def _with_a_dummy(boxes: Tensor) -> Tensor:
    """One box more: the parts behind it are not made for none at all."""
    return torch.cat([boxes, boxes.new_tensor([[0., 0., 1., 1.]])])


def _regions(extractor: SingleRoIExtractor, maps: Sequence[Tensor], boxes: Tensor) -> Tensor:
    """Features of boxes ``(n, 4)``, each from the level of its size, ``(n, C, h, w)``."""
    maps = maps[:extractor.num_inputs]
    rois = F.pad(boxes, (1, 0))
    levels = extractor.map_roi_levels(rois, len(maps))
    height, width = extractor.roi_layers[0].output_size
    regions = boxes.new_zeros(boxes.shape[0], maps[0].shape[1], height, width)
    for level, (x, layer) in enumerate(zip(maps, extractor.roi_layers, strict=True)):
        chosen = (levels == level).nonzero()[:, 0]
        regions[chosen] = torchvision.ops.roi_align(
            x, rois[chosen], (height, width), layer.spatial_scale, layer.sampling_ratio,
            layer.aligned)
    return regions


def _interpolation(first: Tensor, last: Tensor, length: int, cells: int) -> Tensor:
    """Weights of linear interpolation from ``cells`` over [first, last] to pixel centers.

    ``(n, ), (n, ) -> (n, length, cells)``, 0 outside, as ``grid_sample`` with zero padding and
    ``align_corners=False``: pasting is two products, without a sampling grid for each pixel.
    """
    center = torch.arange(length, device=first.device) + .5
    place = (center - first[:, None]) / (last - first)[:, None] * cells - .5
    cell = torch.arange(cells, device=first.device)
    return (1 - (place[..., None] - cell).abs()).clamp_min(0)
