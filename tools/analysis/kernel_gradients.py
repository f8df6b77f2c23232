"""Laplacian against Gaussian kernel: gradients near zero distance, attention mass, outliers.

::

    python tools/analysis/kernel_gradients.py --out work_dirs/claims
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from activations import AttentionInputs
from claim import Claim, Finding, plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from photograph import add_image_argument
from scipy.optimize import brentq
from tiny_layers import tiny_layers
from torch import Tensor
from tqdm import tqdm
from verdict import verdict

from mmlaplacian.models.landmarks import LandmarkPool
from mmlaplacian.ops import gaussian_kernel, laplacian_kernel, nystrom_attention

KERNEL_SCALE, HEAD_DIM = 4.0, 32
SIDE, FAST_SIDE = 224, 64
KERNELS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    'laplacian': laplacian_kernel, 'gaussian': gaussian_kernel}
# Parts of the CSV file.
GRADIENT, MASS, OUTPUT, MAP = 'gradient', 'mass', 'outlier, output', 'outlier, map'
# What the Gaussian's scale is fitted to.
MEDIAN, ENTROPY = 'median kernel value', 'row entropy'
HEAVY = 'heavy tails'
# Student's t: below 4 degrees of freedom it has no kurtosis.
_FREEDOM, _HEAVY_TOKENS = 3, 256
# Rows of the kernel matrix that the mass is measured on, at most.
_QUERIES = 256
_BINS = 10
# Deciles of the keys by distance that count as mid-range: from 0.3 to 0.7.
_MIDDLE = range(3, 7)
# The gradient counts as alive where it keeps this share of its limit, as gone below the other.
_ALIVE, _GONE = 0.99, 1e-3
# Two shares closer than this, relatively, count as one.
_MARGIN = 0.01


def gradient_norm(kernel: str, distance: float, scale: float, dtype: torch.dtype) -> float:
    """||dk/dx||_2 by autograd through the op, at x = y + distance u.

    u is the unit vector with equal entries: no channel is tied.
    """
    y = torch.zeros(1, 1, 1, HEAD_DIM, dtype=dtype)
    x = torch.full_like(y, distance / math.sqrt(HEAD_DIM)).requires_grad_()
    KERNELS[kernel](x, y, scale).sum().backward()
    return x.grad.norm().item()


def closed_form(kernel: str, distance: float, scale: float) -> float:
    """The same by hand: sqrt(d) k / lambda for the Laplacian kernel, r k / lambda for the other.

    At a tie both are 0, the Laplacian's by sign(0) = 0.
    """
    if kernel == 'gaussian':
        return distance / scale * math.exp(-distance**2 / (2 * scale))
    slope = math.sqrt(HEAD_DIM) / scale
    return slope * math.exp(-distance * slope) if distance else 0.0


def gradient_rows(scales: Mapping[str, float], points: int) -> list[dict]:
    """The gradients from a tie and 1e-6 up to 10, by hand and through the op in two dtypes."""
    distances = [0.0, *torch.logspace(-6, 1, points, dtype=torch.float64).tolist()]
    return [{'part': GRADIENT, 'kernel': kernel, 'scale': scales[kernel],
             'input': f'op, {str(dtype)[6:]}', 'x': r,
             'value': gradient_norm(kernel, r, scales[kernel], dtype),
             'closed_form': closed_form(kernel, r, scales[kernel])}
            for kernel in KERNELS for dtype in (torch.float32, torch.float64) for r in distances]


def row_entropy(kernel_values: Tensor) -> float:
    """Mean entropy of the rows ``(..., N, N)``, each divided by its sum, in nats."""
    return torch.special.entr(kernel_values / kernel_values.sum(-1, keepdim=True)).sum(
        -1).mean().item()


def matched_scale(q: Tensor, k: Tensor, match: str) -> float:
    """lambda of the Gaussian kernel that fits the Laplacian kernel of lambda = 4.

    Args:
        q: Queries ``(B, h, N, d)``.
        k: Keys ``(B, h, N, d)``.
        match: :data:`MEDIAN`, the two have one median over all pairs, or :data:`ENTROPY`, their
            normalised rows have one mean entropy.
    """
    exponents = -laplacian_kernel(q, k, KERNEL_SCALE).log()
    squares = torch.cdist(q, k, compute_mode='donot_use_mm_for_euclid_dist').square()
    scale = squares.median().item() / (2 * exponents.median().item())
    if match == MEDIAN:
        return scale
    target = row_entropy(laplacian_kernel(q, k, KERNEL_SCALE))
    # The entropy grows with the scale.
    return math.exp(brentq(
        lambda log: row_entropy(torch.softmax(-squares / (2 * math.exp(log)), -1)) - target,
        math.log(scale) - 10, math.log(scale) + 10, xtol=1e-6))


def mass_by_decile(kernel: str, q: Tensor, k: Tensor, scale: float) -> list[float]:
    """Share of a row's kernel values in each tenth of the keys, nearest first, mean over rows.

    The kernels fall with their own distance, so sorted values are sorted keys.
    """
    values = KERNELS[kernel](q, k, scale).sort(-1, descending=True).values
    shares = values / values.sum(-1, keepdim=True)
    return [part.sum(-1).mean().item() for part in shares.tensor_split(_BINS, -1)]


def heavy_tailed_tokens(layer: AttentionInputs) -> tuple[Tensor, Tensor]:
    """q and k ``(1, 1, N, d)`` of Student's t with 3 degrees of freedom, one radius a token.

    Their median L1 distance is that of a layer.
    """
    normal = torch.randn(2, 1, 1, _HEAVY_TOKENS, HEAD_DIM, dtype=torch.float64)
    radius = torch.distributions.Chi2(_FREEDOM).sample((2, 1, 1, _HEAVY_TOKENS, 1)).double()
    q, k = normal / (radius / _FREEDOM).sqrt()
    wanted = torch.cdist(layer.q, layer.k, p=1.0).median()
    factor = wanted / torch.cdist(q, k, p=1.0).median()
    return q * factor, k * factor


def variants(q: Tensor, k: Tensor) -> dict[tuple[str, str], float]:
    """The kernels that are compared, (kernel, match) -> lambda."""
    return {('laplacian', ''): KERNEL_SCALE,
            **{('gaussian', match): matched_scale(q, k, match) for match in (MEDIAN, ENTROPY)}}


def mass_rows(name: str, q: Tensor, k: Tensor) -> list[dict]:
    """The mass of every variant."""
    return [{'part': MASS, 'kernel': kernel, 'match': match, 'scale': scale, 'input': name,
             'x': (decile + 0.5) / _BINS, 'value': share}
            for (kernel, match), scale in variants(q, k).items()
            for decile, share in enumerate(mass_by_decile(kernel, q, k, scale))]


def with_outlier(layer: AttentionInputs, token: int, shift: Tensor) -> AttentionInputs:
    """A layer whose query and key of one token are moved; the landmarks are pooled anew.

    Args:
        layer: With ``landmark_grid=7``.
        token: Its index in the map.
        shift: ``(d,)``.
    """
    q, k = layer.q.clone(), layer.k.clone()
    q[:, :, token] += shift
    k[:, :, token] += shift
    pooled = LandmarkPool()(k.flatten(0, 1).unflatten(1, layer.grid))
    return dataclasses.replace(layer, q=q, k=k, landmarks=pooled.unflatten(0, k.shape[:2]))


def output_and_map(layer: AttentionInputs, kernel: str, scale: float) -> tuple[Tensor, Tensor]:
    """Output ``(B, h, N, d)`` of the whitened attention, and G / N ``(B, h, N, N)``."""
    def attention(v: Tensor, normalize: str) -> Tensor:
        return nystrom_attention(layer.q, layer.k, v, layer.landmarks, kernel_scale=scale,
                                 kernel=kernel, normalize=normalize)

    # With V = I the output is the map.
    identity = torch.eye(layer.q.shape[2], dtype=layer.q.dtype).expand(*layer.q.shape[:2], -1, -1)
    return attention(layer.v, 'whiten'), attention(identity, 'none')


def influence(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor],
              token: int) -> dict[str, float]:
    """What one moved token changes at the others.

    Args:
        before: Output and map without the outlier.
        after: The same with it.
        token: The outlier.

    Returns:
        :data:`OUTPUT`: the largest change of another token's output over the root mean square
        norm of the outputs, mean over heads; :data:`MAP`: the Frobenius norm of the change of
        the others' rows of G over that of these rows, mean over heads.
    """
    others = torch.arange(before[0].shape[2]) != token
    out_change, map_change = (b - a for a, b in zip(before, after, strict=True))
    size = before[0].norm(dim=-1).square().mean(-1).sqrt()
    largest = out_change[:, :, others].norm(dim=-1).amax(-1)
    share = (map_change[:, :, others].norm(dim=(-2, -1))
             / before[1][:, :, others].norm(dim=(-2, -1)))
    return {OUTPUT: (largest / size).mean().item(), MAP: share.mean().item()}


def outlier_rows(layer: AttentionInputs, tokens: int, magnitudes: Sequence[float],
                 progress: tqdm) -> list[dict]:
    """Mean influence of single outliers over their magnitude in units of the keys' spread.

    Args:
        layer: The layer, ``landmark_grid=7``.
        tokens: Number of outliers, one at a time, at random places in random directions.
        magnitudes: The units.
        progress: Gets one step for each magnitude of each variant.
    """
    spread = (layer.k - layer.k.mean(2, keepdim=True)).norm(dim=-1).square().mean().sqrt()
    chosen = torch.randperm(layer.q.shape[2])[:tokens].tolist()
    directions = torch.nn.functional.normalize(torch.randn(tokens, HEAD_DIM).double(), dim=-1)
    rows = []
    for (kernel, match), scale in variants(layer.q, layer.k).items():
        before = output_and_map(layer, kernel, scale)
        for magnitude in magnitudes:
            found = [influence(before, output_and_map(
                with_outlier(layer, token, magnitude * spread * u), kernel, scale), token)
                for token, u in zip(chosen, directions, strict=True)]
            rows += [{'part': part, 'kernel': kernel, 'match': match, 'scale': scale,
                      'input': layer.layer, 'x': magnitude,
                      'value': statistics.mean(one[part] for one in found)}
                     for part in (OUTPUT, MAP)]
            progress.update()
    return rows


def in_float64(layer: AttentionInputs) -> AttentionInputs:
    """The same layer."""
    return dataclasses.replace(layer, **{name: getattr(layer, name).double()
                                         for name in ('q', 'k', 'v', 'landmarks')})


def measure(options: argparse.Namespace) -> Finding:
    """All three parts."""
    layers = [in_float64(layer) for layer in tiny_layers(
        options.image, FAST_SIDE if options.fast else SIDE, options.seed)[::2]]
    torch.manual_seed(options.seed)
    tokens, count, points = (2, 5, 8) if options.fast else (16, 13, 29)
    magnitudes = torch.logspace(-1, 3, count, dtype=torch.float64).tolist()
    stage = layers[2]
    inputs = {f'stage {number}': (layer.q[:, :, torch.randperm(layer.q.shape[2])[:_QUERIES]],
                                  layer.k) for number, layer in enumerate(layers, 1)}
    inputs[HEAVY] = heavy_tailed_tokens(stage)
    rows = gradient_rows({'laplacian': KERNEL_SCALE,
                          'gaussian': matched_scale(stage.q, stage.k, MEDIAN)}, points)
    with tqdm(total=len(inputs) + 3 * count, unit='step') as progress:
        for name, (q, k) in inputs.items():
            rows += mass_rows(name, q, k)
            progress.update()
        rows += outlier_rows(stage, tokens, magnitudes, progress)
    fields = ('part', 'kernel', 'match', 'scale', 'input', 'x', 'value', 'closed_form')
    rows = [{field: row.get(field, '') for field in fields} for row in rows]
    return Finding(rows, draw(rows), describe(rows, options.image.name))


def _values(rows: Sequence[dict], **where: object) -> dict[float, float]:
    """x -> value of the rows with these entries."""
    return {row['x']: row['value'] for row in rows
            if all(row[key] == value for key, value in where.items())}


def middle_mass(rows: Sequence[dict], kernel: str, match: str) -> dict[str, float]:
    """Share of the mass in the mid-range deciles, by input; even attention has 0.4."""
    inputs = dict.fromkeys(row['input'] for row in rows if row['part'] == MASS)
    return {name: sum(list(_values(rows, part=MASS, kernel=kernel, match=match,
                                   input=name).values())[decile] for decile in _MIDDLE)
            for name in inputs}


def gradients_in_words(rows: Sequence[dict]) -> tuple[str, list[bool]]:
    """A sentence, and whether the claim held."""
    ops = {(kernel, dtype): _values(rows, part=GRADIENT, kernel=kernel, input=f'op, {dtype}')
           for kernel in KERNELS for dtype in ('float32', 'float64')}
    near = min(x for x in ops['laplacian', 'float64'] if x)
    limit = math.sqrt(HEAD_DIM) / KERNEL_SCALE
    laplacian, gaussian = ([ops[kernel, dtype][near] for dtype in ('float32', 'float64')]
                           for kernel in KERNELS)
    held = [min(laplacian) > _ALIVE * limit and max(gaussian) < _GONE * limit]
    tie = max(values[0.0] for values in ops.values())
    error = max(abs(row['value'] / row['closed_form'] - 1) for row in rows
                if row['part'] == GRADIENT and row['closed_form'])
    return (
        f'That the Laplacian kernel keeps its gradient near zero distance and the Gaussian does '
        f'not {verdict(held)}: at a distance of {near:.0e} |dk/dx| is {laplacian[1]:.3f} and '
        f'{gaussian[1]:.1e} (limits sqrt(d)/λ = {limit:.3f} for d = {HEAD_DIM} and '
        f'λ = {KERNEL_SCALE:g}, and 0; criterion: above {_ALIVE:g} and below {_GONE:g} of the '
        f'first). At a tie, x = y, '
        f'{"both are exactly 0" if tie == 0 else f"the largest is {tie:.1e}"} through the ops, '
        f'which are within {error:.0e} of the formulas in float32 and float64.'), held


def mass_in_words(rows: Sequence[dict]) -> tuple[str, list[bool]]:
    """A sentence, and whether the claim held under each match."""
    ours = middle_mass(rows, 'laplacian', '')
    parts, held = [], []
    for match in (MEDIAN, ENTROPY):
        theirs = middle_mass(rows, 'gaussian', match)
        more = sum(ours[name] > (1 + _MARGIN) * theirs[name] for name in ours)
        less = sum(ours[name] < (1 - _MARGIN) * theirs[name] for name in ours)
        held.append(more == len(ours))
        values = ', '.join(f'{name} {ours[name]:.3f} to {theirs[name]:.3f}' for name in ours)
        parts.append(f'with the same {match} more in {more} and less in {less} of {len(ours)} '
                     f'inputs ({values})')
    return (
        f'That the Gaussian suppresses the mid-range {verdict(held)}: of the mass of a row of '
        f'kernel values the keys from the 30th to the 70th percentile of distance, 0.4 of the '
        f'mass if it were even, get, Laplacian to Gaussian, {"; ".join(parts)} (criterion: more '
        f'by {_MARGIN:.0%} in all inputs under both matches of the scales).'), held


def outliers_in_words(rows: Sequence[dict]) -> tuple[str, list[bool]]:
    """A sentence, and whether the claim held for each measure under each match."""
    parts, held = [], []
    for part, what in ((OUTPUT, "another token's output"), (MAP, "the others' rows of G")):
        largest = {match: max(_values(rows, part=part, kernel=kernel, match=match).values())
                   for kernel, match in (('laplacian', ''), ('gaussian', MEDIAN),
                                         ('gaussian', ENTROPY))}
        held += [largest[''] < largest[match] for match in (MEDIAN, ENTROPY)]
        parts.append(f'{what} by at most {largest[""]:.1%} with the Laplacian and '
                     f'{largest[MEDIAN]:.1%} or {largest[ENTROPY]:.1%} with the Gaussian')
    farthest = max(row['x'] for row in rows if row['part'] == MAP)
    return (
        f'That the Laplacian resists outliers better {verdict(held)}: a token moved by up to '
        f'{farthest:g} times the spread of the keys changes {" and ".join(parts)} (same {MEDIAN} '
        f'or same {ENTROPY}; mean over tokens and heads; criterion: less than the Gaussian in '
        f'all four). Both kernels are bounded by 1, so both level off.'), held


def describe(rows: Sequence[dict], photograph: str) -> str:
    """The result in words.

    Args:
        rows: Of the CSV file.
        photograph: Its name.
    """
    parts = [gradients_in_words(rows), mass_in_words(rows), outliers_in_words(rows)]
    whole = verdict([value for _, held in parts for value in held])
    return (f'The claim {whole}. {" ".join(text for text, _ in parts)} Inputs: the first '
            f'attention layer of each stage of the tiny backbone with new weights on '
            f'{photograph}, and tokens of Student\'s t distribution with {_FREEDOM} degrees of '
            f'freedom; outliers in stage 3.')


_STYLES = {('laplacian', ''): ('C0', '-', 'Laplacian'),
           ('gaussian', MEDIAN): ('C1', '--', f'Gaussian, same {MEDIAN}'),
           ('gaussian', ENTROPY): ('C2', ':', f'Gaussian, same {ENTROPY}')}


def draw(rows: Sequence[dict]) -> Figure:
    """Gradients, mass and influence."""
    figure, axes = plt.subplots(2, 3, figsize=(13.5, 7.6))
    _draw_gradients(axes[0, 0], rows)
    for ax, name in zip((axes[0, 1], axes[0, 2], axes[1, 0]), ('stage 1', 'stage 4', HEAVY),
                        strict=True):
        for (kernel, match), (color, line, label) in _STYLES.items():
            values = _values(rows, part=MASS, kernel=kernel, match=match, input=name)
            ax.plot([100 * x for x in values], [100 * y for y in values.values()], line,
                    marker='.', color=color, label=label)
        ax.axvspan(30, 70, color='0.93', zorder=0, label='mid-range')
        ax.set(title=f'Attention mass, {name}', xlabel='percentile of distance of the keys',
               ylabel='share of the mass, % a tenth', ylim=(0, None))
    for ax, (part, what) in zip(axes[1, 1:], (
            (OUTPUT, "largest change of another\ntoken's output, %"),
            (MAP, "change of the others' rows of G, %")), strict=True):
        for (kernel, match), (color, line, label) in _STYLES.items():
            values = _values(rows, part=part, kernel=kernel, match=match)
            ax.plot(list(values), [100 * y for y in values.values()], line, marker='.',
                    color=color, label=label)
        ax.set(title='One outlier token, stage 3', xscale='log', ylim=(0, None), ylabel=what,
               xlabel='shift of its query and key, in spreads of the keys')
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    return figure


def _draw_gradients(ax: Axes, rows: Sequence[dict]) -> None:
    for kernel, color in zip(KERNELS, ('C0', 'C1'), strict=True):
        curve = [row for row in rows if row['part'] == GRADIENT and row['kernel'] == kernel
                 and row['input'] == 'op, float32' and row['x']]
        ax.plot([row['x'] for row in curve], [row['closed_form'] for row in curve], color=color,
                label=f'{kernel.capitalize()}, formula, λ = {curve[0]["scale"]:.3g}')
        ax.plot([row['x'] for row in curve], [row['value'] for row in curve], '.', color=color,
                label=f'{kernel.capitalize()}, through the op')
    tie = max(row['value'] for row in rows if row['part'] == GRADIENT and not row['x'])
    ax.set(title=f'Gradient of one kernel value, {tie:g} at a tie', xscale='log', yscale='log',
           xlabel='distance ||x - y||$_2$', ylabel='||dk/dx||$_2$', ylim=(1e-8, 10))


CLAIM = Claim('kernel_gradients',
              'The Laplacian kernel keeps gradients near zero distance, attends to the mid-range '
              'and resists outliers, where the Gaussian does not.', measure, add_image_argument)

if __name__ == '__main__':
    sys.exit(CLAIM.run())
