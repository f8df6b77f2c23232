"""Layer-wise decay of the learning rate, for detectors, classifiers and segmentors alike."""

from numbers import Real

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

KEY = 'layer_decay_rate'
BACKBONE = 'backbone'


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """MMEngine's default constructor with learning rates that shrink towards the input.

    The learning rate of a parameter is multiplied by ``layer_decay_rate ** n``, n being the
    layers between it and the heads: 0 for output norms, neck and heads, the number of blocks
    plus 1 for the first patch embedding. The layers are those of the backbone's
    ``get_layer_depth``. Every other key of ``paramwise_cfg`` (``norm_decay_mult``,
    ``custom_keys``, ...) acts as in the default constructor; an ``lr_mult`` multiplies.

    Args:
        optim_wrapper_cfg: Config of the optimizer wrapper; its optimizer must name ``lr``.
        paramwise_cfg: Parameter-wise options, ``layer_decay_rate`` in (0, 1] among them.

    Raises:
        TypeError: ``layer_decay_rate`` is not a number; at the call: the model's backbone has
            no ``get_layer_depth``.
        ValueError: ``layer_decay_rate`` is outside (0, 1], or the optimizer names no ``lr``.

    Example:
        >>> optim_wrapper = dict(
        ...     type='OptimWrapper',
        ...     optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
        ...     constructor='LayerDecayOptimWrapperConstructor',
        ...     paramwise_cfg=dict(layer_decay_rate=0.9, norm_decay_mult=0.))
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        rate = self.paramwise_cfg.get(KEY)
        accepted = f'paramwise_cfg must have {KEY}, a number in (0, 1], got {rate!r}'
        if not isinstance(rate, Real) or isinstance(rate, bool):
            raise TypeError(accepted)
        if not 0 < rate <= 1:
            raise ValueError(accepted)
        if self.base_lr is None:
            raise ValueError('layer-wise decay needs the lr of the optimizer, got '
                             f'{dict(self.optimizer_cfg)}')

    def add_params(self,
                   params: list[dict],
                   module: nn.Module,
                   prefix: str = '',
                   is_dcn_module: int | float | None = None) -> None:
        """Adds the parameter groups of ``module``, and scales them all at the root.

        Args:
            params: Parameter groups, extended in place.
            module: The model or a part of it.
            prefix: Name of that part. Default ``''``: the whole model.
            is_dcn_module: Handed on by the default constructor.
        """
        super().add_params(params, module, prefix, is_dcn_module)
        if not prefix:
            self._scale(params, module)

    def _scale(self, params: list[dict], model: nn.Module) -> None:
        backbone = getattr(model, BACKBONE, None)
        if not hasattr(backbone, 'get_layer_depth'):
            raise TypeError(
                'layer-wise decay needs a model whose backbone has get_layer_depth, as '
                f'LaplacianFormer has, got {type(model).__name__} with the backbone '
                f'{type(backbone).__name__}')
        names = {parameter: name for name, parameter in model.named_parameters()}
        for group in params:
            depth, num_layers = backbone.get_layer_depth(
                names[group['params'][0]], f'{BACKBONE}.')
            scale = self.paramwise_cfg[KEY] ** (num_layers - 1 - depth)
            group['lr'] = group.get('lr', self.base_lr) * scale
        rates = [group['lr'] for group in params]
        print_log(f'layer-wise decay: learning rates from {min(rates):.3g} to {max(rates):.3g}',
                  logger='current')
