"""A launcher that runs every launch as a program of its own under the sanitizers."""

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from emulator import Emulator, Offset, Sparse

from mmlaplacian.ops import cupy_runtime

LARGEST_SHARED_MEMORY = 227 * 1024  # of sm_90 and 100


@dataclass
class Launched:
    """A launch as it reached the runtime."""
    kernel: cupy_runtime.Kernel
    blocks: int
    threads: int
    arguments: list
    shared_bytes: int


@dataclass
class Sanitized:
    """Stands in for the runtime's launch."""
    emulator: Emulator
    seed: int = 0
    grid: int | None = None  # None: as planned
    chosen: dict[str, Iterable[int]] = field(default_factory=dict)  # blocks, by function
    launches: list[Launched] = field(default_factory=list)

    def launch(self, kernel: cupy_runtime.Kernel, blocks: int, threads: int, arguments: tuple,
               device: torch.device, shared_bytes: int = 0) -> None:
        values = [memory(x) if isinstance(x, torch.Tensor)
                  else np.dtype(type(x)).type(x.value) for x in arguments]
        assert all(isinstance(x, torch.Tensor | ctypes._SimpleCData) for x in arguments)
        launched = Launched(kernel, blocks, threads, values, shared_bytes)
        self.launches.append(launched)
        self.run(launched, values, self.grid or blocks,
                 tuple(self.chosen.get(kernel.function, ())))

    def run(self, launched: Launched, values: list, grid: int,
            blocks: tuple[int, ...] = ()) -> None:
        kernel = launched.kernel
        self.emulator.launch([cupy_runtime.source_text(kernel.source)], dict(kernel.macros),
                             kernel.function, grid, launched.threads, values, seed=self.seed,
                             shared_bytes=launched.shared_bytes, blocks=blocks)

    def run_last_of(self, groups: int, launched: Launched,
                    outputs: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Runs a launch of one group again, as the last of so many.

        Args:
            groups: The kernel's first integer is their number.
            launched: All of its tensors are by group.
            outputs: How many of its last pointers it writes.

        Returns:
            Each of these as written now, NaN where it is not, and as it was.
        """
        values, pairs = [], []
        pointers = [x for x in launched.arguments if isinstance(x, Offset)]
        for x in launched.arguments:
            if not isinstance(x, Offset):
                values.append(x)
                continue
            array = x.array.copy()
            if any(x is y for y in pointers[-outputs:]):
                array.fill(math.nan)
                pairs.append((array, x.array))
            nbytes = groups * array.nbytes
            values.append(Sparse(nbytes, {nbytes - array.nbytes: array}))
        at = next(i for i, x in enumerate(values) if isinstance(x, np.int64))
        assert values[at] == 1
        values[at] = np.int64(groups)
        grid = launched.blocks * groups
        self.run(launched, values, grid, tuple(range(grid - launched.blocks, grid)))
        return pairs


def memory(x: torch.Tensor) -> Offset:
    """From the first element to the last, whatever the strides; half types as their bits."""
    elements = 1 + sum((size - 1) * stride
                       for size, stride in zip(x.shape, x.stride(), strict=True))
    flat = x.detach().as_strided((elements, ), (1, ))
    return Offset((flat if x.dtype == torch.float32 else flat.view(torch.int16)).numpy(),
                  x.data_ptr() % 16)
