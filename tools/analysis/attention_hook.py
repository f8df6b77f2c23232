"""The attentions of ``softmax_attention.py`` for trainings that a config describes."""

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from softmax_attention import set_attention


@HOOKS.register_module()
class SetAttentionHook(Hook):
    """Changes the attention of a model before it runs.

    Args:
        attention: As in :func:`softmax_attention.set_attention`.
    """

    def __init__(self, attention: str) -> None:
        self.attention = attention

    def before_run(self, runner: Runner) -> None:
        """Changes it.

        Raises:
            ValueError: As in :func:`softmax_attention.set_attention`.
        """
        set_attention(runner.model, self.attention)
        runner.logger.info(f'attention: {self.attention}')
