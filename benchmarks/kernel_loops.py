"""How often a warp passes through each loop of the kernels' machine code.

A row for every loop, in the order in which the compiler lays them out: passes for each pass of
the loop around it, and how many instructions with a name the loop holds itself, which tells that
it is the loop meant. Passes are means over the warps of a block, by the rules of cuda/README.md.
Rows of tensors are aligned to four elements, so the loops for others have 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from launches import KernelLaunch

from mmlaplacian.ops.laplacian_kernel.tiling import ceil_div
from mmlaplacian.ops.newton_schulz.tiling import Tiling as SolverTiling
from mmlaplacian.ops.nystrom_attention.tiling import TILE

_WARP = 32
_MERGE_ROWS = 8


def warp_passes(items: int, threads: int, unroll: int = 1) -> float:
    """Mean passes of a block's warps over ``for (i = threadIdx.x; i < items; i += threads)``.

    What is left over by an unrolled loop lies behind it and is counted there.
    """
    warps = ceil_div(threads, _WARP)
    return sum(max(0, ceil_div(items - _WARP * warp, threads)) // unroll
               for warp in range(warps)) / warps


@dataclass(frozen=True)
class Loop:
    """A row of the table.

    Args:
        passes: Mean over the warps, for each pass of the loop around it.
        opcode: Start of an instruction's name; empty where nothing tells.
        count: Instructions with such a name in a pass.
        strided: Items and threads of a loop over items. Then the compiler chooses how many
            times it is unrolled: ``count`` is for one item, and ``passes`` a factor.
    """

    passes: float
    opcode: str = ''
    count: int = 0
    strided: tuple[int, int] | None = None

    def passes_of(self, found: int) -> float | None:
        """Passes of a loop with so many instructions of the name; None if it is another one."""
        if not self.opcode or self.strided is None:
            return self.passes if not self.opcode or found == self.count else None
        if not found or found % self.count:
            return None
        return self.passes * warp_passes(*self.strided, found // self.count)


def _strided(items: int, threads: int, opcode: str = 'LDG', count: int = 1,
             share: float = 1.0) -> Loop:
    return Loop(share, opcode, count, (items, threads))


def _load(items: int, threads: int, share: float = 1.0) -> list[Loop]:
    """The two forms of a load of quads; a ``share`` of the passes around loads them."""
    return [_strided(items, threads, 'LDG', 4, 0),
            _strided(items, threads, 'LDG.E.128', share=share)]


class _Attention:
    """Sizes of a kernel of the attention over chunks of tokens."""

    def __init__(self, launch: KernelLaunch) -> None:
        macros = dict(launch.macros)
        self.threads = launch.threads
        self.m, self.d, self.d_v = (macros[name] for name in (
            'LANDMARKS', 'HEAD_DIM', 'VALUE_DIM'))
        self.octets, self.quads, self.value_quads = (ceil_div(self.m, 8), ceil_div(self.m, 4),
                                                     ceil_div(self.d_v, 4))
        self.pairs = self.octets * (self.octets + 1) // 2
        # Walks over the rows of a triangle to that of a pair.
        self.octet_steps = sum(a * (a + 1) for a in range(self.octets)) / self.pairs

    def slices(self, width: int) -> int:
        """Slices of a block's threads that sum over different tokens."""
        return max(1, min(16, self.threads // width))

    def tiles(self, launch: KernelLaunch) -> float:
        """Tiles of a chunk, on average."""
        _, _, n, rows = launch.integers[:4]
        return ceil_div(n, TILE) / ceil_div(n, rows)

    def distances(self, tiles: float) -> list[Loop]:
        """Loads of tokens and, for a chunk's first tile, of landmarks; the distances; zeros."""
        quads = ceil_div(self.d, 4)
        missing = 8 * self.octets - self.m
        return [*_load(TILE * quads, self.threads),
                *_load(self.m * quads, self.threads, 1 / tiles),
                Loop(self.d / 8, 'FADD', 224), _strided(TILE * missing, self.threads, 'STS')]


def _landmarks(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    return [Loop(1), *sizes.distances(1)[:-1]]


def _statistics(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    tiles, threads, slices = sizes.tiles(launch), sizes.threads, sizes.slices(sizes.pairs)
    *distances, zeros = sizes.distances(tiles)
    first = Loop(warp_passes(sizes.m, threads) * TILE / 8 / tiles, 'LDS', 8)
    return [Loop(sizes.octet_steps), Loop(1, 'STG', 64), Loop(tiles), *distances,
            replace(zeros, passes=1 / tiles), first, zeros,
            Loop(TILE / slices / 2, 'FFMA', 128), Loop((slices - 1) / slices, 'LDS', 64),
            Loop(warp_passes(8 * sizes.octets, threads), 'MUFU', 2), Loop(32 / 8, 'LDS', 8)]


def _merge_statistics(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    _, n, rows = launch.integers
    chunks = ceil_div(n, rows) / _MERGE_ROWS // 2
    return [Loop(1), Loop(sizes.octet_steps), Loop(chunks, 'LDG', 4), Loop(chunks, 'LDG', 6)]


def _keys(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    tiles, threads, quads = sizes.tiles(launch), sizes.threads, sizes.quads
    slices = sizes.slices(sizes.octets * sizes.value_quads)
    square = _strided(16 * quads * quads, threads)
    products = warp_passes(TILE // 4 * quads, threads)
    return [Loop(1, 'STG', 32), square, square, Loop(tiles),
            *sizes.distances(tiles), Loop(products), Loop(quads, 'FFMA', 64),
            _strided(TILE, threads, 'STS'), Loop(products), Loop((quads + 1) / 2, 'FFMA', 64),
            _strided(TILE, threads, 'MUFU'), Loop(quads // 4, 'LDS', 4),
            *_load(TILE * sizes.value_quads, threads),
            Loop(TILE / slices / 2, 'FFMA', 64), Loop((slices - 1) / slices, 'LDS', 32),
            Loop(warp_passes(sizes.d_v, threads), 'LDS', 28)]


def _merge_keys(launch: KernelLaunch) -> list[Loop]:
    _, n, rows = launch.integers
    return [Loop(1), Loop(ceil_div(n, rows) / _MERGE_ROWS // 2, 'LDG', 2)]


def _output(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    tiles, threads, quads = sizes.tiles(launch), sizes.threads, sizes.quads
    return [Loop(1), _strided(16 * quads * sizes.value_quads, threads),
            _strided(sizes.m, threads), _strided(4 * sizes.value_quads, threads), Loop(tiles),
            *sizes.distances(tiles), Loop(warp_passes(TILE // 4 * sizes.value_quads, threads)),
            Loop(quads, 'FFMA', 64)]


def _grad_context(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    tiles, threads = sizes.tiles(launch), sizes.threads
    slices = sizes.slices(sizes.octets * sizes.value_quads)
    return [Loop(1, 'STG', 32), _strided(sizes.m, threads), Loop(tiles),
            *sizes.distances(tiles), *_load(TILE * sizes.value_quads, threads),
            Loop(TILE / slices / 2, 'FFMA', 64), Loop((slices - 1) / slices, 'LDS', 32),
            Loop(warp_passes(sizes.d_v, threads), 'LDS', 28)]


def _grad_factors(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    threads, quads, value_quads = sizes.threads, sizes.quads, sizes.value_quads
    square = _strided(16 * quads * quads, threads)
    product = [Loop(warp_passes(TILE // 4 * quads, threads), 'STG', 16), Loop(quads, 'FFMA', 64)]
    return [Loop(1), _strided(TILE * 4 * quads, threads), square, *product, square, *product,
            _strided(16 * quads * value_quads, threads),
            Loop(warp_passes(TILE // 4 * value_quads, threads), 'STG', 16),
            Loop(quads, 'FFMA', 64)]


def _grad_values(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    tiles, threads, quads = sizes.tiles(launch), sizes.threads, sizes.quads
    slices, value_quads = sizes.slices(sizes.pairs), sizes.value_quads
    square = _strided(16 * quads * quads, threads)
    products = warp_passes(TILE // 4 * quads, threads)
    return [Loop(sizes.octet_steps), Loop(1, 'STG', 64), square, square,
            _strided(4 * value_quads, threads), Loop(tiles), *sizes.distances(tiles),
            Loop(products), Loop(quads, 'FFMA', 64), _strided(TILE, threads, 'STS'),
            _strided(4 * quads * value_quads, threads, 'LDG.E.128'),
            Loop(products), Loop((quads + 1) / 2, 'FFMA', 64), _strided(TILE, threads, 'MUFU'),
            Loop(quads // 4, 'LDS', 4), Loop(warp_passes(TILE // 4 * value_quads, threads)),
            Loop(quads, 'FFMA', 64), _strided(TILE, threads, 'STG'),
            Loop(value_quads // 4, 'LDS', 4),
            Loop(TILE / slices / 2, 'FFMA', 128), Loop((slices - 1) / slices, 'LDS', 64)]


def _merge_grad_covariance(launch: KernelLaunch) -> list[Loop]:
    return [Loop(1), Loop(_Attention(launch).octet_steps), _merge_keys(launch)[1]]


def _gradients(sizes: _Attention, tokens: int, tiles: float, left: Loop,
               values: list[Loop]) -> list[Loop]:
    """A pass over a tile, with the pass's own factors, to the tokens and the landmarks."""
    threads, quads = sizes.threads, sizes.quads
    channels = ceil_div(sizes.d, 4)
    slices = sizes.slices(quads * channels)
    return [*sizes.distances(tiles), left, *values,
            Loop(warp_passes(TILE // 4 * quads, threads), 'FMUL', 32), Loop(quads, 'FFMA', 64),
            Loop(sizes.value_quads, 'FFMA', 64), *_load(TILE * channels, threads),
            *_load(4 * quads * channels, threads, 1 / tiles),
            Loop(quads * warp_passes(TILE // 4 * channels, threads), 'FFMA', 144),
            Loop(tokens / slices / 2, 'FFMA', 72)]


def _factors(sizes: _Attention) -> list[Loop]:
    """Loads of a square and a thin matrix."""
    return [_strided(16 * sizes.quads * quads, sizes.threads)
            for quads in (sizes.quads, sizes.value_quads)]


def _grad_keys(launch: KernelLaunch, means: bool = False) -> list[Loop]:
    """Of the keys, or of the queries, which also load two means."""
    sizes = _Attention(launch)
    tiles, threads = sizes.tiles(launch), sizes.threads
    loads = [_strided(4 * quads, threads)
             for quads in (sizes.quads, sizes.value_quads)] if means else []
    left = _strided(TILE * sizes.quads, threads, 'FADD' if means else 'FMUL', 4)
    values = [Loop(0), _strided(TILE * sizes.value_quads, threads, 'LDG.E.128')]
    return [Loop(1), *_factors(sizes), *loads, Loop(tiles),
            *_gradients(sizes, TILE, tiles, left, values)]


def _grad_landmarks(launch: KernelLaunch) -> list[Loop]:
    sizes = _Attention(launch)
    left = _strided(TILE * sizes.quads, sizes.threads, 'FMUL', 4)
    values = [_strided(TILE * sizes.value_quads, sizes.threads, 'FADD', 4)]
    return [Loop(1), *_factors(sizes), *_gradients(sizes, sizes.m, 1, left, values)]


def _merge_landmarks(launch: KernelLaunch) -> list[Loop]:
    _, n, rows = launch.integers
    return [Loop(1), Loop((2 * ceil_div(n, rows) + 2) / _MERGE_ROWS // 2, 'LDG', 2)]


def _inverse(launch: KernelLaunch) -> list[Loop]:
    batch, iters = launch.integers
    m, threads = dict(launch.macros)['SIZE'], launch.threads
    padded, rows = SolverTiling(batch, m).shared_bytes // 12, warp_passes(m, threads)
    products = [Loop(ceil_div(m, 4), 'FFMA', 112)] * 2
    return [Loop(1), _strided(padded, threads), Loop(rows),
            Loop(m, 'FADD', 1), Loop(m, 'FMNMX', 1), Loop(warp_passes(padded, threads)),
            Loop(iters, 'FADD', 56), *products, _strided(m * m, threads, 'STG')]


def _forward(launch: KernelLaunch) -> list[Loop]:
    macros = dict(launch.macros)
    quads = ceil_div(macros['HEAD_DIM'], 4)
    landmarks = macros['M_THREADS'] * macros['M_OUTPUTS']
    return [Loop(1), *_load(128 * quads, launch.threads),
            *_load(landmarks * quads, launch.threads),
            Loop(quads / 2, 'FADD', 448)]


def _product(launch: KernelLaunch) -> list[Loop]:
    _, m = launch.integers
    inner, quads = 32, 512
    passes = warp_passes(quads, launch.threads, 2)
    # The first form reads four elements at a time.
    loads = [Loop(0 if m % 4 else passes, 'LDG.E.128', 2), Loop(passes if m % 4 else 0, 'LDG', 8)]
    return [Loop(1), Loop(ceil_div(m, inner)), *loads, *loads, Loop(inner / 4, 'FFMA', 128)]


def _backward_q(launch: KernelLaunch) -> list[Loop]:
    quads = ceil_div(dict(launch.macros)['HEAD_DIM'], 4)
    m, rows = launch.integers[2], 32
    chunks = ceil_div(m, rows)
    whole = sum(min(rows, m - first) // 4 for first in range(0, m, rows))
    return [Loop(1), Loop(chunks), _strided(rows * 128, launch.threads, 'LDG', 2),
            *reversed(_load(rows * quads, launch.threads)), Loop(whole / chunks, 'FFMA', 144)]


def _backward_k(launch: KernelLaunch) -> list[Loop]:
    macros, (_, n, _, rows) = dict(launch.macros), launch.integers
    quads = ceil_div(macros['HEAD_DIM'], 4)
    columns = ceil_div(macros['M_THREADS'] * macros['M_OUTPUTS'], 4)
    slices = launch.threads // (columns * quads)
    patches = ceil_div(4 * columns, 8)
    return [Loop(1), Loop(ceil_div(n, 64) / ceil_div(n, rows)),
            _strided(patches * 8 * 64, launch.threads, 'LDG', 2),
            *_load(64 * quads, launch.threads), Loop(64 / 4 / slices, 'FFMA', 144)]


def _reduce_k(launch: KernelLaunch) -> list[Loop]:
    return [Loop(1), Loop(launch.integers[1] / _MERGE_ROWS // 2, 'LDG', 2)]


KERNELS: dict[str, Callable[[KernelLaunch], list[Loop]]] = {
    'nystrom_attention_landmarks': _landmarks,
    'nystrom_attention_statistics': _statistics,
    'nystrom_attention_merge_statistics': _merge_statistics,
    'nystrom_attention_keys': _keys,
    'nystrom_attention_merge_keys': _merge_keys,
    'nystrom_attention_output': _output,
    'nystrom_attention_grad_context': _grad_context,
    'nystrom_attention_grad_factors': _grad_factors,
    'nystrom_attention_grad_values': _grad_values,
    'nystrom_attention_merge_grad_covariance': _merge_grad_covariance,
    'nystrom_attention_grad_keys': _grad_keys,
    'nystrom_attention_grad_queries': partial(_grad_keys, means=True),
    'nystrom_attention_grad_landmarks': _grad_landmarks,
    'nystrom_attention_merge_landmarks': _merge_landmarks,
    'newton_schulz_inverse': _inverse,
    'newton_schulz_product': _product,
    'laplacian_kernel_forward': _forward,
    'laplacian_kernel_backward_q': _backward_q,
    'laplacian_kernel_backward_k': _backward_k,
    'laplacian_kernel_reduce_k': _reduce_k,
}
"""Tables by kernel; one that is not among them has no count."""
