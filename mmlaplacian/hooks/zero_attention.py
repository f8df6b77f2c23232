"""The control of every trained result: the same run without the attention branch."""

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn

from ..models import LaplacianAttention


def _zero(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return torch.zeros_like(output)


@HOOKS.register_module()
class ZeroAttentionHook(Hook):
    """Sets the attention branch of every :class:`LaplacianAttention` to zero.

    Local context, projection and everything else stay, with the same parameters, schedule
    and seed. It acts in training, validation and test alike:

    ``custom_hooks = [dict(type='ZeroAttentionHook')]``
    """

    def before_run(self, runner: Runner) -> None:
        """Silences the branches.

        Raises:
            ValueError: The model has no :class:`LaplacianAttention`.
        """
        layers = [m for m in runner.model.modules() if isinstance(m, LaplacianAttention)]
        if not layers:
            raise ValueError('ZeroAttentionHook needs a model with LaplacianAttention, got '
                             f'{type(runner.model).__name__} without one')
        self._handles = [layer.branch.register_forward_hook(_zero) for layer in layers]
        runner.logger.info(f'attention branch set to zero in {len(layers)} layers')

    def after_run(self, runner: Runner) -> None:
        """Gives the branches back."""
        for handle in self._handles:
            handle.remove()
