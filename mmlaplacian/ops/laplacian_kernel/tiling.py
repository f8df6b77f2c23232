"""How the CUDA kernels are cut into blocks: the rules of cuda/README.md as code."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

MAX_HEAD_DIM = 256
N_TILE = 128
CHUNK_ROWS = 64
"""Queries of a chunk of the key gradient come in multiples of this."""

_LANDMARK_TILES = ((7, 7), *((8, outputs) for outputs in range(1, 9)))
_BLOCKS_FOR_A_GPU = 1024
_LEAST_CHUNK = 512
_REDUCE_TILE = 32


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@cache
def landmark_tile(m: int) -> tuple[int, int]:
    """Threads and outputs a thread along the landmarks: little padding, many outputs a load."""

    def cost(tile: tuple[int, int]) -> tuple[Fraction, int]:
        threads, outputs = tile
        covered = ceil_div(m, threads * outputs) * threads * outputs
        return Fraction(covered * (outputs + 1), outputs), -threads * outputs

    return min(_LANDMARK_TILES, key=cost)


@dataclass(frozen=True)
class Tiling:
    """Blocks and threads of the four kernels for one size.

    Args:
        groups: B * h.
        n: Queries.
        m: Landmarks, at least 1.
        d: Head dim, 1 to ``MAX_HEAD_DIM``.
    """

    groups: int
    n: int
    m: int
    d: int

    @property
    def _landmarks(self) -> int:
        threads, outputs = landmark_tile(self.m)
        return threads * outputs

    @property
    def _m_tiles(self) -> int:
        return ceil_div(self.m, self._landmarks)

    @property
    def _channel_chunks(self) -> int:
        return ceil_div(self.d, 32)

    @property
    def _quads(self) -> int:
        return ceil_div(ceil_div(self.d, self._channel_chunks), 4)

    @property
    def rows_per_chunk(self) -> int:
        """Queries that one block of the key gradient sums: depends on no device."""
        blocks_a_chunk = max(1, self.groups * self._m_tiles * self._channel_chunks)
        chunks = min(max(1, _BLOCKS_FOR_A_GPU // blocks_a_chunk),
                     max(1, ceil_div(self.n, _LEAST_CHUNK)))
        return CHUNK_ROWS * max(1, ceil_div(ceil_div(self.n, chunks), CHUNK_ROWS))

    @property
    def n_chunks(self) -> int:
        """Partial sums of the key gradient."""
        return ceil_div(self.n, self.rows_per_chunk)

    def forward(self) -> tuple[int, int]:
        """Blocks and threads of ``laplacian_kernel_forward``."""
        threads, _ = landmark_tile(self.m)
        return self.groups * ceil_div(self.n, N_TILE) * self._m_tiles, 32 * threads

    def backward_q(self) -> tuple[int, int]:
        """Blocks and threads of ``laplacian_kernel_backward_q``."""
        return (self.groups * ceil_div(self.n, N_TILE) * self._channel_chunks, 32 * self._quads)

    def backward_k(self) -> tuple[int, int]:
        """Blocks and threads of ``laplacian_kernel_backward_k``."""
        slice_threads = ceil_div(self._landmarks, 4) * self._quads
        return (self.groups * self.n_chunks * self._m_tiles * self._channel_chunks,
                256 // slice_threads * slice_threads)

    def reduce_k(self) -> tuple[int, int]:
        """Blocks and threads of ``laplacian_kernel_reduce_k``."""
        return self.groups * ceil_div(self.m * self.d, _REDUCE_TILE), 256
