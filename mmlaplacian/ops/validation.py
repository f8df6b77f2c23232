"""Checks of op arguments, shared by the frontends.

Every message is one sentence that holds the offending value and the accepted set.
"""

import math
from numbers import Integral, Real

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# What the ops compute with in float32: reciprocals and products of smaller ones are not finite.
_SMALLEST, _LARGEST = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max


def positive_number(name: str, value: object) -> float:
    """Returns ``value`` as a Python float when it is a positive normal number of float32.

    Args:
        name: Argument name for the message.
        value: A Python or NumPy real number or a tensor of one element. A tensor is read as
            a number, so it gets no gradient.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is not positive and finite, or outside float32's normal numbers.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f'{name} must be a positive number, got a tensor of shape '
                            f'{tuple(value.shape)} and dtype {value.dtype}')
        value = value.item()
    # NumPy's scalars are registered with numbers.Real; bool is a Real too.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f'{name} must be a positive number, got {value!r} of type '
                        f'{type(value).__name__}')
    # An int may be beyond float64.
    number = value if isinstance(value, Integral) else float(value)
    # By comparison: math.isfinite would break the graph of torch.compile, where it is symbolic.
    if not 0 < number < math.inf:
        raise ValueError(f'{name} must be positive and finite, got {value!r}')
    if not _SMALLEST <= number <= _LARGEST:
        raise ValueError(f'{name} must be from {_SMALLEST:.3g} to {_LARGEST:.3g}, the normal '
                         f'numbers of float32, got {value!r}')
    return float(number)


def check_floating(name: str, value: object) -> None:
    """Accepts a tensor of floating-point numbers.

    Raises:
        TypeError: ``value`` is not one.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f'{name} must be a tensor, got {type(value).__name__}')
    if not value.is_floating_point():
        raise TypeError(f'{name} must have a floating-point dtype, got {value.dtype}')


def integer_at_least(name: str, value: object, minimum: int) -> int:
    """Returns ``value`` as an int when it is a whole number >= ``minimum`` that 64 bits hold.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is below ``minimum`` or above 2^63 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f'{name} must be an integer >= {minimum}, got {value!r} of type '
                        f'{type(value).__name__}')
    if value < minimum:
        raise ValueError(f'{name} must be an integer >= {minimum}, got {value}')
    if value >= 2**63:
        raise ValueError(f'{name} must be an integer below 2^63, got {value}')
    return int(value)


def check_rate(name: str, rate: object) -> None:
    """Checks that a dropout or drop-path rate is a number in [0, 1).

    Raises:
        TypeError: Not a number.
        ValueError: Outside [0, 1).
    """
    if isinstance(rate, bool) or not isinstance(rate, Real):
        raise TypeError(f'{name} must be a number in [0, 1), got {rate!r} of type '
                        f'{type(rate).__name__}')
    if not 0 <= rate < 1:
        raise ValueError(f'{name} must be in [0, 1), got {rate!r}')


def one_of(name: str, value: object, accepted: tuple[str, ...]) -> str:
    """Returns ``value`` when it is one of ``accepted``.

    Raises:
        ValueError: It is not.
    """
    if value not in accepted:
        raise ValueError(f'{name} must be one of {accepted}, got {value!r}')
    return value


def check_tensors(layout: str, **tensors: Tensor) -> None:
    """Checks that tensors have the rank of ``layout`` and agree in dtype and device.

    Args:
        layout: Dimension names for the message, for example ``'(B, h, N, d)'``.
        **tensors: The tensors by argument name.

    Raises:
        TypeError: Not a tensor, not floating point, or mixed dtypes outside autocast.
        ValueError: Wrong rank or mixed devices.
    """
    rank = layout.count(',') + 1
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f'{name} must be a tensor {layout}, got {type(tensor).__name__}')
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f'{name} must have one of the dtypes '
                            f'{[str(dtype) for dtype in FLOAT_DTYPES]}, got {tensor.dtype}')
        if tensor.dim() != rank:
            raise ValueError(f'{name} must have shape {layout}, got {tuple(tensor.shape)}')
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f'all tensors must be on one device, got {devices}')
    dtypes = {name: str(tensor.dtype) for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1 and not autocast_enabled(next(iter(tensors.values()))):
        raise TypeError(f'all tensors must have one dtype outside autocast, got {dtypes}')


def check_same(dims: str, **shapes: tuple[int, ...]) -> None:
    """Checks that the given parts of shapes agree.

    Args:
        dims: Names of the dimensions for the message, for example ``'B, h'``.
        **shapes: That part of each tensor's shape, by argument name.

    Raises:
        ValueError: They differ.
    """
    first, *others = shapes.values()
    # Not by a set: sizes are tensors under torch.jit.trace and symbols under torch.export.
    if any(tuple(other) != tuple(first) for other in others):
        found = {name: tuple(shape) for name, shape in shapes.items()}
        raise ValueError(f'{" and ".join(shapes)} must agree in {dims}, got {found}')


def autocast_enabled(tensor: Tensor) -> bool:
    """Whether autocast is on for the device of ``tensor``."""
    device_type = tensor.device.type
    return device_type != 'meta' and torch.is_autocast_enabled(device_type)
