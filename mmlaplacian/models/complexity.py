"""Multiply-adds and activations of the operators for mmengine's complexity analysis.

``mmengine.analysis`` knows the aten operators; with these handles in its tables
``get_model_complexity_info`` and mmdet's and mmpretrain's FLOP tools count the attention too.
"""

from math import prod

from mmengine.analysis import complexity_analysis
from mmengine.analysis.jit_handles import get_shape
from torch import _C, ops
from torch.utils.flop_counter import flop_registry

_OPERATORS = ('kernel_matrix', 'newton_schulz_inverse', 'newton_schulz_residual',
              'nystrom_attention')


def _argument(value: _C.Value) -> object:
    """The shape of a traced tensor, or the value of a constant."""
    return get_shape(value) if value.isCompleteTensor() else value.toIValue()


def _macs(name: str) -> complexity_analysis.Handle:
    formula = flop_registry[getattr(ops.mmlaplacian, name)]

    def handle(inputs: list[_C.Value], outputs: list[_C.Value]) -> int:
        # torch counts a multiply-add as two operations, mmengine as one.
        return formula(*map(_argument, inputs)) // 2

    return handle


def _activations(inputs: list[_C.Value], outputs: list[_C.Value]) -> int:
    """The attention's output has the shape of v."""
    return prod(get_shape(inputs[2]))


def register_handles() -> None:
    """Adds the operators to the tables that every analysis starts from."""
    complexity_analysis._DEFAULT_SUPPORTED_FLOP_OPS.update(
        {f'mmlaplacian::{name}': _macs(name) for name in _OPERATORS})
    complexity_analysis._DEFAULT_SUPPORTED_ACT_OPS[
        'mmlaplacian::nystrom_attention'] = _activations
