"""Peak memory of one training step of a detector on the CPU, counted by torch's allocator.

::

    python benchmarks/detector_memory.py configs/mask_rcnn_laplacian_t.py --batch-size 2 \
        --cfg-options model.backbone.with_cp=True
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from itertools import chain

import torch
from cpu_memory import peak_bytes
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmdet.utils import register_all_modules
from mmengine.config import Config, DictAction
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.structures import InstanceData
from torch import Tensor, nn

NUM_OBJECTS = 10
FIRST_SIZE = (64, 64)


def batch(batch_size: int, size: Sequence[int]) -> dict[str, list]:
    """Noise with :data:`NUM_OBJECTS` rectangles of class 0 an image, the same at every call.

    Args:
        batch_size: Number of images.
        size: Their height and width, at least 32 each.
    """
    height, width = size
    generator = torch.Generator().manual_seed(0)
    images, samples = [], []
    for number in range(batch_size):
        images.append(torch.randint(0, 256, (3, height, width), dtype=torch.uint8,
                                    generator=generator))
        corners = torch.rand(NUM_OBJECTS, 2, generator=generator) * torch.tensor(
            [width / 2, height / 2])
        sides = torch.rand(NUM_OBJECTS, 2, generator=generator) * torch.tensor(
            [width / 4, height / 4]) + 8
        boxes = torch.cat([corners, corners + sides], dim=1)
        masks = torch.zeros(NUM_OBJECTS, height, width, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        sample = DetDataSample(metainfo=dict(
            img_id=number, img_shape=(height, width), ori_shape=(height, width),
            scale_factor=(1., 1.)))
        sample.gt_instances = InstanceData(
            bboxes=boxes, labels=torch.zeros(NUM_OBJECTS, dtype=torch.long),
            masks=BitmapMasks(masks.numpy(), height, width))
        samples.append(sample)
    return dict(inputs=images, data_samples=samples)


def train(model: nn.Module, wrapper: OptimWrapper, data: dict[str, list], amp: bool) -> None:
    """Iterations up to and with one step of the optimizer."""
    for _ in range(wrapper._accumulative_counts):
        # AmpOptimWrapper refuses a CPU.
        context = torch.autocast('cpu', torch.bfloat16) if amp else contextlib.nullcontext()
        with context:
            losses = model(**model.data_preprocessor(data, training=True), mode='loss')
        wrapper.update_params(model.parse_losses(losses)[0])


def held_bytes(model: nn.Module, wrapper: OptimWrapper) -> int:
    """Bytes of weights, buffers and the optimizer's state."""
    states = chain.from_iterable(state.values() for state in wrapper.optimizer.state.values())
    return sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers(), states)
               if isinstance(tensor, Tensor))


def measure(config: Config, batch_size: int, size: Sequence[int],
            amp: bool) -> tuple[int, int]:
    """Memory of a training step, after a first one at a small size.

    Args:
        config: Of a detector; ``model`` and ``optim_wrapper`` are read.
        batch_size: Images of an iteration.
        size: Height and width.
        amp: Whether to run in bfloat16 autocast.

    Returns:
        Bytes held between steps, and the peak of the step, those included.
    """
    register_all_modules()
    # Else every parameter's initialisation and weight decay is a line of its own.
    MMLogger.get_instance('detector_memory', log_level='ERROR')
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    model.init_weights()
    model.train()
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    # The optimizer makes its state in its first step.
    train(model, wrapper, batch(1, FIRST_SIZE), amp)
    data = batch(batch_size, size)
    held = held_bytes(model, wrapper)
    return held, held + peak_bytes(lambda: train(model, wrapper, data, amp))


def build_parser() -> argparse.ArgumentParser:
    """The command line of this script."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('config', help='config of a detector')
    parser.add_argument('--batch-size', type=int, default=2, metavar='N',
                        help='images of an iteration (default: 2)')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1344),
                        metavar=('HEIGHT', 'WIDTH'), help='of the images (default: 800 1344)')
    parser.add_argument('--amp', action='store_true',
                        help='bfloat16 autocast; for one-stage detectors')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE',
                        help='change settings of the config')
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the two figures of one setting."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.batch_size < 1 or min(options.size) < 32:
        parser.error('--batch-size must be at least 1 and --size at least 32 32, got '
                     f'{options.batch_size} and {options.size[0]} {options.size[1]}')
    config = Config.fromfile(options.config)
    config.merge_from_dict(options.cfg_options or {})
    if options.amp and 'rpn_head' in config.model:
        parser.error(f'--amp needs a one-stage detector, and {options.config} has proposals: '
                     "mmcv's NMS on a CPU takes no bfloat16")
    held, peak = measure(config, options.batch_size, options.size, options.amp)
    print(f'held between steps {held / 2**30:.2f} GiB, peak of a step {peak / 2**30:.2f} GiB')
    return 0


if __name__ == '__main__':
    sys.exit(main())
