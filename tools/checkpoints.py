"""Reads checkpoints and checks that they belong to a model, where loading would only log."""

from __future__ import annotations

import pickle
from pathlib import Path

from cli import UserError
from mmengine.runner import CheckpointLoader
from torch import nn


def require_checkpoint(path: str) -> None:
    """Refuses a checkpoint path that is neither a URL nor a file.

    Raises:
        UserError: If the file does not exist.
    """
    if '://' not in path and not Path(path).is_file():
        raise UserError(f'checkpoint {path} does not exist (looked in {Path.cwd()})')


def require_readable_checkpoint(path: str) -> None:
    """Refuses a local checkpoint that does not exist or cannot be read; a URL passes.

    Raises:
        UserError: With the path.
    """
    if '://' not in path:
        load_checkpoint(path)


def load_checkpoint(path: str) -> dict:
    """Loads a checkpoint to the CPU.

    Raises:
        UserError: If it does not exist or is no checkpoint.
    """
    require_checkpoint(path)
    try:
        checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu', logger='silent')
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f'checkpoint {path} cannot be read: {error}') from error
    if not isinstance(checkpoint, dict):
        raise UserError(f'checkpoint {path} holds a {type(checkpoint).__name__}, not a dict of '
                        'weights')
    return checkpoint


def check_checkpoint_classes(checkpoint: dict, classes: tuple[str, ...], path: str) -> None:
    """Refuses a checkpoint that was trained on other classes.

    Args:
        checkpoint: The loaded checkpoint; one without class names passes.
        classes: Class names of the data, in label order.
        path: The checkpoint's path, for the message.

    Raises:
        UserError: With both lists.
    """
    meta = (checkpoint.get('meta') or {}).get('dataset_meta') or {}
    trained = meta.get('classes')
    if trained is not None and classes and tuple(trained) != classes:
        raise UserError(f'checkpoint {path} was trained on the classes {", ".join(trained)}; the '
                        f'data has {", ".join(classes)}')


def check_checkpoint_fits(checkpoint: dict, model: nn.Module, path: str) -> None:
    """Refuses a checkpoint that would leave parameters of the model at random values.

    Args:
        checkpoint: The loaded checkpoint.
        model: The model, possibly wrapped for distribution or augmentation.
        path: The checkpoint's path, for the message.

    Raises:
        UserError: With the number of parameters that do not fit and the first of them.
    """
    weights = checkpoint.get('state_dict', checkpoint)
    shapes = {key.removeprefix('module.'): value.shape for key, value in weights.items()}
    wanted = {key.removeprefix('module.').removeprefix('module.'): value.shape
              for key, value in model.state_dict().items()}
    unfit = [key for key, shape in wanted.items() if shapes.get(key) != shape]
    if unfit:
        found = shapes.get(unfit[0])
        raise UserError(
            f'checkpoint {path} does not fit the model of the config: {len(unfit)} of '
            f'{len(wanted)} tensors differ, first {unfit[0]}: the model has '
            f'{tuple(wanted[unfit[0]])}, the checkpoint '
            f'{"nothing" if found is None else tuple(found)}')
