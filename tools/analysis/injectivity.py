"""Is the normalised similarity map injective? Collisions of real tokens, and one by construction.

::

    python tools/analysis/injectivity.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import torch
from activations import AttentionInputs
from claim import Claim, Finding, plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from photograph import add_image_argument
from tiny_layers import tiny_layers
from torch import Tensor
from tqdm import tqdm
from verdict import verdict

from mmlaplacian.models.landmarks import LandmarkPool
from mmlaplacian.ops import laplacian_kernel, nystrom_attention

KERNEL_SCALE, RIDGE, WHITEN_EPS, HEAD_DIM = 4.0, 1e-2, 1e-5, 32
# Maps by the name of their normalisation: g itself and Z.
MAPS = {'none': 'g', 'whiten': 'Z'}
# Sides of the landmark grid, M = 4 to 196; a grid is never larger than the map.
GRIDS, FAST_GRIDS = (2, 3, 5, 7, 10, 14), (2, 7)
SIDE, FAST_SIDE = 224, 64
# Rows at most this far apart, relative to the spread of all rows, count as one.
NEAR = 1e-6
# A change below this is rounding in float64.
_ROUNDING = 1e-11
_CHUNK = 256


def pooled(layer: AttentionInputs, grid: int) -> Tensor:
    """Landmarks of a layer for a grid, ``(B, h, M, d)``."""
    maps = layer.k.flatten(0, 1).unflatten(1, layer.grid)
    return LandmarkPool(grid)(maps).unflatten(0, layer.k.shape[:2])


def feature_rows(q: Tensor, k: Tensor, landmarks: Tensor, normalize: str) -> Tensor:
    """Rows in M dimensions with the same lengths and distances as the rows of a map.

    G = C_q P C_k^T and N Z - 1 = (C_q - c) P C_k^T D^(1/2), c the mean of C_q: with the
    factorisation D^(1/2) C_k = Q R the rows of (C_q - c) P R^T are theirs in the basis Q.

    Args:
        q: Queries ``(B, h, n, d)``; any number of them.
        k: Keys ``(B, h, N, d)``, N >= M.
        landmarks: ``(B, h, M, d)``.
        normalize: ``'none'`` for G, ``'whiten'`` for N Z - 1.

    Returns:
        ``(B, h, n, M)`` in float64.
    """
    q, k, landmarks = q.double(), k.double(), landmarks.double()
    c_q, c_k, w = (laplacian_kernel(x, landmarks, KERNEL_SCALE) for x in (q, k, landmarks))
    w.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
    c_q = torch.linalg.solve(w, c_q.mT).mT
    if normalize == 'whiten':
        c_q = c_q - c_q.mean(-2, keepdim=True)
        variance = (c_q @ c_k.mT).square().mean(-2)
        c_k = c_k / (variance + WHITEN_EPS).sqrt()[..., None]
    return c_q @ torch.linalg.qr(c_k, mode='r').R.mT


def distinct_rows(x: Tensor) -> np.ndarray:
    """The first index of each distinct row of ``(n, d)``."""
    return np.sort(np.unique(x.numpy(), axis=0, return_index=True)[1])


def distances(rows: Tensor) -> tuple[float, int]:
    """Smallest distance of two rows, and how many pairs are :data:`NEAR`.

    Args:
        rows: ``(n, M)``.

    Returns:
        Both relative to the spread, the root mean square distance of the rows to their mean.
    """
    spread = (rows - rows.mean(0)).norm(dim=1).square().mean().sqrt()
    smallest, near = float('inf'), 0
    for start in range(0, len(rows), _CHUNK):
        apart = torch.cdist(rows[start:start + _CHUNK], rows[start:],
                            compute_mode='donot_use_mm_for_euclid_dist') / spread
        pairs = apart[torch.ones_like(apart, dtype=torch.bool).triu(1)]
        if len(pairs):
            smallest, near = min(smallest, pairs.min().item()), near + (pairs <= NEAR).sum().item()
    return smallest, near


def op_map(layer: AttentionInputs, landmarks: Tensor, normalize: str) -> Tensor:
    """G / N or Z ``(B, h, N, N)`` as the op computes it, in the dtype of the layer."""
    identity = torch.eye(layer.q.shape[2], dtype=layer.q.dtype).expand(*layer.q.shape[:2], -1, -1)
    return nystrom_attention(layer.q, layer.k, identity, landmarks, kernel_scale=KERNEL_SCALE,
                             ridge=RIDGE, whiten_eps=WHITEN_EPS, normalize=normalize)


def outside_box(q: Tensor, landmarks: Tensor) -> Tensor:
    """How far each channel of q is outside the landmarks' bounding box, 0 inside; like ``q``."""
    low, high = landmarks.amin(2, keepdim=True), landmarks.amax(2, keepdim=True)
    return (low - q).clamp_min(0) + (q - high).clamp_min(0)


def local_rank(q: Tensor, landmarks: Tensor) -> Tensor:
    """Rank of the Jacobian of q -> g at each query, ``(B, h, N)``.

    Away from ties the distances to the landmarks are linear with slopes sign(q - landmark), and
    g is injective in them: along what the ``(M, d)`` signs map to 0 g is constant.
    """
    signs = torch.sign(q[..., :, None, :].double() - landmarks[..., None, :, :].double())
    return torch.linalg.matrix_rank(signs)


def doubles(q: Tensor, landmarks: Tensor, balanced: bool) -> tuple[Tensor, Tensor]:
    """Another query for each that is outside the box in at least two channels.

    Its two farthest channels move by half the smaller excess, the farthest outwards. The other
    moves inwards if balanced, so that the signed sum of the two, and with it every distance to
    a landmark, stays; otherwise outwards too.

    Args:
        q: Queries ``(B, h, N, d)``.
        landmarks: ``(B, h, M, d)``.
        balanced: Which.

    Returns:
        The other queries like ``q``, and which of them differ, ``(B, h, N)``.
    """
    excess, channels = outside_box(q, landmarks).topk(2, -1)
    outwards = torch.sign(q - landmarks.mean(2, keepdim=True)).gather(-1, channels)
    step = excess[..., 1:] / 2
    moves = torch.cat((step, -step if balanced else step), -1) * outwards
    return q.scatter_add(-1, channels, moves), step[..., 0] > 0


def rows_of_map(layer: AttentionInputs, grid: int, normalize: str) -> dict[str, float]:
    """How the rows of a map tell the tokens of a layer apart.

    Returns:
        Sums over the heads: ``distinct_queries``, ``distinct_rows_float32`` of the map that the
        op computes, ``near_pairs`` of distinct queries. The worst head: ``smallest_distance``
        of rows of distinct queries; ``rank_float32``, the singular values above N times the
        rounding unit of float32; ``condition`` over those above that of float64.
    """
    landmarks = pooled(layer, grid)
    computed = op_map(layer, landmarks, normalize)[0]
    heads = []
    for q, rows, of_op in zip(layer.q[0], feature_rows(layer.q, layer.k, landmarks, normalize)[0],
                              computed, strict=True):
        distinct = distinct_rows(q)
        smallest, near = distances(rows[distinct])
        singular = torch.linalg.svdvals(rows)
        resolved = {dtype: singular > len(q) * torch.finfo(dtype).eps * singular[0]
                    for dtype in (torch.float32, torch.float64)}
        heads.append({
            'distinct_queries': len(distinct),
            'distinct_rows_float32': len({row.tobytes() for row in of_op.numpy()[distinct]}),
            'near_pairs': near, 'smallest_distance': smallest,
            'rank_float32': resolved[torch.float32].sum().item(),
            'condition': (singular[0] / singular[resolved[torch.float64]][-1]).item()})
    worst = {'smallest_distance': min, 'rank_float32': min, 'condition': max}
    return {key: worst.get(key, sum)(head[key] for head in heads) for key in heads[0]}


def constructed(layer: AttentionInputs, grid: int, normalize: str) -> dict[str, float]:
    """The relative change of the row of each token that has a double.

    Returns:
        ``doubles``, their number; ``balanced_change``, the largest, and ``unbalanced_change``,
        the smallest; without doubles both are 0.
    """
    q, landmarks = layer.q.double(), pooled(layer, grid).double()
    found: dict[str, float] = {}
    for balanced, name, extreme in ((True, 'balanced_change', max),
                                    (False, 'unbalanced_change', min)):
        other, differs = doubles(q, landmarks, balanced)
        rows = feature_rows(torch.cat((q, other), 2), layer.k, landmarks, normalize)
        before, after = rows.tensor_split(2, 2)
        change = (after - before).norm(dim=-1) / before.norm(dim=-1)
        found['doubles'] = differs.sum().item()
        found[name] = extreme(change[differs].tolist(), default=0.0)
    return found


def around_tokens(layer: AttentionInputs, grid: int) -> dict[str, float]:
    """``outside_channels``, mean over tokens, and the shares of the tokens ``outside_in_two``
    channels or more and ``locally_injective``, the Jacobian of q -> g having rank d."""
    q, landmarks = layer.q, pooled(layer, grid)
    outside = (outside_box(q, landmarks) > 0).sum(-1).double()
    injective = local_rank(q, landmarks) == q.shape[-1]
    return {'outside_channels': outside.mean().item(),
            'outside_in_two': (outside >= 2).double().mean().item(),
            'locally_injective': injective.double().mean().item()}


def measure(options: argparse.Namespace) -> Finding:
    """Both maps of the first layer of each stage over the number of landmarks."""
    layers = tiny_layers(options.image, FAST_SIDE if options.fast else SIDE, options.seed)[::2]
    grids = FAST_GRIDS if options.fast else GRIDS
    cases = [(layer, grid) for layer in layers for grid in grids if grid <= min(layer.grid)]
    rows = []
    for layer, grid in tqdm(cases, unit='case'):
        around = around_tokens(layer, grid)
        rows += [{'stage': int(layer.layer.split('.')[1]) + 1, 'layer': layer.layer,
                  'tokens': layer.q.shape[1] * layer.q.shape[2], 'landmarks': grid**2,
                  'map': name, **rows_of_map(layer, grid, normalize),
                  **constructed(layer, grid, normalize), **around}
                 for normalize, name in MAPS.items()]
    return Finding(rows, draw(rows), describe(rows, options.image.name))


def describe(rows: Sequence[dict], photograph: str) -> str:
    """The result in words.

    Args:
        rows: Of the CSV file.
        photograph: Its name.
    """
    g, z = ([row for row in rows if row['map'] == name] for name in MAPS.values())
    counts = ('distinct_rows_float32', 'near_pairs')
    same = all(one[key] == two[key] for one, two in zip(g, z, strict=True) for key in counts)
    equal = max(row['balanced_change'] for row in rows)
    unequal = min((row['unbalanced_change'] for row in rows if row['doubles']), default=0.0)
    adds_none = same and equal < _ROUNDING < unequal
    queries = sum(row['distinct_queries'] for row in g)
    lost = {row_map: sum(row['distinct_queries'] - row['distinct_rows_float32'] for row in found)
            for row_map, found in (('g', g), ('Z', z))}
    near = {row_map: sum(row['near_pairs'] for row in found)
            for row_map, found in (('g', g), ('Z', z))}
    apart = not any(lost.values()) and not any(near.values())
    injective = [row['locally_injective'] for row in g]
    default = {row['stage']: row for row in g if row['landmarks'] == 49}
    shares = ', '.join(f'{row["outside_in_two"]:.1%} and {row["locally_injective"]:.1%} in stage '
                       f'{stage}' for stage, row in default.items())
    landmarks = sorted({row['landmarks'] for row in rows})
    closest = {name: min(found, key=lambda row: row['smallest_distance'])
               for name, found in (('g', g), ('Z', z))}
    return (
        f'The claim {verdict([adds_none, apart, min(injective) == 1])}. That the normalisation '
        f'adds no collision {verdict([adds_none])}: in every stage g and Z have '
        f'{"the same number" if same else "different numbers"} of distinct rows, and of '
        f'{sum(row["doubles"] for row in g)} constructed pairs with equal rows of g '
        f'the rows of Z, too, differ by at most {equal:.1g} (relative, float64; pairs moved as '
        f'far in another direction: at least {unequal:.1g}). '
        f'That distinct tokens of a real map do not collide {verdict([apart])}: of {queries} '
        f'distinct queries (all stages, all numbers of landmarks from {landmarks[0]} to '
        f'{landmarks[-1]}) {lost["g"]} share their row of g with another and {lost["Z"]} that of '
        f'Z in float32, and {near["g"]} pairs of rows of g and {near["Z"]} of Z are within '
        f'{NEAR:.0e} of the spread of the rows; the smallest distance is '
        f'{closest["g"]["smallest_distance"]:.1e} of the spread for g '
        f'(M = {closest["g"]["landmarks"]}) and {closest["Z"]["smallest_distance"]:.1e} for Z. '
        f'That the map from a query to its row of g is injective '
        f'{verdict([min(injective) == 1])}: two channels outside the bounding box of the '
        f'landmarks count by their signed sum alone. With 49 landmarks the share of the tokens '
        f'that are outside in two channels or more, and the share around which g is injective '
        f'(its Jacobian has rank d = {HEAD_DIM}), are {shares}; with fewer landmarks than '
        f'channels no map can be. The rank that float32 resolves is, with 49 landmarks, '
        f'{_range(g, "rank_float32")} for g and {_range(z, "rank_float32")} for Z, the condition '
        f'number {_range(g, "condition")} and {_range(z, "condition")}. The first '
        f'attention layer of each stage of the tiny backbone with new weights on {photograph}.')


def _range(rows: Sequence[dict], key: str) -> str:
    """Smallest and largest with 49 landmarks."""
    values = [row[key] for row in rows if row['landmarks'] == 49]
    return f'{min(values):.0f} to {max(values):.0f}'


def draw(rows: Sequence[dict]) -> Figure:
    """Distance, condition, rank and local injectivity over the number of landmarks."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.6))
    _draw_maps(axes[0, 0], rows, 'smallest_distance')
    axes[0, 0].axhline(NEAR, color='k', lw=1)
    axes[0, 0].text(4, 1.3 * NEAR, 'counts as a collision below', fontsize=8, va='bottom')
    axes[0, 0].set(title='Nearest rows of distinct queries', yscale='log', ylim=(NEAR / 3, None),
                   ylabel='distance / spread of the rows')
    _draw_maps(axes[0, 1], rows, 'condition')
    axes[0, 1].set(title='Condition number of the rows', yscale='log', ylabel='condition number')
    resolved = [{**row, 'share': 100 * row['rank_float32'] / row['landmarks']} for row in rows]
    _draw_maps(axes[1, 0], resolved, 'share')
    axes[1, 0].set(title='Rank that float32 resolves', ylabel='rank / M, %', ylim=(0, 105))
    for stage in range(1, 5):
        for key, line, label in (('outside_in_two', '-', 'outside in 2 channels'),
                                 ('locally_injective', ':', 'g injective around it')):
            values = _column(rows, stage, 'g', key)
            axes[1, 1].plot(list(values), [100 * value for value in values.values()], line,
                            marker='.', color=f'C{stage - 1}', label=f'stage {stage}, {label}')
    axes[1, 1].set(title='Tokens and the bounding box of the landmarks', ylabel='tokens, %',
                   ylim=(-5, 105))
    count = sorted({row['landmarks'] for row in rows})
    for ax in axes.flat:
        ax.set(xscale='log', xlabel='landmarks M')
        ax.set_xticks(count, map(str, count))
        ax.xaxis.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7, ncol=2)
    axes[1, 1].legend(fontsize=7, loc='center left')
    return figure


def _column(rows: Sequence[dict], stage: int, name: str, key: str) -> dict[int, float]:
    """A column over the number of landmarks."""
    return {row['landmarks']: row[key] for row in rows
            if (row['stage'], row['map']) == (stage, name)}


def _draw_maps(ax: Axes, rows: Sequence[dict], key: str) -> None:
    for stage in range(1, 5):
        for name, line in zip(MAPS.values(), ('-', '--'), strict=True):
            values = _column(rows, stage, name, key)
            ax.plot(list(values), list(values.values()), line, marker='.',
                    color=f'C{stage - 1}', label=f'stage {stage}, {name}')


CLAIM = Claim('injectivity',
              'The normalised map is injective: distinct tokens keep distinct rows of Z.',
              measure, add_image_argument)

if __name__ == '__main__':
    sys.exit(CLAIM.run())
