"""The precision that the ops compute in, whatever their inputs are."""

from collections.abc import Iterator
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
