"""Loading of pretrained backbone weights that never passes over a file in silence."""

import logging
from collections.abc import Mapping

from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor, nn

CONTAINERS = ('state_dict', 'model')
PREFIXES = ('module.', 'backbone.')


def _shorten(names: list[str], limit: int = 5) -> str:
    more = f' and {len(names) - limit} more' if len(names) > limit else ''
    return ', '.join(names[:limit]) + more


def named_tensors(content: Mapping) -> dict[str, Tensor]:
    """The tensors of a file's state dict, whatever container holds it.

    Args:
        content: What the file holds: a state dict, or a dict with one under ``state_dict`` or
            ``model``.
    """
    for container in CONTAINERS:
        if isinstance(content.get(container), Mapping):
            content = content[container]
            break
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def is_averaged(content: Mapping) -> bool:
    """Whether ``state_dict`` of a file holds averaged weights.

    MMEngine's ``EMAHook`` exchanges the two sets when it saves: the average lies in
    ``state_dict``, what was trained in ``ema_state_dict``.

    Args:
        content: What the file holds.
    """
    return isinstance(content.get('state_dict'), Mapping) and 'ema_state_dict' in content


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items()
            if name.startswith(prefix)}


def _backbone_tensors(tensors: dict[str, Tensor], prefix: str | None) -> dict[str, Tensor]:
    """The tensors under the backbone's own names."""
    if not prefix:
        for known in PREFIXES:
            tensors = under(known, tensors) or tensors
        return tensors
    # A prefix that the caller names is the only one taken off, with or without a wrapper's.
    prefix = prefix.rstrip('.') + '.'
    return under(prefix, tensors) or under('module.' + prefix, tensors)


def matching_tensors(module: nn.Module, content: Mapping, checkpoint: str,
                     prefix: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file that belong to ``module``, by the names in ``module``.

    Args:
        module: The backbone; one on the meta device will do.
        content: What the file holds.
        checkpoint: Its address, for messages.
        prefix: Prefix of the backbone in the file. Default None: found out.

    Raises:
        ValueError: No state dict, no tensor matches, or a matching name has another shape.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f'{checkpoint!r} must hold a state dict, got {type(content).__name__}')
    tensors = named_tensors(content)
    own = module.state_dict()
    matched = {name: value for name, value in _backbone_tensors(tensors, prefix).items()
               if name in own}
    if not matched:
        raise ValueError(
            f'no tensor of {checkpoint!r} matches {type(module).__name__} '
            + (f'under the prefix {prefix!r}' if prefix else 'with or without the prefixes '
               + ' and '.join(map(repr, PREFIXES)))
            + f': it has {_shorten(list(tensors)) or "none"}, the model has '
            + _shorten(list(own)))
    mismatched = [f'{name} {tuple(value.shape)} in the file, {tuple(own[name].shape)} here'
                  for name, value in matched.items() if value.shape != own[name].shape]
    if mismatched:
        raise ValueError(f'{checkpoint!r} was made for another {type(module).__name__}: '
                         + _shorten(mismatched))
    return matched


def load_pretrained(module: nn.Module, checkpoint: str, prefix: str | None = None) -> None:
    """Loads the tensors of ``checkpoint`` that belong to ``module`` and logs how many matched.

    The file may be a bare state dict or hold one under ``state_dict`` or ``model``, with the
    prefixes ``module.`` and ``backbone.``. Tensors of other parts, such as a classifier's head,
    are left alone. Of a training with ``EMAHook`` the averaged weights are loaded.

    Args:
        module: The backbone.
        checkpoint: A path or any address that MMEngine loads.
        prefix: Prefix of the backbone in the file. Default None: found out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: No state dict, no tensor matches, or a matching name has another shape.
    """
    content = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')
    matched = matching_tensors(module, content, checkpoint, prefix)
    module.load_state_dict(matched, strict=False)
    own = module.state_dict()
    left = [name for name in own if name not in matched]
    print_log(
        f'loaded {len(matched)} of {len(own)} tensors of {type(module).__name__} from '
        f'{checkpoint}' + (', averaged weights (EMA)' if is_averaged(content) else '')
        + (f'; not in the file: {_shorten(left)}' if left else ''),
        logger='current', level=logging.WARNING if left else logging.INFO)
