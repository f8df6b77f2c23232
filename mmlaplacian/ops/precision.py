"""The precision that the ops compute in, whatever their inputs are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor

from .validation import autocast_enabled


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """Dtype of an op's output: that of the inputs, promoted where autocast let them differ."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is, else float32.

    Distance, exponential, inverse and statistics lose too much in half precision: sums over
    the token axis leave the range of float16 at detection sizes.
    """
    return torch.promote_types(result_dtype(*tensors), torch.float32)


@contextmanager
def autocast_off(tensor: Tensor) -> Iterator[None]:
    """Keeps autocast from lowering the matrix products inside an op again."""
    if autocast_enabled(tensor):
        with torch.autocast(tensor.device.type, enabled=False):
            yield
    else:
        yield


def call_in_compute_dtype(function: Callable[..., Tensor], *tensors: Tensor,
                          **options: object) -> Tensor:
    """Calls an implementation in the compute dtype of its tensors.

    The tensors are cast up and made contiguous, autocast is off inside, and the output is cast
    back to the dtype of the inputs.
    """
    dtype = compute_dtype(*tensors)
    with autocast_off(tensors[0]):
        output = function(*(tensor.to(dtype).contiguous() for tensor in tensors), **options)
    return output.to(result_dtype(*tensors))
