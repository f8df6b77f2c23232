"""Distances of queries to keys: heavier tails than a Gaussian's? Four backbones, layer by layer.

::

    python tools/analysis/qk_distances.py --out work_dirs/claims
    python tools/analysis/qk_distances.py --weights deit=deit_tiny.pth swin=swin_tiny.pth
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import distant_parts
import numpy as np
import torch
from claim import Claim, Finding, UserError, plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from peer_backbones import PEERS, with_weights
from photograph import add_image_argument, normalized, square_photograph
from queries_keys import QueriesKeys, queries_keys
from recall_task import COLOURS
from scipy import stats
from short_training import train
from torch import Tensor, nn
from verdict import verdict

STEPS, FAST_STEPS = 300, 2
IMAGES, FAST_IMAGES = 8, 1
PAIRS, FAST_PAIRS = 20000, 1000
SIDE = 224
L1, L2, DIFFERENCE = 'L1 distance', 'L2 distance', 'channel difference'
QUANTITIES = (L1, L2, DIFFERENCE)
# Share of the largest deviations that the Hill estimator takes as the tail.
TAIL = 0.05
# Excess kurtosis above which a layer counts as heavier than a Gaussian.
HEAVY = 0.1
# Of the standardised histogram.
_EDGES = np.arange(-4, 8.01, 0.5)


def sampled(layer: QueriesKeys, pairs: int, generator: torch.Generator) -> dict[str, Tensor]:
    """What a layer's queries and keys differ by, for random pairs of one image and head.

    Args:
        layer: The layer.
        pairs: Pairs of each head.
        generator: Source of the random numbers.

    Returns:
        For each of :data:`QUANTITIES` ``(h, pairs)``; the channel difference is signed, of one
        random channel a pair.
    """
    def index(size: int) -> Tensor:
        return torch.randint(size, (pairs, ), generator=generator)

    image = index(len(layer.q))
    difference = (layer.q[image, :, index(layer.q.shape[2])]
                  - layer.k[image, :, index(layer.k.shape[2])]).double()
    channel = index(difference.shape[-1])
    found = {L1: difference.abs().sum(-1), L2: difference.norm(dim=-1),
             DIFFERENCE: difference[torch.arange(pairs), :, channel]}
    return {name: values.T for name, values in found.items()}


def standardised(values: Tensor) -> np.ndarray:
    """Each head ``(h, pairs)`` less its mean, over its standard deviation; flat."""
    values = values - values.mean(1, keepdim=True)
    return (values / values.square().mean(1, keepdim=True).sqrt()).flatten().numpy()


def hill_index(values: np.ndarray) -> float:
    """Hill's tail index of the absolute values: k / sum log(x_i / x_k) over the k + 1 largest.

    B. M. Hill, Annals of Statistics 3 (1975). Smaller is heavier.
    """
    count = max(1, int(TAIL * len(values)))
    largest = np.sort(np.abs(values))[-count - 1:]
    return count / np.log(largest[1:] / largest[0]).sum()


@functools.cache
def expected_hill_index(distribution: stats.rv_continuous) -> float:
    """The same of a symmetric distribution: 1 / E[log(x / u) | x > u], u its upper bound."""
    threshold = distribution.isf(TAIL / 2)
    mean = distribution.expect(lambda x: math.log(x / threshold), lb=threshold, ub=math.inf)
    return TAIL / 2 / mean


def shape(values: Tensor) -> dict[str, float]:
    """Shape of a sample ``(h, pairs)``, each head standardised.

    Returns:
        ``mean`` and ``spread`` before that, mean over heads; ``excess_kurtosis``, 0 for a
        Gaussian and 3 for a Laplace distribution; ``hill_index``; mean log-likelihoods of the
        fitted distributions, nats a pair, ``gaussian_fit`` and ``laplace_fit``; the
        histogram's densities by the middles of its bins.
    """
    x = standardised(values)
    density, _ = np.histogram(x, _EDGES)
    width = _EDGES[1] - _EDGES[0]
    middles = (_EDGES[:-1] + _EDGES[1:]) / 2
    return {'mean': values.mean().item(), 'spread': values.std(1, correction=0).mean().item(),
            'excess_kurtosis': float(stats.kurtosis(x)), 'hill_index': float(hill_index(x)),
            'gaussian_fit': float(stats.norm.logpdf(x, *stats.norm.fit(x)).mean()),
            'laplace_fit': float(stats.laplace.logpdf(x, *stats.laplace.fit(x)).mean()),
            **{f'density at {middle:g}': count / len(x) / width
               for middle, count in zip(middles, density, strict=True)}}


def rows_of_layers(name: str, weights: str, layers: Sequence[QueriesKeys], pairs: int,
                   generator: torch.Generator) -> list[dict]:
    """Lines of the CSV file for one model.

    Args:
        name: Of the model.
        weights: Where they come from.
        layers: In order.
        pairs: Of each head.
        generator: Source of the random numbers.
    """
    return [{'model': name, 'weights': weights, 'depth': depth, 'layer': layer.layer,
             'head_dim': layer.q.shape[-1], 'quantity': quantity, **shape(values)}
            for depth, layer in enumerate(layers, 1)
            for quantity, values in sampled(layer, pairs, generator).items()]


def trained(name: str, options: argparse.Namespace) -> tuple[nn.Module, str]:
    """A small model after a short training, and where its weights come from."""
    steps = FAST_STEPS if options.fast else STEPS
    model, curve = train(PEERS[name].small, distant_parts.batch, steps=steps, seed=options.seed,
                         batch_size=2 if options.fast else 16, looks=1,
                         validation=2 if options.fast else 64, progress=name)
    return model, f'{steps} steps here, accuracy {curve.accuracy[-1]:.2f}'


def measure(options: argparse.Namespace) -> Finding:
    """All layers of all models."""
    files = weight_files(options.weights)
    photograph = normalized(square_photograph(options.image, SIDE))
    loaded = {name: with_weights(name, file) for name, file in files.items()}
    drawn, _ = distant_parts.batch(FAST_IMAGES if options.fast else IMAGES,
                                   torch.Generator().manual_seed(options.seed + 2**31))
    generator = torch.Generator().manual_seed(options.seed)
    rows = []
    for name in PEERS:
        if name in files:
            model, images, weights = loaded[name], photograph, files[name].name
        else:
            (model, weights), images = trained(name, options), drawn
        rows += rows_of_layers(name, weights, queries_keys(model, images),
                               FAST_PAIRS if options.fast else PAIRS, generator)
    return Finding(rows, draw(rows), describe(rows, options.image.name))


def weight_files(entries: Sequence[str]) -> dict[str, Path]:
    """``NAME=FILE`` entries by name.

    Raises:
        UserError: An unknown name, one given twice, or an entry without a file.
    """
    files: dict[str, Path] = {}
    for entry in entries:
        name, _, file = entry.partition('=')
        if name not in PEERS or not Path(file).is_file() or name in files:
            raise UserError(f'--weights takes NAME=FILE, each name of {", ".join(PEERS)} at most '
                            f'once and an existing file, got {entry}')
        files[name] = Path(file)
    return files


def is_heavy(row: Mapping[str, object]) -> bool:
    """By kurtosis and by tail index."""
    return row['excess_kurtosis'] > HEAVY and row['hill_index'] < expected_hill_index(stats.norm)


def is_laplace(row: Mapping[str, object]) -> bool:
    """Whether a Laplace distribution fits better."""
    return row['laplace_fit'] > row['gaussian_fit']


def describe(rows: Sequence[dict], photograph: str) -> str:
    """The result in words.

    Args:
        rows: Of the CSV file.
        photograph: What models with given weights looked at.
    """
    parts = []
    for quantity in QUANTITIES:
        models = []
        for name, peer in PEERS.items():
            layers = [row for row in rows if (row['model'], row['quantity']) == (name, quantity)]
            kurtosis = [row['excess_kurtosis'] for row in layers]
            models.append(
                f'{peer.title.partition("-")[0]} heavier in {sum(map(is_heavy, layers))} and '
                f'nearer to Laplace in {sum(map(is_laplace, layers))} of {len(layers)} layers '
                f'(excess kurtosis {min(kurtosis):.2f} to {max(kurtosis):.2f})')
        parts.append(f'{quantity}: {"; ".join(models)}')
    peers = [row for row in rows if row['quantity'] in (L1, L2)]
    sources = []
    for name, peer in PEERS.items():
        weights = next(row['weights'] for row in rows if row['model'] == name)
        sources.append(f'{peer.title}, {weights}, on {photograph}' if 'steps here' not in weights
                       else f'a small {peer.title.partition("-")[0]} trained for {weights}')
    largest = max(peers, key=lambda row: row['excess_kurtosis'])
    return (
        f'That distances of queries to keys have heavier tails than a Gaussian '
        f'{verdict([is_heavy(row) for row in peers])}: '
        f'{sum(map(is_heavy, peers))} of {len(peers)} distributions of L1 and L2 distances do '
        f'(criterion: excess kurtosis above {HEAVY:g} and a Hill tail index, largest '
        f'{TAIL:.0%}, below the Gaussian\'s {expected_hill_index(stats.norm):.2f}; Laplace 3 '
        f'and {expected_hill_index(stats.laplace):.2f}); that a Laplace distribution fits them '
        f'better than a Gaussian {verdict([is_laplace(row) for row in peers])}: by likelihood it '
        f'does for {sum(map(is_laplace, peers))}. By layer, {". ".join(parts)}. The heaviest is '
        f'the {largest["quantity"]} in {largest["layer"]} of {largest["model"]}, excess kurtosis '
        f'{largest["excess_kurtosis"]:.2f} and tail index {largest["hill_index"]:.2f}. Models: '
        f'{"; ".join(sources)} (images of distant_parts.py, chance '
        f'{1 / COLOURS:.3f}). Pairs of one image and head, heads standardised.')


def draw(rows: Sequence[dict]) -> Figure:
    """Histograms of L1 distances, kurtosis, tail index and fits, a column a model."""
    figure, axes = plt.subplots(4, len(PEERS), figsize=(14, 12), sharey='row')
    middles = (_EDGES[:-1] + _EDGES[1:]) / 2
    x = np.linspace(_EDGES[0], _EDGES[-1], 200)
    gaussian_tail, laplace_tail = map(expected_hill_index, (stats.norm, stats.laplace))
    for (name, peer), column in zip(PEERS.items(), axes.T, strict=True):
        mine = [row for row in rows if row['model'] == name]
        distances = [row for row in mine if row['quantity'] == L1]
        for row, color in zip(distances, plt.cm.viridis(np.linspace(0, .9, len(distances))),
                              strict=True):
            density = [row[f'density at {middle:g}'] or math.nan for middle in middles]
            column[0].plot(middles, density, '.-', color=color, lw=1, ms=4,
                           label=f'layer {row["depth"]}')
        column[0].plot(x, stats.norm.pdf(x), 'k', label='Gaussian')
        column[0].plot(x, stats.laplace.pdf(x, scale=2**-.5), 'k--', label='Laplace')
        column[0].set(title=f'{peer.title.partition("-")[0]}\n{distances[0]["weights"]}',
                      yscale='log', ylim=(1e-5, 2), xlabel=f'{L1}, standardised')
        column[0].legend(fontsize=6, ncol=2, loc='upper right')
        for quantity, style in zip(QUANTITIES, ('o-', 's--', '^:'), strict=True):
            layers = [row for row in mine if row['quantity'] == quantity]
            depth = [row['depth'] for row in layers]
            values = [[row['excess_kurtosis'] for row in layers],
                      [row['hill_index'] for row in layers],
                      [row['laplace_fit'] - row['gaussian_fit'] for row in layers]]
            for ax, ys in zip(column[1:], values, strict=True):
                ax.plot(depth, ys, style, label=quantity)
        marks = ((0, 3), (gaussian_tail, laplace_tail), (0, None))
        for ax, (gaussian, laplace) in zip(column[1:], marks, strict=True):
            ax.axhline(gaussian, color='k', lw=1)
            if laplace is not None:
                ax.axhline(laplace, color='k', lw=1, ls='--')
            ax.set_xlabel('layer')
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        for ax in column:
            ax.grid(alpha=.3)
    axes[0, 0].set_ylabel('density')
    axes[1, 0].set_ylabel('excess kurtosis')
    axes[2, 0].set_ylabel(f'Hill tail index, largest {TAIL:.0%}\n(smaller is heavier)')
    axes[3, 0].set_ylabel('log-likelihood, Laplace\nless Gaussian, nats a pair')
    axes[1, 0].legend(fontsize=8)
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The photograph and the weights."""
    add_image_argument(parser)
    parser.add_argument(
        '--weights', nargs='+', default=[], metavar='NAME=FILE',
        help='pretrained weights; such a model looks at the photograph. Names: ' + ', '.join(
            f'{name} ({peer.title})' for name, peer in PEERS.items())
        + ' (default: a small model of each kind is trained here for a minute)')


CLAIM = Claim('qk_distances',
              'Distances between queries and keys have heavy tails: a Laplace distribution fits '
              'them better than a Gaussian.', measure, add_arguments)

if __name__ == '__main__':
    sys.exit(CLAIM.run())
