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


def _named_tensors(content: Mapping) -> dict[str, Tensor]:
    """The tensors of a file's state dict, whatever container holds it."""
    for container in CONTAINERS:
        if isinstance(content.get(container), Mapping):
            content = content[container]
            break
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items()
            if name.startswith(prefix)}


def _backbone_tensors(tensors: dict[str, Tensor], prefix: str | None) -> dict[str, Tensor]:
    """The tensors under the backbone's own names."""
    if not prefix:
        for known in PREFIXES:
            tensors = _under(known, tensors) or tensors
        return tensors
    # A prefix that the caller names is the only one taken off, with or without a wrapper's.
    prefix = prefix.rstrip('.') + '.'
    return _under(prefix, tensors) or _under('module.' + prefix, tensors)


def load_pretrained(module: nn.Module, checkpoint: str, prefix: str | None = None) -> None:
    """Loads the tensors of ``checkpoint`` that belong to ``module`` and logs how many matched.

    The file may be a bare state dict or hold one under ``state_dict`` or ``model``, with the
    prefixes ``module.`` and ``backbone.``. Tensors of other parts, such as a classifier's head,
    are left alone.

    Args:
        module: The backbone.
        checkpoint: A path or any address that MMEngine loads.
        prefix: Prefix of the backbone in the file. Default None: found out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: No state dict, no tensor matches, or a matching name has another shape.
    """
    content = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')
    if not isinstance(content, Mapping):
        raise ValueError(f'{checkpoint!r} must hold a state dict, got {type(content).__name__}')
    tensors = _named_tensors(content)
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
    module.load_state_dict(matched, strict=False)
    left = [name for name in own if name not in matched]
    print_log(
        f'loaded {len(matched)} of {len(own)} tensors of {type(module).__name__} from '
        f'{checkpoint}' + (f'; not in the file: {_shorten(left)}' if left else ''),
        logger='current', level=logging.WARNING if left else logging.INFO)
