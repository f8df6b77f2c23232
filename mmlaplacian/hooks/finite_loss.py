"""Stops a training before a loss that is not finite reaches the weights."""

from collections.abc import Iterator

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn


def _tensors(losses: dict) -> Iterator[tuple[str, Tensor]]:
    for name, value in losses.items():
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                yield name, tensor.detach()


def _names(data_samples: object, count: int) -> list[str]:
    """File of each image, or its place in the batch."""
    samples = data_samples if isinstance(data_samples, (list, tuple)) else []
    paths = [getattr(sample, 'img_path', None) for sample in samples] + [None] * count
    return [path or f'image {index} of the batch' for index, path in enumerate(paths[:count])]


def _fault(inputs: object, data_samples: object, losses: dict) -> str | None:
    """What is not finite and of which images, or None. One transfer from a GPU if all is well."""
    tensors = list(_tensors(losses))
    if not tensors or torch.stack([x.float().sum() for _, x in tensors]).isfinite().all():
        return None
    wrong = dict.fromkeys(name for name, x in tensors if not x.isfinite().all())
    what = f'{", ".join(wrong)} not finite'
    images = list(inputs) if isinstance(inputs, (Tensor, list, tuple)) else []
    names = _names(data_samples, len(images))
    broken = [name for name, x in zip(names, images, strict=True)
              if isinstance(x, Tensor) and not x.isfinite().all()]
    if broken:
        return f'{what}: the pixels of {", ".join(broken)} are not'
    return (f'{what}, although the pixels are; look at the learning rate, and at the annotations '
            f'of {", ".join(names)}')


@HOOKS.register_module()
class FiniteLossHook(Hook):
    """Ends a training at the first loss that is NaN or infinite, before the optimizer's step.

    The error names the images: those whose pixels are not finite, else all of the batch.

    ``custom_hooks = [dict(type='FiniteLossHook')]``
    """

    def before_train(self, runner: Runner) -> None:
        """Watches the losses of the model."""

        def check(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            if not isinstance(output, dict):
                return
            inputs, samples = (kwargs.get(name) for name in ('inputs', 'data_samples'))
            if fault := _fault(inputs, samples, output):
                raise FloatingPointError(
                    f'training stopped in iteration {runner.iter + 1}, before its step: {fault}')

        self._handle = runner.model.register_forward_hook(check, with_kwargs=True)

    def after_train(self, runner: Runner) -> None:
        """Lets the model go."""
        self._handle.remove()
