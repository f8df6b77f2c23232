"""Loads a config, applies ``--cfg-options`` and checks that the settings exist."""

from __future__ import annotations

import copy
import difflib
import inspect
import os
from collections.abc import Iterable
from pathlib import Path

from cli import UserError, one_line
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.runner import Runner
from yaml import YAMLError

# A config is a program: these are what its mistakes raise, here or in mmengine's merging.
_LOAD_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError,
                RuntimeError, SyntaxError, TypeError, ValueError, YAMLError)

# Settings that mmengine or mmdet obey although a config may leave them out.
_KNOWN_SETTINGS = (
    *inspect.signature(Runner).parameters,
    'activation_checkpointing', 'backend_args', 'compile', 'custom_imports',
    'efficient_conv_bn_eval', 'find_unused_parameters', 'model_wrapper_cfg', 'runner_type',
    'sync_bn', 'tta_model', 'tta_pipeline')


def load_config(path: str) -> Config:
    """Loads a config file.

    Args:
        path: Config file (``.py``, ``.json``, ``.yaml`` or ``.yml``).

    Raises:
        UserError: If the file does not exist or cannot be loaded.
    """
    file = Path(path)
    if file.is_dir():
        raise UserError(f'config {path} is a folder, not a config file')
    if not file.is_file():
        names = [p.name for p in file.parent.glob('*.py')] if file.parent.is_dir() else []
        close = difflib.get_close_matches(file.name, names, n=1, cutoff=0.8)
        hint = f'; did you mean {file.with_name(close[0])}?' if close else ''
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
    except _LOAD_ERRORS as error:
        raise UserError(f'config {path} cannot be loaded: {one_line(error)}') from error


def _root_of(error: BaseException) -> BaseException:
    """The error that started a chain; mmengine wraps failed imports twice."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def require_settings(cfg: Config, path: str, names: Iterable[str]) -> None:
    """Refuses a config without settings that a tool needs.

    Args:
        cfg: The config.
        path: Its file, for the message.
        names: Top-level settings that must be dicts, ``*_dataloader`` with a ``dataset``, or
            ``*_evaluator``, which may be a list of dicts.

    Raises:
        UserError: With the settings that are missing.
    """
    missing = []
    for name in names:
        value = cfg.get(name)
        kinds = (dict, list) if name.endswith('_evaluator') else dict
        if not isinstance(value, kinds):
            missing.append(name)
        elif name.endswith('_dataloader') and not isinstance(value.get('dataset'), dict):
            missing.append(f'{name}.dataset')
    if missing:
        raise UserError(f'config {path} has no {", ".join(missing)} (each must be a dict), '
                        'without which this tool cannot run')


def merge_cfg_options(cfg: Config, options: dict | None) -> None:
    """Merges ``--cfg-options`` into ``cfg``.

    Raises:
        UserError: If an option does not fit the config or changes no setting of it.
    """
    if not options:
        return
    for key in options:
        name = key.partition('.')[0]
        if name not in cfg and name not in _KNOWN_SETTINGS:
            close = difflib.get_close_matches(name, [*cfg, *_KNOWN_SETTINGS], n=1)
            hint = f'; did you mean {close[0]}?' if close else ''
            raise UserError(f'--cfg-options {key}={options[key]}: {name!r} is no setting of the '
                            f'config{hint}')
    try:
        cfg.merge_from_dict(copy.deepcopy(options))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        given = ' '.join(f'{key}={value}' for key, value in options.items())
        raise UserError(
            f'--cfg-options {given} does not fit the config: {one_line(error)}') from error


def is_classifier(cfg: Config) -> bool:
    """Whether a config is one of mmpretrain."""
    return cfg.get('default_scope') == 'mmpretrain'


def set_loader_defaults(cfg: Config) -> None:
    """Fills in what mmpretrain's own tools add to the data loaders of a config."""
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        loader = cfg.get(name)
        if loader:
            loader.setdefault('pin_memory', get_device() != 'cpu')
            loader.setdefault('persistent_workers', loader.get('num_workers', 0) > 0)
            loader.setdefault('collate_fn', dict(type='default_collate'))


def set_work_dir(cfg: Config, config_path: str, work_dir: str | None) -> None:
    """Sets ``cfg.work_dir``: option first, then config, then the config's name."""
    if work_dir is not None:
        cfg.work_dir = work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = os.path.join('work_dirs', Path(config_path).stem)
