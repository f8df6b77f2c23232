"""Reads checkpoints and checks that they belong to a model, where loading would only log."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from building import config_errors_explained
from cli import UserError, one_line, walk_dicts
from mmengine.logging import HistoryBuffer
from mmengine.registry import MODELS
from mmengine.runner import CheckpointLoader
from mmengine.runner import checkpoint as mmengine_checkpoint
from torch import nn

# torch.load obeys it whatever its caller says.
_FORCE_VARIABLE = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
_REFUSED_OBJECT = re.compile(r'GLOBAL (\S+)')


def require_checkpoint(path: str) -> None:
    """Refuses a checkpoint path that is neither a URL nor a file.

    Raises:
        UserError: If the file does not exist.
    """
    if '://' not in path and not Path(path).is_file():
        raise UserError(f'checkpoint {path} does not exist (looked in {Path.cwd()})')


def require_readable_checkpoint(path: str, *, trusted: bool = False) -> None:
    """Refuses a local checkpoint that does not exist or cannot be read; a URL passes.

    Args:
        path: File or URL.
        trusted: See :func:`load_checkpoint`.

    Raises:
        UserError: With the path.
    """
    if '://' not in path:
        load_checkpoint(path, trusted=trusted)


@contextlib.contextmanager
def weights_only(*, trusted: bool) -> Iterator[None]:
    """Keeps everything in the block, mmengine's fallback too, from running a checkpoint's code.

    Args:
        trusted: Whether the user vouches for the checkpoint: then nothing is changed.
    """
    before = os.environ.get(_FORCE_VARIABLE)
    if not trusted:
        os.environ[_FORCE_VARIABLE] = '1'
    try:
        yield
    finally:
        if not trusted and before is None:
            os.environ.pop(_FORCE_VARIABLE, None)
        elif not trusted:
            os.environ[_FORCE_VARIABLE] = before


def load_checkpoint(path: str, *, trusted: bool = False) -> dict:
    """Loads a checkpoint to the CPU.

    Args:
        path: File or URL.
        trusted: Whether objects of any class may be loaded, which can run any code. Default
            False: tensors, plain containers and what mmengine stores beside them.

    Raises:
        UserError: If it does not exist, is no checkpoint, or holds what is not loaded.
    """
    require_checkpoint(path)
    try:
        if '://' in path:
            with weights_only(trusted=trusted):
                checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu',
                                                              logger='silent')
        else:
            with torch.serialization.safe_globals(_allowed_objects()):
                checkpoint = torch.load(path, map_location='cpu', weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if refused := _REFUSED_OBJECT.search(str(error)):
            raise UserError(
                f'checkpoint {path} is refused: it holds {refused[1]}, which is no weight, and '
                'loading it could run any code (for checkpoints of your own runs tools/train.py '
                '--resume takes --trust-checkpoint)') from error
        raise UserError(f'checkpoint {path} cannot be read: {one_line(error)}') from error
    except (OSError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise UserError(f'checkpoint {path} cannot be read: {one_line(error)}') from error
    if not isinstance(checkpoint, dict):
        raise UserError(f'checkpoint {path} holds a {type(checkpoint).__name__}, not a dict of '
                        'weights')
    return checkpoint


def _allowed_objects() -> list:
    """Classes and functions that mmengine's own checkpoints need."""
    # The official mmengine has no such list.
    listed = getattr(mmengine_checkpoint, 'get_torch_safe_globals', None)
    return listed() if listed else [HistoryBuffer]


def is_laplacian_former(model: object) -> bool:
    """Whether settings of a model are those of this project's backbone."""
    kind = model.get('type') if isinstance(model, dict) else None
    return getattr(kind, '__name__', str(kind)).split('.')[-1] == 'LaplacianFormer'


def check_pretrained(model: dict, config_path: str) -> None:
    """Refuses a file of ``init_cfg`` that does not exist or does not fit a LaplacianFormer.

    Args:
        model: Settings of the model.
        config_path: The config file, for messages.

    Raises:
        UserError: With the path.
    """
    for _, node in walk_dicts(model):
        if node.get('type') == 'Pretrained' and node.get('checkpoint'):
            require_checkpoint(node['checkpoint'])
    for _, node in walk_dicts(model):
        if is_laplacian_former(node):
            entries = node.get('init_cfg')
            for entry in entries if isinstance(entries, (list, tuple)) else [entries]:
                if isinstance(entry, dict) and entry.get('type') == 'Pretrained' \
                        and entry.get('checkpoint'):
                    _check_backbone_file(node, entry, config_path)


def _check_backbone_file(backbone: dict, init_cfg: dict, config_path: str) -> None:
    # The config has imported it; a config without it needs none.
    from mmlaplacian.models.pretrained import matching_tensors
    path = init_cfg['checkpoint']
    with config_errors_explained(config_path), torch.device('meta'):
        module = MODELS.build(backbone)
    try:
        matching_tensors(module, load_checkpoint(path), path, init_cfg.get('prefix'))
    except ValueError as error:
        raise UserError(str(error)) from error


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
