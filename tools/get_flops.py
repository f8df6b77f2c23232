"""Parameters and GMACs of a config: ``python tools/get_flops.py CONFIG --shape 800 1280``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from building import config_errors_explained
from cli import CfgOptions, UserError, exits_on_user_error
from config_file import load_config, merge_cfg_options
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

_LAYERS = (torch.ops.aten.convolution, torch.ops.aten.addmm, torch.ops.aten.mm)


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description='Count parameters and multiply-adds (MACs) of a backbone and its detector.')
    parser.add_argument('config', help='config file')
    parser.add_argument('--shape', type=int, nargs='+', default=[800, 1280], metavar='PIXELS',
                        help='height and width, or one number for both (default: 800 1280)')
    parser.add_argument('--cfg-options', nargs='+', action=CfgOptions, metavar='KEY=VALUE',
                        help='change settings of the config')
    return parser


def count(model: nn.Module, image: torch.Tensor) -> tuple[int, int, int]:
    """Counts the work of one forward pass.

    Args:
        model: Called with ``image`` alone.
        image: Input ``(1, 3, H, W)``.

    Returns:
        Parameters, MACs of everything counted (layers, distances, solver and products of
        attention), MACs of linear and convolution layers alone. Normalisation and activations
        are not counted.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    # FlopCounterMode counts a multiply-add as two operations.
    flops = counter.get_flop_counts()['Global']
    macs = {operator: count // 2 for operator, count in flops.items()}
    layers = sum(macs.get(operator, 0) for operator in _LAYERS)
    return sum(p.numel() for p in model.parameters()), sum(macs.values()), layers


@exits_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status, 0 or 2.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if len(args.shape) > 2 or min(args.shape) < 1:
        parser.error(f'argument --shape: expected one or two positive numbers, got {args.shape}')
    height, width = args.shape * 2 if len(args.shape) == 1 else args.shape
    cfg = load_config(args.config)
    merge_cfg_options(cfg, args.cfg_options)
    if not isinstance(cfg.get('model'), dict) or 'backbone' not in cfg.model:
        raise UserError(f'config {args.config} has no model.backbone')
    init_default_scope(cfg.get('default_scope', 'mmdet'))

    from mmdet.structures import DetDataSample  # slow import, after the checks
    torch.manual_seed(0)
    with config_errors_explained(args.config):
        model = MODELS.build(cfg.model).eval()
    image = torch.rand(1, 3, height, width)
    sample = DetDataSample(metainfo=dict(
        img_shape=(height, width), ori_shape=(height, width), pad_shape=(height, width),
        batch_input_shape=(height, width), scale_factor=(1.0, 1.0)))
    rows = [('backbone', count(model.backbone, image))]
    model.forward = partial(model.forward, data_samples=[sample])
    rows.append(('detector', count(model, image)))

    print(f'{"":10}{"params":>12}{"GMACs":>12}{"linear+conv":>14}   at {height} x {width}')
    for name, (params, total, layers) in rows:
        print(f'{name:10}{params / 1e6:10.2f} M{total / 1e9:12.2f}{layers / 1e9:14.2f}')
    print('A MAC is one multiply-add, or one difference and its sum in a distance. The detector '
          'counts as many proposals as its test_cfg keeps for a random image with untrained '
          'weights.')
    return 0


if __name__ == '__main__':
    sys.exit(main())
