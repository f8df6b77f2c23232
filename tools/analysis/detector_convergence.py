"""A detector with the Laplacian kernel, the Gaussian kernel, softmax and no attention.

``configs/demo/retinanet_distant_parts.py``, about a minute and a half a run on one core::

    python tools/analysis/detector_convergence.py --out work_dirs/claims

Data and work dirs lie in OUT/detector; a finished run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# isort: split
import pretraining_table
from claim import REPO, Claim, Finding, UserError, plt
from convergence import NAMES, verdict
from distant_parts_set import write_set
from short_training import Curve
from softmax_attention import ATTENTIONS
from tqdm import tqdm
from training_runs import Run, add_run_arguments, curve_rows, draw_band

CONFIG = REPO / 'configs/demo/retinanet_distant_parts.py'
AP = 'coco/bbox_mAP'
# Images of training and validation.
SIZES, FAST_SIZES = (2400, 80), (16, 2)
_CONFIG_TEXT = '''_base_ = {base!r}
custom_imports = dict(imports=['mmlaplacian', 'attention_hook'])
custom_hooks = [dict(type='SetAttentionHook', attention={attention!r})]
'''


def measure(options: argparse.Namespace) -> Finding:
    """Trains and draws."""
    for name in ('runs', 'jobs'):
        if getattr(options, name) < 1:
            raise UserError(f'--{name} must be at least 1, got {getattr(options, name)}')
    runs = all_runs(options)
    figure, (loss, accuracy) = plt.subplots(1, 2, figsize=(9, 4))
    for label, group in runs.items():
        draw_band(loss, group, 'loss', label)
        draw_band(accuracy, group, 'accuracy', label, marker='o', markersize=3)
    loss.set_ylabel('loss, training')
    loss.legend(fontsize=8)
    accuracy.set_ylabel('box AP, held out')
    accuracy.set_ylim(0, 1)
    figure.suptitle(f'RetinaNet on distant parts: mean and range over {options.runs} seeds')
    return Finding(curve_rows(runs, options.seed), figure,
                   verdict('RetinaNet, distant parts', runs, 'box AP'))


def all_runs(options: argparse.Namespace) -> dict[str, list[Run]]:
    """Trains every attention with every seed, but for those that ``--out`` has already.

    Args:
        options: As in :func:`training_runs.all_runs`.

    Returns:
        The runs of each attention, seed by seed; the curve has a look an epoch, and its accuracy
        is the box AP.
    """
    folder = options.out.resolve() / ('detector-fast' if options.fast else 'detector')
    sizes = FAST_SIZES if options.fast else SIZES
    data = folder / 'data-{}-{}'.format(*sizes)
    write_set(data, *sizes, seed=0)
    # Each training has one core, and finds attention_hook.
    os.environ.update(OMP_NUM_THREADS='1', PYTHONPATH=str(Path(__file__).parent))
    seeds = range(options.seed, options.seed + options.runs)
    trainings = {(attention, seed): training(folder, attention, seed, data, options.fast)
                 for seed in seeds for attention in ATTENTIONS}
    with ThreadPoolExecutor(options.jobs) as pool:
        list(tqdm(pool.map(lambda run: run.result(), trainings.values()), desc='trainings',
                  total=len(trainings)))
    return {NAMES[attention]: [Run(curve(trainings[attention, seed].work_dir), [])
                               for seed in seeds] for attention in ATTENTIONS}


def training(folder: Path, attention: str, seed: int, data: Path,
             fast: bool) -> pretraining_table.Run:
    """A training of the detector; writes the config that names its attention."""
    config = folder / f'{attention}.py'
    config.write_text(_CONFIG_TEXT.format(base=str(CONFIG), attention=attention),
                      encoding='utf-8')
    options = [f'randomness.seed={seed}', f'train_dataloader.dataset.data_root={data}',
               f'val_dataloader.dataset.data_root={data}',
               f'val_evaluator.ann_file={data}/annotations/val.json']
    if fast:
        options += ['train_cfg.max_epochs=1', 'default_hooks.logger.interval=1']
    return pretraining_table.Run(folder / f'{attention}-{seed}', config, tuple(options), (AP, ))


def curve(work_dir: Path) -> Curve:
    """Mean of the logged losses, and box AP, of each epoch of a training."""
    curve, losses, step = Curve([], [], []), [], 0
    file, = work_dir.glob('*/vis_data/scalars.json')
    for line in file.read_text(encoding='utf-8').splitlines():
        values = json.loads(line)
        if AP in values:
            curve.steps.append(step)
            curve.loss.append(statistics.mean(losses))
            curve.accuracy.append(values[AP])
            losses.clear()
        else:
            losses.append(values['loss'])
            step = values['iter']
    return curve


CLAIM = Claim('detector_convergence',
              'A detector converges faster and to a better result with the Laplacian kernel than '
              'with the Gaussian.', measure, add_run_arguments)


if __name__ == '__main__':
    sys.exit(CLAIM.run())
