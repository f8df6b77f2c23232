"""How the attention's kernels are cut into blocks: the rules of cuda/README.md as code."""

from dataclasses import dataclass

from ..laplacian_kernel.tiling import MAX_HEAD_DIM, ceil_div, landmark_tile
from ..newton_schulz.tiling import LARGEST_IN_A_BLOCK
from ..newton_schulz.tiling import Tiling as SolverTiling

TILE = 64
"""Tokens whose kernel values a block holds at once."""

MAX_VALUE_DIM = 256

_TILE_ROWS = 32
_BLOCKS_FOR_AN_IMAGE = 256
_LEAST_CHUNK = 2 * TILE
_MERGE_COLUMNS, _MERGE_THREADS = 32, 256
_MOST_SLICES = 16
_MOST_PIECES = 2
_FLOAT = 4


def _odd_quads(quads: int) -> int:
    return 4 * (quads | 1)


@dataclass(frozen=True)
class Tiling:
    """Blocks, threads and shared memory of the kernels for one size.

    Args:
        batch: Images.
        heads: Heads of each.
        n: Tokens, at least 1.
        m: Landmarks, at least 1.
        d: Head dim of queries and keys, at least 1.
        d_v: That of the values, at least 1.
    """

    batch: int
    heads: int
    n: int
    m: int
    d: int
    d_v: int

    @property
    def groups(self) -> int:
        """B * h."""
        return self.batch * self.heads

    @property
    def threads(self) -> int:
        """Threads of a block that computes distances."""
        return _TILE_ROWS * landmark_tile(self.m)[0]

    @property
    def rows_per_chunk(self) -> int:
        """Tokens that one block sums. Depends on no device and no batch mates: an image rounds the
        same way everywhere."""
        chunks = max(1, _BLOCKS_FOR_AN_IMAGE // self.heads)
        return TILE * ceil_div(max(_LEAST_CHUNK, ceil_div(self.n, chunks)), TILE)

    @property
    def n_chunks(self) -> int:
        """Partial sums of a group."""
        return ceil_div(self.n, self.rows_per_chunk)

    @property
    def scatter_entries(self) -> int:
        """Floats of a chunk's scatter: the lower triangle in squares of 8 x 8."""
        return 64 * self._pairs

    @property
    def _octets(self) -> int:
        return ceil_div(self.m, 8)

    @property
    def _pairs(self) -> int:
        return self._octets * (self._octets + 1) // 2

    @property
    def _value_quads(self) -> int:
        return ceil_div(self.d_v, 4)

    @property
    def _pieces(self) -> int:
        return self._octets * self._value_quads

    def _slices(self, width: int) -> int:
        return max(1, min(_MOST_SLICES, self.threads // width))

    @property
    def _channel_stride(self) -> int:
        return _odd_quads(ceil_div(ceil_div(self.d, ceil_div(self.d, 32)), 4))

    @property
    def _landmark_floats(self) -> int:
        threads, outputs = landmark_tile(self.m)
        return threads * outputs * self._channel_stride

    @property
    def _token_floats(self) -> int:
        return TILE * self._channel_stride

    @property
    def _kernel_floats(self) -> int:
        return TILE * _odd_quads(2 * self._octets)

    @property
    def landmark_partials(self) -> int:
        """Partial sums of a group's landmark gradient: of keys, queries and both sides of w."""
        return 2 * self.n_chunks + 2

    @property
    def _square_floats(self) -> int:
        quads = ceil_div(self.m, 4)
        return 4 * quads * _odd_quads(quads)

    @property
    def _value_floats(self) -> int:
        return TILE * _odd_quads(self._value_quads)

    @property
    def _context_floats(self) -> int:
        return 4 * ceil_div(self.m, 4) * _odd_quads(self._value_quads)

    def landmarks(self) -> tuple[int, int, int]:
        """Blocks, threads and dynamic shared memory of ``nystrom_attention_landmarks``."""
        return self.groups * ceil_div(self.m, TILE), self.threads, 0

    def statistics(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_statistics``."""
        tiles = self._landmark_floats + self._token_floats + self._kernel_floats
        slices = 64 * self._pairs * (self._slices(self._pairs) // 2)
        floats = 2 * 8 * self._octets + max(tiles, slices)
        return self.groups * self.n_chunks, self.threads, _FLOAT * floats

    def merge_statistics(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_merge_statistics``."""
        return self.groups * (self.scatter_entries // _MERGE_COLUMNS), _MERGE_THREADS, 0

    def keys(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_keys``."""
        value_rows = min(TILE, self.threads // self._value_quads)
        x = max(self._token_floats, self._kernel_floats)
        c = max(self._kernel_floats, self._value_floats, 4 * value_rows * self._value_quads)
        width = min(self._pieces, self.threads)
        slices = 32 * width * (self._slices(width) // 2)
        floats = TILE + 2 * self._square_floats + self._landmark_floats + max(x + c, slices)
        return self.groups * self.n_chunks, self.threads, _FLOAT * floats

    def merge_keys(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_merge_keys``."""
        entries = (self.m + 1) * self.d_v
        return self.groups * ceil_div(entries, _MERGE_COLUMNS), _MERGE_THREADS, 0

    def output(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_output``."""
        floats = (8 * self._octets + 4 * self._value_quads + self._landmark_floats
                  + self._token_floats + self._kernel_floats + self._context_floats)
        return self.groups * self.n_chunks, self.threads, _FLOAT * floats

    @property
    def _gradient_floats(self) -> int:
        quads = ceil_div(self.m, 4)
        threads, outputs = landmark_tile(self.m)
        thin = 4 * self._value_quads * _odd_quads(quads)
        marks = max(threads * outputs, 4 * quads) * self._channel_stride
        return (self._square_floats + thin + marks + self._kernel_floats + self._value_floats
                + max(self._token_floats, self._kernel_floats))

    def grad_context(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_grad_context``."""
        width = min(self._pieces, self.threads)
        value_rows = min(TILE, self.threads // self._value_quads)
        scratch = max(32 * width * (self._slices(width) // 2), 4 * value_rows * self._value_quads)
        tiles = self._kernel_floats + self._value_floats + self._token_floats
        floats = 8 * self._octets + self._landmark_floats + max(tiles, scratch)
        return self.groups * self.n_chunks, self.threads, _FLOAT * floats

    def grad_factors(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_grad_factors``."""
        floats = 2 * self._kernel_floats + max(self._square_floats, self._context_floats)
        return self.groups * ceil_div(self.m, TILE), self.threads, _FLOAT * floats

    def grad_values(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_grad_values``."""
        parts = TILE * max(ceil_div(self.m, 4) | 1, self._value_quads | 1)
        tiles = (max(self._token_floats, self._kernel_floats)
                 + max(self._kernel_floats, self._context_floats + parts))
        slices = 64 * self._pairs * (self._slices(self._pairs) // 2)
        floats = (2 * TILE + 4 * self._value_quads + 2 * self._square_floats
                  + self._landmark_floats + max(tiles, slices))
        return self.groups * self.n_chunks, self.threads, _FLOAT * floats

    def merge_grad_covariance(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_merge_grad_covariance``."""
        return self.merge_statistics()

    def grad_keys(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_grad_keys``."""
        return self.groups * self.n_chunks, self.threads, _FLOAT * self._gradient_floats

    def grad_queries(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_grad_queries``."""
        floats = self._gradient_floats + 4 * ceil_div(self.m, 4) + 4 * self._value_quads
        return self.groups * self.n_chunks, self.threads, _FLOAT * floats

    def grad_landmarks(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_grad_landmarks``."""
        return self.groups, self.threads, _FLOAT * self._gradient_floats

    def merge_landmarks(self) -> tuple[int, int, int]:
        """The same of ``nystrom_attention_merge_landmarks``."""
        return self.groups * ceil_div(self.m * self.d, _MERGE_COLUMNS), _MERGE_THREADS, 0

    def unsupported_reason(self, shared_memory: int) -> str | None:
        """Why the fused forward cannot serve this size, or None.

        Args:
            shared_memory: Bytes of shared memory that a block can have.
        """
        for name, size, largest in (('landmarks', self.m, LARGEST_IN_A_BLOCK),
                                    ('head dims', self.d, MAX_HEAD_DIM),
                                    ('value dims', self.d_v, MAX_VALUE_DIM)):
            if not 1 <= size <= largest:
                return f'the fused kernels take {name} from 1 to {largest}, got {size}'
        if self._pieces > _MOST_PIECES * self.threads:
            return (f'the fused kernels keep at most {_MOST_PIECES * self.threads} pieces of '
                    f'8 landmarks x 4 value channels, got {self._pieces} for {self.m} landmarks '
                    f'and {self.d_v} value channels')
        return self._missing_memory(shared_memory, (
            self.statistics()[2], self.keys()[2], self.output()[2],
            SolverTiling(self.groups, self.m).shared_bytes))

    def backward_unsupported_reason(self, shared_memory: int) -> str | None:
        """Why the fused backward cannot serve a size that the forward does, or None."""
        return self._missing_memory(shared_memory, (
            self.grad_context()[2], self.grad_factors()[2], self.grad_values()[2],
            self.grad_queries()[2]))

    def _missing_memory(self, shared_memory: int, bytes_a_block: tuple[int, ...]) -> str | None:
        needed = max(bytes_a_block)
        if needed > shared_memory:
            return (f'{self.m} landmarks, head dim {self.d} and value dim {self.d_v} need '
                    f'{needed} bytes of shared memory a block, and this device has '
                    f'{shared_memory}')
        return None
