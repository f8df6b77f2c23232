"""How the solver's kernels are cut into blocks: the rules of cuda/README.md as code."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from ..laplacian_kernel.tiling import ceil_div

LARGEST_IN_A_BLOCK = 128
"""Larger M want more threads than registers suffice for; smaller devices stop earlier, where
shared memory ends."""

_COLUMNS = 4
_ROWS = range(4, 9)
_WARP = 32
_PRODUCT_TILE = 64


@cache
def row_outputs(m: int) -> int:
    """Outputs of a thread along the rows: little padding, many multiply-adds a load."""

    def cost(rows: int) -> tuple[Fraction, int]:
        return Fraction(ceil_div(m, rows) * (rows + _COLUMNS)), -rows

    return min(_ROWS, key=cost)


@dataclass(frozen=True)
class Tiling:
    """Blocks, threads and shared memory for one size.

    Args:
        batch: Matrices.
        m: Their size M, at least 1.
    """

    batch: int
    m: int

    @property
    def _thread_rows(self) -> int:
        return ceil_div(self.m, row_outputs(self.m))

    @property
    def _thread_columns(self) -> int:
        return ceil_div(self.m, _COLUMNS)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of ``newton_schulz_inverse``: three padded matrices."""
        rows = max(self._thread_rows * row_outputs(self.m), self._thread_columns * _COLUMNS)
        return 3 * rows * _COLUMNS * (self._thread_columns | 1) * 4

    def inverse(self) -> tuple[int, int]:
        """Blocks and threads of ``newton_schulz_inverse``."""
        return self.batch, ceil_div(self._thread_rows * self._thread_columns, _WARP) * _WARP

    def start(self) -> tuple[int, int]:
        """Blocks and threads of ``newton_schulz_start``."""
        return self.batch, 256

    def product(self) -> tuple[int, int]:
        """Blocks and threads of ``newton_schulz_product``."""
        return self.batch * ceil_div(self.m, _PRODUCT_TILE)**2, 128
