"""Writes an ONNX file: ``python tools/export_onnx.py CONFIG CHECKPOINT --out model.onnx``.

The file holds pre-processing (colour order, mean and std, padding), network, NMS and mask pasting
in standard ONNX operators; ``docs/deploy.md`` describes its inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from building import config_errors_explained, make_folder
from checkpoints import check_checkpoint_fits, is_laplacian_former, load_checkpoint
from cli import CfgOptions, UserError, exits_on_user_error, walk_dicts
from config_file import load_config, merge_cfg_options
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_state_dict
from torch import nn

OPSET = 18
CHECK_SIZES = ((224, 224), (250, 333), (800, 1344))
# No multiple of anything, so that no size of the example stays in the graph.
_DYNAMIC_EXAMPLE = (250, 333)
_NEEDED = ('onnx', 'onnxruntime', 'onnxscript')


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(
        description='Write RetinaNet, Faster R-CNN or Mask R-CNN, or backbone and neck of any '
                    'detector, as an ONNX file: image in, detections out.')
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', nargs='?',
                        help='checkpoint file (default: random weights, to measure with)')
    parser.add_argument('--out', required=True, metavar='FILE', help='file to write, .onnx')
    parser.add_argument('--features', action='store_true',
                        help='backbone and neck alone: image batch in, feature maps out')
    size = parser.add_mutually_exclusive_group()
    size.add_argument('--size', type=int, nargs=2, metavar=('HEIGHT', 'WIDTH'),
                      help="the image size of the file (default: the test pipeline's)")
    size.add_argument('--dynamic', action='store_true',
                      help='any image size, not one')
    parser.add_argument('--check', nargs='*', metavar='IMAGE',
                        help='run the file with onnxruntime and compare it with mmdet, on a '
                             'generated picture and on these')
    parser.add_argument('--cfg-options', nargs='+', action=CfgOptions, metavar='KEY=VALUE',
                        help='change settings of the config')
    return parser


@exits_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status, 0 or 2 (nothing was written, or the file failed its check and was removed).
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.size and min(args.size) < 32:
        parser.error(f'argument --size: expected at least 32 pixels, got {args.size}')
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UserError(f'{", ".join(missing)} must be installed to export to ONNX: '
                        "pip install -e '.[deploy]'")
    cfg = load_config(args.config)
    merge_cfg_options(cfg, args.cfg_options)
    if not isinstance(cfg.get('model'), dict) or 'backbone' not in cfg.model:
        raise UserError(f'config {args.config} has no model.backbone')
    if args.dynamic:
        _refuse_dynamic_landmarks(cfg)
    size = _DYNAMIC_EXAMPLE if args.dynamic else tuple(args.size or _test_size(cfg, args.config))
    checkpoint = load_checkpoint(args.checkpoint) if args.checkpoint else None
    out = Path(args.out)
    make_folder(out.parent, 'folder of --out')

    init_default_scope(cfg.get('default_scope', 'mmdet'))
    torch.manual_seed(0)
    with config_errors_explained(args.config):
        model = MODELS.build(cfg.model)
    if checkpoint is None:
        model.init_weights()
    else:
        check_checkpoint_fits(checkpoint, model, args.checkpoint)
        load_state_dict(model, checkpoint.get('state_dict', checkpoint))
    write(model.eval(), size, out, features=args.features, dynamic=args.dynamic,
          metadata=_metadata(cfg, checkpoint, args.dynamic))
    print(f'{out}: {out.stat().st_size / 2**20:.1f} MiB, '
          + ('any image size' if args.dynamic else '{} x {} pixels'.format(*size)), flush=True)
    if args.check is not None:
        from onnx_check import CheckError, check
        try:
            check(model, out, CHECK_SIZES if args.dynamic else (size, ), args.check,
                  features=args.features)
        except CheckError as error:
            out.unlink()
            raise UserError(f'{out} was removed, the export is not good: {error}') from error
    return 0


def write(model: nn.Module, size: tuple[int, int], out: Path, *, features: bool, dynamic: bool,
          metadata: dict[str, object]) -> None:
    """Exports a detector.

    Args:
        model: A detector of mmdet in eval mode.
        size: Height and width of the example image, and of the file's unless ``dynamic``.
        out: File to write.
        features: Backbone and neck alone.
        dynamic: Leave height and width open, with ``features`` the batch too.
        metadata: Written to the file as JSON, under ``mmlaplacian``.

    Raises:
        UserError: The detector has a part without an ONNX form here.
    """
    from onnx_graphs import KINDS, Features  # slow imports, after the checks

    from mmlaplacian.export import onnx_translations
    if features:
        graph = Features(model)
    elif type(model) in KINDS:
        graph = KINDS[type(model)](model)
    else:
        raise UserError(f'model must be one of {[kind.__name__ for kind in KINDS]} to be exported '
                        f'as a whole, got {type(model).__name__}; --features exports backbone and '
                        'neck alone')
    batch = 2 if features and dynamic else 1
    image = torch.rand(batch, 3, *size, generator=torch.Generator().manual_seed(0)) * 255
    open_dims = torch.export.Dim.DYNAMIC
    shapes = {2: open_dims, 3: open_dims, **({0: open_dims} if features else {})}
    with torch.no_grad():
        # First by itself: mmdet's box coder refuses torch.onnx's own tracing.
        program = torch.export.export(graph.eval(), (image, ), strict=False,
                                      dynamic_shapes=(shapes, ) if dynamic else None)
        names = ([f'map{i}' for i in range(len(graph(image)))] if features
                 else ['boxes', 'labels', 'scores', 'masks'][:4 if model.with_mask else 3])
    converted = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, input_names=['image'], output_names=names,
        custom_translation_table=onnx_translations(), verbose=False)
    foreign = {node.domain for node in converted.model.graph.all_nodes()} - {''}
    if foreign:
        raise UserError(f'the graph holds operators of {foreign}, which no runtime has')
    converted.model.metadata_props['mmlaplacian'] = json.dumps(metadata)
    converted.save(out, external_data=False)


def _test_resize(cfg: Config) -> dict:
    pipeline = (cfg.get('test_dataloader') or {}).get('dataset', {}).get('pipeline', [])
    return next((step for step in pipeline if step.get('type') == 'Resize'), {})


def _test_size(cfg: Config, path: str) -> tuple[int, int]:
    """Height and width of the test pipeline's Resize."""
    scale = _test_resize(cfg).get('scale')
    if not isinstance(scale, (tuple, list)) or len(scale) != 2:
        raise UserError(f'the test pipeline of config {path} names no image size: give --size')
    width, height = scale
    return height, width


def _refuse_dynamic_landmarks(cfg: Config) -> None:
    for _, node in walk_dicts(cfg.model.to_dict()):
        if is_laplacian_former(node) and node.get('pool_ratio'):
            raise UserError(f'pool_ratio={node["pool_ratio"]} makes the number of landmarks, and '
                            "with it the solver's steps, depend on the image: give --size instead "
                            'of --dynamic')


def _least_side(cfg: Config) -> int:
    """Pixels from which every map of a LaplacianFormer is at least as large as its grid."""
    sides = [1]
    for _, node in walk_dicts(cfg.model.to_dict()):
        if is_laplacian_former(node):
            stride = 4 * 2**max(node.get('out_indices', (3, )))
            sides.append(stride * (node.get('landmark_grid', 7) - 1) + 1)
    return max(sides)


def _metadata(cfg: Config, checkpoint: dict | None, dynamic: bool) -> dict[str, object]:
    """What a program needs besides the graph: names, colours, how images are resized."""
    meta = ((checkpoint or {}).get('meta') or {}).get('dataset_meta') or {}
    resize = _test_resize(cfg)
    preprocessor = cfg.model.get('data_preprocessor') or {}
    return dict(
        classes=list(meta.get('classes') or []), palette=meta.get('palette'),
        scale=resize.get('scale'), keep_ratio=resize.get('keep_ratio', False),
        mean=list(preprocessor.get('mean') or [0, 0, 0]),
        least_side=_least_side(cfg) if dynamic else 1)


if __name__ == '__main__':
    sys.exit(main())
