"""Draws the records of ``make bench``.

::

    python benchmarks/plots.py work_dirs/bench --into docs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from backbones import SWEEP

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402  after the choice of a backend without a display
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

_MARKERS = 'osD^vx'


def _place(figure: Figure, record: Mapping[str, object]) -> None:
    """Names the machine under the axes."""
    where = record['environment']
    figure.text(0.5, 0.005, f'{where["processor"]}, threads: {where["threads"]}, '
                f'torch {where["torch"]}, {where["date"][:10]}', ha='center', fontsize=7,
                color='0.35')


def _token_ticks(axes: Axes, tokens: Sequence[int]) -> None:
    """A tick at each measured N, logarithmic."""
    axes.set_xscale('log')
    axes.set_xticks(tokens, [f'{n:,}'.replace(',', ' ') for n in tokens], rotation=35, ha='right')
    axes.set_xlabel('tokens N')
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def scaling(record: Mapping[str, object]) -> Figure:
    """Time and memory over N, with the fitted exponents and a line through a = 1."""
    tokens = [row['n'] for row in record['rows']]
    figure, panels = plt.subplots(1, 2, figsize=(9, 4))
    for axes, key, unit, label in zip(panels, ('milliseconds', 'peak_bytes'), (1, 2**20),
                                      ('time, ms', 'peak memory, MiB'), strict=True):
        values = [row[key] / unit for row in record['rows']]
        axes.plot(tokens, values, 'o-',
                  label=f'measured, a = {record[f"{key}_exponent"]:.3f}')
        axes.plot(tokens, [values[-1] * n / tokens[-1] for n in tokens], '--', color='0.5',
                  label='a = 1')
        axes.set_yscale('log')
        axes.set_ylabel(label)
        _token_ticks(axes, tokens)
        axes.legend(title='N^a')
    figure.suptitle(f'nystrom_attention, {record["mode"]}: h = {record["heads"]}, '
                    f'd = {record["d"]}, M = {record["m"]}')
    return figure


def _lines(axes: Axes, rows: Sequence[Mapping[str, object]], places: Sequence[int]) -> None:
    """A line for each contestant through its outcomes, with the spread of the repeats."""
    for name, marker in zip(rows[0]['outcomes'], _MARKERS, strict=False):
        found = [(place, row['outcomes'][name]) for place, row in zip(places, rows, strict=True)
                 if 'reason' not in row['outcomes'][name]]
        if not found:
            continue
        places_of, outcomes = zip(*found, strict=True)
        medians = [outcome['milliseconds'] for outcome in outcomes]
        spread = [[abs(outcome[key] - outcome['milliseconds']) for outcome in outcomes]
                  for key in ('fastest', 'slowest')]
        axes.errorbar(places_of, medians, spread, marker=marker, markersize=5, capsize=2,
                      label=name)
    axes.set_yscale('log')
    axes.set_ylabel('time, ms')


def sequence_length(record: Mapping[str, object]) -> Figure:
    """Time over N of every attention core in one body."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    tokens = [row['n'] for row in record['rows']]
    _lines(axes, record['rows'], tokens)
    _token_ticks(axes, tokens)
    axes.set_title(f'Inference: {record["layers"]} layers, width {record["width"]}, '
                   f'{record["heads"]} heads, M = {record["m"]}, batch 1', fontsize=10)
    axes.legend()
    return figure


def resolution(record: Mapping[str, object]) -> Figure:
    """Time and GMACs of whole backbones over the image size."""
    rows = sorted((row for row in record['rows'] if row['kind'] == SWEEP),
                  key=lambda row: row['shape'][2] * row['shape'][3])
    # One step an image: 1024 x 1024 and 800 x 1280 have nearly as many pixels.
    places = range(len(rows))
    labels = ['{} x {}'.format(*row['shape'][2:]) for row in rows]
    figure, (times, counts) = plt.subplots(1, 2, figsize=(9, 4.3))
    _lines(times, rows, places)
    for name, marker in zip(rows[0]['gmacs'], _MARKERS, strict=False):
        counts.plot(places, [row['gmacs'][name] for row in rows], marker=marker, markersize=5,
                    label=name)
    counts.set_yscale('log')
    counts.set_ylabel('GMACs, attention included')
    for axes in (times, counts):
        axes.set_xlabel('image')
        axes.set_xticks(places, labels, rotation=35, ha='right')
        axes.grid(alpha=0.3)
    times.legend()
    figure.suptitle('Inference of whole backbones, batch 1')
    return figure


PLOTS = {'scaling': (scaling, 'scaling'), 'sequence_length': (sequence_length, 'sequence_length'),
         'resolution': (resolution, 'backbones')}


def draw(records: Path, into: Path) -> list[Path]:
    """Writes a PNG for every record that is there and not refused.

    Args:
        records: Folder of JSON files.
        into: Folder for the images.

    Returns:
        The images.
    """
    into.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (plot, part) in PLOTS.items():
        file = records / f'{part}.json'
        record = json.loads(file.read_text(encoding='utf-8')) if file.exists() else {}
        if not record.get('rows'):
            continue
        figure = plot(record)
        _place(figure, record)
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        written.append(into / f'{name}.png')
        figure.savefig(written[-1], dpi=110)
        plt.close(figure)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws what is there; 2 where nothing is."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('records', type=Path, metavar='FOLDER', help='JSON files of the parts')
    parser.add_argument('--into', type=Path, metavar='FOLDER',
                        help='folder for the images (default: beside the records)')
    options = parser.parse_args(arguments)
    written = draw(options.records, options.into or options.records)
    if not written:
        print(f'{options.records} holds no record to draw: '
              f'{", ".join(f"{part}.json" for _, part in PLOTS.values())}.', file=sys.stderr)
        return 2
    print('\n'.join(map(str, written)))
    return 0


if __name__ == '__main__':
    sys.exit(main())
