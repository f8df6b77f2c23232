"""One of two processes that train together: ``two_ranks.py RANK FOLDER``.

Every case trains two iterations through mmengine's Runner on generated images. The ranks meet
by a file in FOLDER and leave ``rank<RANK>.pth`` there: gradients before each step, by case.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmdet.utils import register_all_modules
from mmengine.config import Config, ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from mmlaplacian import LaplacianFormer

REPO = Path(__file__).resolve().parents[2]
DETECTORS = {
    'mask_rcnn': 'configs/mask_rcnn_laplacian_t.py',
    'retinanet': 'configs/retinanet_laplacian_t.py',
}
# Detector, with_cp, and whether rank 1 sees no object.
CASES = [(detector, with_cp, empty) for detector in DETECTORS
         for with_cp, empty in ((False, False), (True, False), (False, True))]
ITERATIONS = 2
BATCH = 2
LEARNING_RATE = 1e-3
CHANNELS = 16
ARCH = dict(embed_dims=(16, 32, 32, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1),
            mlp_ratios=(2, 2, 2, 2))
Gradients = dict[str, Tensor]


class Squares(Dataset):
    """Images of 96 x 64 px with two bright squares each.

    Args:
        empty: Images of odd index, which are those of rank 1, have no object. Default False.
    """

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty

    def __len__(self) -> int:
        return 2 * BATCH * ITERATIONS

    def __getitem__(self, index: int) -> dict:
        pixels = torch.randint(0, 80, (3, 64, 96), dtype=torch.uint8,
                               generator=torch.Generator().manual_seed(index))
        boxes = torch.tensor([[4. + index, 6., 36. + index, 38.],
                              [50., 10. + index, 74., 34. + index]])
        masks = torch.zeros(2, 64, 96, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        kept = 0 if self.empty and index % 2 else 2
        pixels[:, masks[:kept].bool().any(0)] += 150
        sample = DetDataSample(metainfo=dict(
            img_shape=(64, 96), ori_shape=(64, 96), img_id=index, scale_factor=(1., 1.)))
        sample.gt_instances = InstanceData(
            bboxes=boxes[:kept], labels=torch.arange(kept),
            masks=BitmapMasks(masks[:kept].numpy(), 64, 96))
        return dict(inputs=pixels, data_samples=sample)


@functools.cache
def _model_config(detector: str) -> ConfigDict:
    return Config.fromfile(REPO / DETECTORS[detector]).model


def build(detector: str, with_cp: bool = False) -> nn.Module:
    """The detector at reduced size, with the same weights in every process."""
    config = copy.deepcopy(_model_config(detector))
    indices = config.backbone.get('out_indices', (0, 1, 2, 3))
    config.backbone.update(arch=ARCH, with_cp=with_cp, drop_path_rate=0.2)
    config.neck.update(in_channels=[ARCH['embed_dims'][i] for i in indices],
                       out_channels=CHANNELS)
    if detector == 'mask_rcnn':
        config.rpn_head.update(in_channels=CHANNELS, feat_channels=CHANNELS)
        heads = config.roi_head
        for extractor in (heads.bbox_roi_extractor, heads.mask_roi_extractor):
            extractor.out_channels = CHANNELS
        heads.bbox_head.update(in_channels=CHANNELS, fc_out_channels=32, num_classes=2)
        heads.mask_head.update(in_channels=CHANNELS, conv_out_channels=CHANNELS, num_convs=1,
                               num_classes=2)
        config.train_cfg.rpn_proposal.update(nms_pre=50, max_per_img=20)
        config.train_cfg.rcnn.sampler.num = 16
    else:
        config.bbox_head.update(in_channels=CHANNELS, feat_channels=CHANNELS, stacked_convs=1,
                                num_classes=2)
    torch.manual_seed(0)
    model = MODELS.build(config)
    model.init_weights()
    return model


def seed(rank: int, iteration: int) -> None:
    """What is drawn in an iteration follows from this alone."""
    torch.manual_seed(10 * iteration + rank)


def gradients(model: nn.Module) -> Gradients:
    """A copy of every gradient; an unused parameter is an error."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused, f'without a gradient: {unused}'
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


class _RecordGradients(Hook):
    """Seeds each iteration and keeps the gradients that its step takes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.records: list[Gradients] = []

    def before_train(self, runner: Runner) -> None:
        module = runner.model.module
        runner.optim_wrapper.optimizer.register_step_pre_hook(
            lambda *_: self.records.append(gradients(module)))

    def before_train_iter(self, runner: Runner, batch_idx: int,
                          data_batch: dict | None = None) -> None:
        seed(self.rank, runner.iter)


def train(rank: int, folder: Path, detector: str, with_cp: bool, empty: bool) -> list[Gradients]:
    """The averaged gradients of each iteration of one case, as this rank sees them."""
    record = _RecordGradients(rank)
    model = build(detector, with_cp)
    runner = Runner(
        model=model,
        work_dir=str(folder / f'work_{detector}_{with_cp}_{empty}'),
        launcher='pytorch',
        train_dataloader=dict(
            batch_size=BATCH, num_workers=0, dataset=Squares(empty),
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate')),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)),
        default_hooks=dict(checkpoint=None),
        custom_hooks=[record],
        cfg=dict(model_wrapper_cfg=dict(type='MMDistributedDataParallel', device_ids=None)),
        default_scope='mmdet',
        experiment_name=f'{detector}_{with_cp}_{empty}')
    runner.train()
    assert isinstance(runner.model, DistributedDataParallel)
    assert not runner.model.find_unused_parameters
    return record.records


def train_alone(detector: str, with_cp: bool, empty: bool) -> list[list[Gradients]]:
    """Gradients of both ranks' batches, each from a process of its own, for each iteration.

    Both copies of the model then take one step along their mean.
    """
    model = build(detector, with_cp).train()
    models = [model, copy.deepcopy(model)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=LEARNING_RATE) for m in models]
    dataset = Squares(empty)
    records = []
    for iteration in range(ITERATIONS):
        for rank, model in enumerate(models):
            start = 2 * BATCH * iteration + rank
            batch = pseudo_collate([dataset[i] for i in range(start, start + 2 * BATCH, 2)])
            seed(rank, iteration)
            batch = model.data_preprocessor(batch, training=True)
            loss, _ = model.parse_losses(model(**batch, mode='loss'))
            model.zero_grad()
            loss.backward()
        records.append([gradients(model) for model in models])
        for model, optimizer in zip(models, optimizers, strict=True):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.grad = (records[-1][0][name] + records[-1][1][name]) / 2
            optimizer.step()
    return records


def backbone_and_images() -> tuple[LaplacianFormer, Tensor]:
    """A backbone and the joint batch of both ranks, two images for each."""
    torch.manual_seed(0)
    model = LaplacianFormer(ARCH)
    model.init_weights()
    return model, torch.randn(4, 3, 64, 96)


def smooth_loss(model: nn.Module, images: Tensor) -> Tensor:
    """A mean over images, smooth in every parameter."""
    return sum(out.tanh().square().mean() for out in model(images))


def train_backbone(rank: int) -> Gradients:
    """Averaged gradients of the smooth loss, a half of the joint batch for each rank."""
    model, images = backbone_and_images()
    # Freed with its wrapper, the reducer would leave each rank its own gradients.
    parallel = DistributedDataParallel(model)
    smooth_loss(parallel, images[2 * rank:2 * rank + 2]).backward()
    return gradients(model)


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    # Two processes share the cores.
    torch.set_num_threads(1)
    # Recomputation and DDP say by a warning what they would get wrong.
    warnings.filterwarnings('error', message='.*(use_reentrant|requires_grad|find_unused).*')
    dist.init_process_group('gloo', init_method=f'file://{folder}/meeting', rank=rank,
                            world_size=2)
    register_all_modules(init_default_scope=True)
    results = {case: train(rank, folder, *case) for case in CASES}
    torch.save(dict(detectors=results, backbone=train_backbone(rank)), folder / f'rank{rank}.pth')
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
