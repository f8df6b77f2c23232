"""Trains a detector or a classifier: ``python tools/train.py CONFIG``, own data by ``--data``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from building import build_runner
from checkpoints import (
    check_pretrained,
    is_laplacian_former,
    require_checkpoint,
    require_readable_checkpoint,
    weights_only,
)
from class_folders import check_class_folders
from cli import UserError, add_runner_arguments, exits_on_user_error, say, set_up_launcher
from coco_data import (
    OwnData,
    add_data_arguments,
    apply_own_data,
    num_training_images,
    parse_own_data,
    shorten_warm_up,
)
from config_file import (
    is_classifier,
    load_config,
    merge_cfg_options,
    require_settings,
    set_loader_defaults,
    set_work_dir,
)
from data_checks import check_class_names, check_data_present
from mmengine.config import Config
from mmengine.device import get_device
from resized_images import check_resized_sizes
from run_state import add_safeguards, claimed, newest_intact_checkpoint

_NEEDED = ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper')


def build_parser() -> argparse.ArgumentParser:
    """The command line of this tool."""
    parser = argparse.ArgumentParser(description='Train a detector or a classifier.')
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--resume', nargs='?', const='auto', metavar='CHECKPOINT',
        help='go on from CHECKPOINT, or without a value from the latest one in the work dir')
    parser.add_argument(
        '--trust-checkpoint', action='store_true',
        help='with --resume: load objects of any class from the checkpoint, which can run any '
             'code; for checkpoints of your own runs')
    parser.add_argument(
        '--pretrained', metavar='CHECKPOINT',
        help='start from the backbone in CHECKPOINT, of a classifier, a detector or the backbone '
             'alone; the same as --cfg-options model.backbone.init_cfg.checkpoint=CHECKPOINT')
    parser.add_argument('--amp', action='store_true',
                        help='train in automatic mixed precision; needs a GPU')
    parser.add_argument(
        '--auto-scale-lr', action='store_true',
        help='scale the learning rate by batch size x processes / auto_scale_lr.base_batch_size')
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
    own_data = parse_own_data(parser, args, needs_train=True)
    if args.trust_checkpoint and not args.resume:
        parser.error('--trust-checkpoint needs --resume')
    with weights_only(trusted=args.trust_checkpoint):
        return _train(args, own_data)


def _train(args: argparse.Namespace, own_data: OwnData | None) -> int:
    cfg = load_config(args.config)
    if args.pretrained is not None:
        _set_pretrained(cfg, args.pretrained, args.resume)
    notes = []
    if own_data is not None:
        require_settings(cfg, args.config, ('model', ))
        notes += apply_own_data(cfg, own_data)
    merge_cfg_options(cfg, args.cfg_options)
    require_settings(cfg, args.config, _NEEDED)
    if args.pretrained is not None and cfg.get('load_from'):
        raise UserError(f'--pretrained {args.pretrained} has no effect: load_from='
                        f'{cfg.load_from} replaces all weights; leave one of them out')
    check_pretrained(cfg.model, args.config)
    add_safeguards(cfg)
    set_work_dir(cfg, args.config, args.work_dir)
    if is_classifier(cfg):
        set_loader_defaults(cfg)
    if args.amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    _require_gpu_for_amp(cfg)
    if args.auto_scale_lr:
        _enable_auto_scale_lr(cfg)
    if args.resume:
        _set_resume(cfg, args.resume, args.launcher, args.trust_checkpoint)
    elif cfg.get('load_from'):
        require_readable_checkpoint(cfg.load_from)
    # An empty val_cfg, the usual one of a classifier, is one too.
    splits = ('train', 'val') if cfg.get('val_cfg') is not None else ('train', )
    check_data_present(cfg, splits)
    check_class_names(cfg, splits)
    check_class_folders(cfg, splits)
    if own_data is not None:
        check_resized_sizes(cfg, splits)
    set_up_launcher(cfg, args.launcher, args.local_rank)
    if own_data is not None:
        notes += shorten_warm_up(cfg, num_training_images(cfg), args.cfg_options or ())

    from mmdet.utils import setup_cache_size_limit_of_dynamo  # slow import, after the checks
    setup_cache_size_limit_of_dynamo()
    with claimed(cfg.work_dir, args.launcher):
        runner = build_runner(cfg, args.config, 'train')
        for note in notes:
            # Through the logger, so that it stands in the log and after the long config.
            runner.logger.info(note)
        runner.train()
    say(f'checkpoints and the complete config: {runner.work_dir}\n'
        f'log: {Path(runner.log_dir) / f"{runner.timestamp}.log"}', args.launcher)
    return 0


def _set_pretrained(cfg: Config, checkpoint: str, resume: str | None) -> None:
    if resume:
        raise UserError('--pretrained and --resume exclude each other: a resumed training takes '
                        'all weights from its own checkpoint')
    require_checkpoint(checkpoint)
    backbone = (cfg.get('model') or {}).get('backbone')
    if not is_laplacian_former(backbone):
        kind = backbone.get('type') if isinstance(backbone, dict) else None
        raise UserError('--pretrained needs a LaplacianFormer as model.backbone of the config, '
                        f'which has {kind or "none"}')
    others = backbone.get('init_cfg') or []
    others = [entry for entry in (others if isinstance(others, list) else [others])
              if entry.get('type') != 'Pretrained']
    own = dict(type='Pretrained', checkpoint=checkpoint)
    backbone.init_cfg = [*others, own] if others else own


def _require_gpu_for_amp(cfg: Config) -> None:
    if cfg.optim_wrapper.get('type') == 'AmpOptimWrapper' and get_device() == 'cpu':
        raise UserError('--amp (AmpOptimWrapper) needs a GPU, and no GPU is visible: leave it '
                        'out to train in float32 on the CPU')


def _enable_auto_scale_lr(cfg: Config) -> None:
    if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
        raise UserError('--auto-scale-lr needs auto_scale_lr.base_batch_size in the config, '
                        'the batch size that its learning rate is meant for')
    cfg.auto_scale_lr.enable = True


def _set_resume(cfg: Config, resume: str, launcher: str, trusted: bool) -> None:
    cfg.resume = True
    if resume != 'auto':
        require_readable_checkpoint(resume, trusted=trusted)
        cfg.load_from = resume
        return
    latest, notes = newest_intact_checkpoint(cfg.work_dir, trusted=trusted)
    cfg.load_from = latest
    if latest is None:
        # mmengine would look into last_checkpoint itself.
        cfg.resume = False
        say(f'nothing to resume in {cfg.work_dir}: training starts at the beginning', launcher)
    elif notes:
        say(f'{"; ".join(notes)}: resuming from {latest}, the newest intact one', launcher)


if __name__ == '__main__':
    sys.exit(main())
