"""What the tools share: user errors, config loading and the CPU process group."""

from __future__ import annotations

import argparse
import copy
import difflib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.device import get_device


class UserError(Exception):
    """A mistake in the input; its text is the one sentence the user reads."""


def exits_on_user_error(main: Callable[..., int]) -> Callable[..., int]:
    """Turns a :class:`UserError` into its sentence on stderr and exit status 2."""

    @functools.wraps(main)
    def wrapper(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except UserError as error:
            print(f'error: {error}', file=sys.stderr)
            return 2
        finally:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    return wrapper


class CfgOptions(DictAction):
    """``DictAction`` that answers an entry without ``=`` with a usage error."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: Sequence[str], option_string: str | None = None) -> None:
        for value in values:
            if '=' not in value:
                parser.error(f'argument {option_string}: expected KEY=VALUE, got {value!r}')
        super().__call__(parser, namespace, values, option_string)


def add_runner_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``train.py`` and ``test.py`` have in common."""
    parser.add_argument(
        '--work-dir', metavar='DIR',
        help='where logs, checkpoints and the complete config go '
             '(default: work_dir of the config, else ./work_dirs/<config name>)')
    parser.add_argument(
        '--cfg-options', nargs='+', action=CfgOptions, metavar='KEY=VALUE',
        help='change settings of the config, e.g. train_dataloader.batch_size=1 '
             'model.rpn_head.anchor_generator.scales="[4]"; applied last, so they win over the '
             'config and over --data')
    parser.add_argument(
        '--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none',
        help='how the processes of a distributed run were started (default: none)')
    # torch.distributed.launch passes this option; torchrun sets LOCAL_RANK instead.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0,
                        help=argparse.SUPPRESS)


def load_config(path: str) -> Config:
    """Loads a config file.

    Args:
        path: Config file (``.py``, ``.json``, ``.yaml`` or ``.yml``).

    Raises:
        UserError: If the file does not exist or cannot be loaded.
    """
    file = Path(path)
    if not file.is_file():
        neighbours = [str(p) for p in file.parent.glob('*.py')] if file.parent.is_dir() else []
        close = difflib.get_close_matches(str(file), neighbours, n=1)
        hint = f'; did you mean {close[0]}?' if close else ''
        raise UserError(f'config {path} does not exist (looked in {Path.cwd()}){hint}')
    try:
        return Config.fromfile(path)
    except ImportError as error:
        missing = _root_of(error)
        if not isinstance(missing, ModuleNotFoundError):
            raise
        hint = ('; run `make demo` once or `pip install -e .` in the repository'
                if missing.name == 'mmlaplacian' else '')
        raise UserError(f'config {path} needs the Python module {missing.name!r}, which is not '
                        f'installed{hint}') from error
    except (OSError, SyntaxError, KeyError, ValueError) as error:
        raise UserError(f'config {path} cannot be loaded: {error}') from error


def _root_of(error: BaseException) -> BaseException:
    """The error that started a chain; mmengine wraps failed imports twice."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def merge_cfg_options(cfg: Config, options: dict | None) -> None:
    """Merges ``--cfg-options`` into ``cfg``.

    Raises:
        UserError: If an option does not fit the config.
    """
    if not options:
        return
    try:
        cfg.merge_from_dict(copy.deepcopy(options))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        given = ' '.join(f'{key}={value}' for key, value in options.items())
        raise UserError(f'--cfg-options {given} does not fit the config: {error}') from error


def set_work_dir(cfg: Config, config_path: str, work_dir: str | None) -> None:
    """Sets ``cfg.work_dir``: option first, then config, then the config's name."""
    if work_dir is not None:
        cfg.work_dir = work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', Path(config_path).stem)


def set_up_launcher(cfg: Config, launcher: str, local_rank: int) -> None:
    """Prepares ``cfg`` and, on a CPU, the process group for ``launcher``.

    Raises:
        UserError: If the launcher's environment variables are missing.
    """
    cfg.launcher = launcher
    if launcher != 'none':
        os.environ.setdefault('LOCAL_RANK', str(local_rank))
    if launcher != 'pytorch':
        return
    missing = [name for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
               if name not in os.environ]
    if missing:
        raise UserError(f'--launcher pytorch needs {", ".join(missing)} in the environment: '
                        'start the tool with torchrun or tools/dist_train.sh')
    if get_device() == 'cpu':
        # mmengine's own start calls torch.cuda.set_device and passes device_ids to DDP.
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group('gloo')
        wrapper = dict(type='MMDistributedDataParallel', device_ids=None,
                       broadcast_buffers=False,
                       find_unused_parameters=cfg.get('find_unused_parameters', False))
        wrapper.update(cfg.get('model_wrapper_cfg') or {})
        cfg.model_wrapper_cfg = wrapper


_WORLD_SIZE = {'pytorch': 'WORLD_SIZE', 'slurm': 'SLURM_NTASKS', 'mpi': 'OMPI_COMM_WORLD_SIZE'}
_RANK = {'pytorch': 'RANK', 'slurm': 'SLURM_PROCID', 'mpi': 'OMPI_COMM_WORLD_RANK'}


def world_size(launcher: str) -> int:
    """Number of processes of this run, known before the process group exists."""
    return int(os.environ.get(_WORLD_SIZE.get(launcher, ''), 1))


def say(message: str, launcher: str) -> None:
    """Prints one line, from the first process of the run only."""
    if int(os.environ.get(_RANK.get(launcher, ''), 0)) == 0:
        print(message, flush=True)


def walk_dicts(node: object, path: str = '') -> list[tuple[str, dict]]:
    """Every dict of a nested config with its dotted path, outermost first."""
    found: list[tuple[str, dict]] = []
    if isinstance(node, dict):
        found.append((path, node))
        children = [(str(key), value) for key, value in node.items()]
    elif isinstance(node, (list, tuple)):
        children = [(str(i), value) for i, value in enumerate(node)]
    else:
        return found
    for key, value in children:
        found.extend(walk_dicts(value, f'{path}.{key}' if path else key))
    return found
