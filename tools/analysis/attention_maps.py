"""What a few tokens of a photograph attend to: Laplacian, Gaussian and softmax side by side.

::

    python tools/analysis/attention_maps.py --out work_dirs/claims

The models are trained here for some hundred steps on images whose distant parts must be matched
(``distant_parts.py``), where it is known which region a token must find.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import distant_parts
import torch
import torch.nn.functional as F
from activations import AttentionInputs, attention_inputs
from claim import Claim, Finding, plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from photograph import add_image_argument, square_photograph
from recall_task import REGIONS, enlarged, layout
from short_training import train
from softmax_attention import ATTENTIONS, set_attention
from torch import Tensor
from training_runs import CHANCE
from verdict import verdict

from mmlaplacian.ops import gaussian_kernel, laplacian_kernel
from mmlaplacian.ops.nystrom_attention.reference import attention_map

KERNELS = {'laplacian': laplacian_kernel, 'gaussian': gaussian_kernel}
SHOWN = ('laplacian', 'gaussian', 'softmax')
KERNEL_SCALE, RIDGE, WHITEN_EPS = 4.0, 1e-2, 1e-5
STEPS, FAST_STEPS = 300, 2
# Of the photograph; the map of the second stage has an eighth of it.
SIDE, FAST_SIDE = 256, 64
# Row and column of the tokens that are shown, as shares of the map.
TOKENS = ((.30, .45), (.15, .15), (.80, .30))
HELD_OUT, FAST_HELD_OUT = 32, 4
# Share of the mass on the region to be found when the mass is spread evenly.
EVEN = 1 / REGIONS**2
# Attention is learned if it leaves at most this share of the errors that are made without it.
LEARNED = .75


def trained(attention: str, options: argparse.Namespace) -> tuple[torch.nn.Module, float]:
    """Trains the narrow pyramid with one attention; its accuracy is on held-out images."""
    model, curve = train(
        lambda: set_attention(distant_parts.DistantPartsModel(), attention), distant_parts.batch,
        steps=FAST_STEPS if options.fast else STEPS, batch_size=4 if options.fast else 16,
        validation=4 if options.fast else 64, looks=1, seed=options.seed, progress=attention)
    return model, curve.accuracy[-1]


def similarity(inputs: AttentionInputs, attention: str) -> Tensor:
    """What a token attends to before any normalisation over queries, ``(B, h, N, N)``.

    G = C_q W^-1 C_k^T for the kernels; the rows of the softmax.

    Args:
        inputs: Of a layer.
        attention: One of :data:`SHOWN`.
    """
    if attention == 'softmax':
        return (inputs.q * inputs.q.shape[-1]**-0.5 @ inputs.k.mT).softmax(-1)
    c_q, c_k, w = (KERNELS[attention](x, inputs.landmarks, KERNEL_SCALE)
                   for x in (inputs.q, inputs.k, inputs.landmarks))
    w = w + RIDGE * torch.eye(w.shape[-1])
    return c_q @ torch.linalg.solve(w, c_k.mT)


def rows_of(similarity: Tensor) -> Tensor:
    """Each row's positive part with sum 1, mean over the heads, ``(B, N, N)``."""
    positive = similarity.clamp_min(0)
    return (positive / positive.sum(-1, keepdim=True).clamp_min(1e-12)).mean(1)


def tokens_attended(rows: Tensor) -> float:
    """exp of the mean entropy of rows ``(B, N, N)``: to how many tokens as if evenly."""
    return torch.special.entr(rows).sum(-1).mean().exp().item()


def share_found(rows: Tensor, count: int, seed: int) -> float:
    """Mean share of a token's mass on the region that holds its answer.

    Args:
        rows: ``(count, N, N)`` of the images that :func:`held_out` draws, rows of sum 1.
        count: Images.
        seed: Of the images.
    """
    types, _, carriers = layout(count, torch.Generator().manual_seed(seed))
    side = round(rows.shape[-1]**.5)
    regions = torch.arange(REGIONS**2).expand(count, -1)
    wanted = enlarged(carriers.gather(1, types), side).flatten(1)
    hit = wanted[:, :, None] == enlarged(regions, side).flatten(1)[:, None]
    return (rows * hit).sum(-1).mean().item()


def held_out(count: int, seed: int) -> Tensor:
    """Images ``(count, 3, 128, 128)`` that no training has seen."""
    images, _ = distant_parts.batch(count, torch.Generator().manual_seed(seed))
    return images


def layer_rows(model: torch.nn.Module, attention: str, images: Tensor,
               seed: int) -> list[dict[str, object]]:
    """How much of the mass of each layer's maps lies on the region to be found.

    Args:
        model: Trained.
        attention: One of :data:`SHOWN`.
        images: Of :func:`held_out`.
        seed: Of the images.
    """
    rows = []
    for inputs in attention_inputs(model, images):
        g = similarity(inputs, attention)
        z = g if attention == 'softmax' else attention_map(g, WHITEN_EPS, 'whiten')
        rows.append({'attention': attention, 'layer': inputs.layer,
                     'share_of_g': share_found(rows_of(g), len(images), seed),
                     'share_of_map': share_found(rows_of(z), len(images), seed)})
    return rows


def measure(options: argparse.Namespace) -> Finding:
    """Trains, and looks at the layer of each model that finds the region best."""
    # The trainings draw from the seed itself.
    seed = options.seed + 1_000_003
    photograph = square_photograph(options.image, FAST_SIDE if options.fast else SIDE)
    images = held_out(FAST_HELD_OUT if options.fast else HELD_OUT, seed)
    rows, maps = [], {}
    for attention in ATTENTIONS:
        model, accuracy = trained(attention, options)
        if attention not in SHOWN:
            rows.append(dict.fromkeys(rows[0], '') | {'attention': attention,
                                                      'accuracy': accuracy})
            continue
        # As the training images: 0 to 1, less 0.5.
        seen = attention_inputs(model, photograph - .5)
        of_photograph = [rows_of(similarity(inputs, attention)) for inputs in seen]
        found = layer_rows(model, attention, images, seed)
        best = max(range(len(found)), key=lambda index: found[index]['share_of_map'])
        maps[attention] = of_photograph[best][0].unflatten(1, seen[best].grid)
        rows += [{**row, 'accuracy': accuracy, 'shown': index == best,
                  'tokens': inputs.q.shape[2], 'tokens_attended': tokens_attended(attended)}
                 for index, (row, inputs, attended) in enumerate(
                     zip(found, seen, of_photograph, strict=True))]
    return Finding(rows, draw(photograph[0], maps, rows),
                   describe(rows, options.image, FAST_STEPS if options.fast else STEPS))


def describe(rows: Sequence[Mapping[str, object]], image: Path, steps: int) -> str:
    """The result in words.

    Args:
        rows: Of the CSV file.
        image: The photograph.
        steps: Of each training.
    """
    by_name = {row['attention']: row for row in rows if row['shown'] in (True, '')}
    laplacian, gaussian, control = (by_name[name] for name in ('laplacian', 'gaussian', 'none'))
    held = [laplacian['share_of_map'] > 2 * EVEN,
            laplacian['share_of_map'] > gaussian['share_of_map']]
    each = '; '.join(
        f'{name} {row["accuracy"]:.3f}, {row["share_of_map"]:.3f}, {row["share_of_g"]:.3f} and '
        f'{row["tokens_attended"]:.0f} of {row["tokens"]} ({row["layer"]})'
        for name, row in by_name.items() if name in SHOWN)
    return (
        f'That the Laplacian attention finds distant parts, and better than the Gaussian, '
        f'{verdict(held)}: the share of its mass on the region that holds a token\'s answer must '
        f'be more than twice that of an even spread ({EVEN:.3f}), and more than that of the '
        f'Gaussian. Accuracy; share of the positive part of the map that the model uses, and of '
        f'G (of the softmax), on that region; and the number of tokens that a token of the '
        f'photograph attends to (exp of the entropy of its row of G): {each}. Without attention '
        f'the same model reaches {control["accuracy"]:.3f} (chance {CHANCE:.3f})'
        + ('. ' if 1 - laplacian['accuracy'] < LEARNED * (1 - control['accuracy']) else
           ', so attention has not been learned in this run, and the shares prove nothing. ')
        + f'Each model is a narrow pyramid of two stages, trained once, for {steps} steps, on '
        f'images whose distant parts must be matched; shown is the layer with the largest share, '
        f'mean over its heads. {image.name} is not of the kind that they were trained on: its '
        'overlays are pictures and no evidence.')


def _overlay(axes: Axes, photograph: Tensor, row: Tensor, token: tuple[int, int],
             grid: Sequence[int]) -> None:
    side = photograph.shape[-1]
    axes.imshow(photograph.mean(0).numpy(), cmap='gray', vmin=0, vmax=1)
    large = F.interpolate(row[None, None], (side, side), mode='bilinear')[0, 0]
    axes.imshow((large / large.max()).numpy(), cmap='inferno', vmin=0, vmax=1, alpha=.6)
    axes.plot((token[1] + .5) * side / grid[1] - .5, (token[0] + .5) * side / grid[0] - .5, 'o',
              mfc='none', mec='cyan', mew=2, ms=10)


def draw(photograph: Tensor, maps: Mapping[str, Tensor],
         rows: Sequence[Mapping[str, object]]) -> Figure:
    """A line for each token, a column for each attention.

    Args:
        photograph: ``(3, side, side)`` from 0 to 1.
        maps: Rows of each attention, ``(N, H, W)``.
        rows: Of the CSV file.
    """
    figure, panels = plt.subplots(len(TOKENS), 1 + len(maps), figsize=(11, 8.6))
    shown = {row['attention']: row for row in rows if row['shown'] is True}
    for number, (line, (down, right)) in enumerate(zip(panels, TOKENS, strict=True)):
        line[0].imshow(photograph.permute(1, 2, 0).numpy())
        for axes, (name, found) in zip(line[1:], maps.items(), strict=True):
            grid = found.shape[1:]
            token = int(down * grid[0]), int(right * grid[1])
            _overlay(axes, photograph, found[token[0] * grid[1] + token[1]], token, grid)
            if number == 0:
                what = 'row of the softmax' if name == 'softmax' else 'row of G'
                axes.set_title(f'{name}: {what}\n{shown[name]["layer"]}', fontsize=9)
        side = photograph.shape[-1]
        line[0].plot((token[1] + .5) * side / grid[1] - .5, (token[0] + .5) * side / grid[0] - .5,
                     'o', mfc='none', mec='cyan', mew=2, ms=10)
    for axes in panels.flat:
        axes.set_axis_off()
    panels[0, 0].set_title('photograph and token', fontsize=9)
    figure.suptitle('What a token attends to, mean over heads; brightest = largest of the row',
                    fontsize=10)
    return figure


CLAIM = Claim('attention_maps', 'Tokens attend to distant parts that match.', measure,
              add_image_argument)

if __name__ == '__main__':
    sys.exit(CLAIM.run())
