"""What the tools share: user errors, command line options and the CPU process group."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence

import torch
from mmengine.config import Config, DictAction
from mmengine.device import get_device


class UserError(Exception):
    """A mistake in the input; its text is the one sentence the user reads."""


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks, nor the quotes of ``KeyError``."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return ' '.join(text.split())


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
    """``DictAction`` that answers a malformed entry with a usage error."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: Sequence[str], option_string: str | None = None) -> None:
        for value in values:
            if not re.match(r'[^.=]+(\.[^.=]+)*=', value):
                parser.error(f'argument {option_string}: expected KEY=VALUE, got {value!r}; KEY '
                             'is names joined by single dots')
            try:
                super().__call__(parser, namespace, [value], option_string)
            except (AssertionError, RecursionError):
                parser.error(f'argument {option_string}: the brackets of {value!r} do not match')


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


def set_up_launcher(cfg: Config, launcher: str, local_rank: int) -> None:
    """Prepares ``cfg`` and, on a CPU, the process group for ``launcher``.

    Raises:
        UserError: If the launcher's environment variables or GPU are missing.
    """
    cfg.launcher = launcher
    if launcher == 'none':
        return
    names, starter = _ENVIRONMENT[launcher]
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(f'--launcher {launcher} needs {", ".join(missing)} in the environment: '
                        f'start the tool with {starter}')
    os.environ.setdefault('LOCAL_RANK', str(local_rank))
    if get_device() == 'cpu':
        if launcher != 'pytorch':
            raise UserError(f'--launcher {launcher} needs a GPU, and no GPU is visible: on CPUs '
                            f'start the tool with {_ENVIRONMENT["pytorch"][1]}')
        # mmengine's own start calls torch.cuda.set_device and passes device_ids to DDP.
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group('gloo')
        wrapper = dict(type='MMDistributedDataParallel', device_ids=None,
                       broadcast_buffers=False,
                       find_unused_parameters=cfg.get('find_unused_parameters', False))
        wrapper.update(cfg.get('model_wrapper_cfg') or {})
        cfg.model_wrapper_cfg = wrapper


# What mmengine reads, and what sets it.
_ENVIRONMENT = {
    'pytorch': (('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'),
                'torchrun or tools/dist_train.sh'),
    'slurm': (('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_NODELIST'), 'srun'),
    'mpi': (('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK',
             'MASTER_ADDR'), 'mpirun of Open MPI'),
}
_WORLD_SIZE = {'pytorch': 'WORLD_SIZE', 'slurm': 'SLURM_NTASKS', 'mpi': 'OMPI_COMM_WORLD_SIZE'}
_RANK = {'pytorch': 'RANK', 'slurm': 'SLURM_PROCID', 'mpi': 'OMPI_COMM_WORLD_RANK'}


def world_size(launcher: str) -> int:
    """Number of processes of this run, known before the process group exists."""
    return int(os.environ.get(_WORLD_SIZE.get(launcher, ''), 1))


def rank(launcher: str) -> int:
    """Number of this process in its run, known before the process group exists."""
    return int(os.environ.get(_RANK.get(launcher, ''), 0))


def say(message: str, launcher: str) -> None:
    """Prints one line, from the first process of the run only."""
    if rank(launcher) == 0:
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
