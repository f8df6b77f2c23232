"""Evaluates a detector or a classifier: ``python tools/test.py CONFIG CHECKPOINT``."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path

from building import build_runner
from checkpoints import (
    check_checkpoint_classes,
    check_checkpoint_fits,
    load_checkpoint,
    require_checkpoint,
    weights_only,
)
from class_folders import check_class_folders
from cli import (
    UserError,
    add_runner_arguments,
    exits_on_user_error,
    say,
    set_up_launcher,
    walk_dicts,
)
from coco_data import OwnData, add_data_arguments, apply_own_data, parse_own_data
from config_file import (
    is_classifier,
    load_config,
    merge_cfg_options,
    require_settings,
    set_loader_defaults,
    set_work_dir,
)
from data_checks import check_class_names, check_data_present, class_names
from mmengine.config import Config, ConfigDict
from resized_images import check_resized_sizes

_NEEDED = ('model', 'test_dataloader', 'test_cfg', 'test_evaluator')


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(description='Evaluate a detector or a classifier.')
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--out', metavar='FILE.pkl',
                        help='write the predictions to this pickle file')
    parser.add_argument('--show', action='store_true', help='show the predictions on screen')
    parser.add_argument(
        '--show-dir', metavar='DIR',
        help='write pictures of the predictions to DIR below the work dir of this run')
    parser.add_argument('--wait-time', type=float, default=2.0, metavar='SECONDS',
                        help='how long --show shows a picture (default: 2)')
    parser.add_argument('--tta', action='store_true',
                        help='average over the image and its mirror image; not with masks')
    add_runner_arguments(parser)
    add_data_arguments(parser)
    return parser


@exits_on_user_error
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        Exit status, 0 or 2 (the input was refused before any work).
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.out is not None and Path(args.out).suffix not in ('.pkl', '.pickle'):
        parser.error(f'argument --out: {args.out!r} must end in .pkl or .pickle')
    own_data = parse_own_data(parser, args, needs_train=False)
    with weights_only(trusted=False):
        return _test(args, own_data)


def _test(args: argparse.Namespace, own_data: OwnData | None) -> int:
    cfg = load_config(args.config)
    require_checkpoint(args.checkpoint)
    if own_data is not None:
        require_settings(cfg, args.config, ('model', ))
        apply_own_data(cfg, own_data)
    merge_cfg_options(cfg, args.cfg_options)
    require_settings(cfg, args.config, _NEEDED)
    set_work_dir(cfg, args.config, args.work_dir)
    cfg.load_from = args.checkpoint
    cfg.resume = False
    check_data_present(cfg, ('test', ))
    check_class_names(cfg, ('test', ))
    check_class_folders(cfg, ('test', ))
    if own_data is not None:
        check_resized_sizes(cfg, ('test', ))
    checkpoint = load_checkpoint(args.checkpoint)
    check_checkpoint_classes(checkpoint, class_names(cfg, 'test'), args.checkpoint)
    if is_classifier(cfg):
        set_loader_defaults(cfg)
    if args.show or args.show_dir:
        _enable_drawing(cfg, args)
    if args.tta:
        _enable_tta(cfg)
    set_up_launcher(cfg, args.launcher, args.local_rank)

    # Slow imports, after the checks.
    from mmdet.evaluation import DumpDetResults
    from mmdet.utils import setup_cache_size_limit_of_dynamo
    from mmengine.evaluator import DumpResults
    setup_cache_size_limit_of_dynamo()
    runner = build_runner(cfg, args.config, 'test')
    check_checkpoint_fits(checkpoint, runner.model, args.checkpoint)
    del checkpoint
    if args.out is not None:
        dump = DumpResults if is_classifier(cfg) else DumpDetResults
        runner.test_evaluator.metrics.append(dump(out_file_path=args.out))
    runner.test()
    if args.show_dir:
        pictures = Path(runner.work_dir) / args.show_dir if is_classifier(cfg) else \
            Path(runner.work_dir) / runner.timestamp / args.show_dir
        say(f'pictures: {pictures}', args.launcher)
    return 0


def _enable_drawing(cfg: Config, args: argparse.Namespace) -> None:
    hook = (cfg.get('default_hooks') or {}).get('visualization')
    if hook is None:
        raise UserError('--show and --show-dir need the hook default_hooks.visualization in '
                        "the config: dict(type='DetVisualizationHook')")
    if is_classifier(cfg):
        hook.enable = True
        hook.interval = 1
    else:
        hook.draw = True
    if args.show:
        hook.show = True
        hook.wait_time = args.wait_time
    if args.show_dir and is_classifier(cfg):
        hook.out_dir = str(Path(cfg.work_dir) / args.show_dir)
    elif args.show_dir:
        hook.test_out_dir = args.show_dir


def _enable_tta(cfg: Config) -> None:
    """Wraps the model for test-time augmentation, by default the horizontal mirror image."""
    if any(node.get('mask_head') for _, node in walk_dicts(cfg.model)):
        raise UserError('--tta merges boxes only, and this model predicts masks')
    dataset = next(node for _, node in walk_dicts(cfg.test_dataloader.dataset)
                   if 'pipeline' in node and 'dataset' not in node)
    if 'tta_pipeline' not in cfg:
        pack = ConfigDict(copy.deepcopy(dataset.pipeline[-1]))
        # Those of a classifier hold the flip by default.
        if not is_classifier(cfg) or 'meta_keys' in pack:
            keys = tuple(pack.get('meta_keys') or ('img_id', 'img_path', 'ori_shape',
                                                   'img_shape', 'scale_factor'))
            pack.meta_keys = keys + tuple(k for k in ('flip', 'flip_direction') if k not in keys)
        mirrored = [dict(type='RandomFlip', prob=prob) for prob in (1.0, 0.0)]
        cfg.tta_pipeline = [*dataset.pipeline[:-1],
                            dict(type='TestTimeAug', transforms=[mirrored, [pack]])]
    if 'tta_model' not in cfg and is_classifier(cfg):
        cfg.tta_model = dict(type='AverageClsScoreTTA')
    elif 'tta_model' not in cfg:
        nms = dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)
        cfg.tta_model = dict(type='DetTTAModel', tta_cfg=nms)
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


if __name__ == '__main__':
    sys.exit(main())
