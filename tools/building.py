"""Builds what a config describes; a mistake in it becomes one sentence, not a traceback."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from cli import UserError, one_line
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

# What constructors and registries raise for an argument that they do not accept.
_BUILD_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
                 OSError, TypeError, ValueError)


@contextlib.contextmanager
def config_errors_explained(config_path: str) -> Iterator[None]:
    """Turns the error of a constructor into one sentence with its place in the code.

    Args:
        config_path: The config file, for the message.

    Raises:
        UserError: From the error.
    """
    try:
        yield
    except _BUILD_ERRORS as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f'config {config_path}: {type(error).__name__}: {one_line(error)} '
            f'({Path(place.filename).name}, line {place.lineno})') from error


def make_folder(path: str | Path, what: str) -> None:
    """Makes a folder that results go to, with its parents.

    Args:
        path: The folder; it may exist.
        what: What it is, for the message.

    Raises:
        UserError: If it cannot be made or written.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'{what} {path} cannot be made: {error.strerror}') from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f'{what} {path} cannot be written')


def build_runner(cfg: Config, config_path: str, use: Literal['train', 'test']) -> Runner:
    """Builds the runner and, unlike mmengine, at once all that ``use`` needs.

    Args:
        cfg: The config, with all options applied.
        config_path: Its file, for messages.
        use: The method of the runner that will be called.

    Raises:
        UserError: If the work dir cannot be made, or a constructor refuses its arguments.
    """
    make_folder(cfg.work_dir, 'work dir')
    with config_errors_explained(config_path):
        runner = Runner.from_cfg(cfg) if 'runner_type' not in cfg else RUNNERS.build(cfg)
        # Runners of other types may need another order.
        if type(runner) is Runner and use == 'train':
            # Reading the property builds the loop and its data; Runner.train takes both as is.
            _ = runner.train_loop
            runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        elif type(runner) is Runner:
            _ = runner.test_loop
    return runner
