"""Runs the tiny backbone once over a photograph, in a process whose peak is of nothing else.

::

    python tools/analysis/backbone_pass.py FILE --side 1024

It prints one line of JSON: ``seconds`` of the pass, ``before_bytes`` and ``peak_bytes``, the
largest resident set of the process before the pass and after it, and ``shapes`` of the maps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from photograph import normalized, square_photograph

# isort: split
# The photograph's claim has put the folder of this on the path.
from resident_memory import resident_peak

from mmlaplacian import LaplacianFormer


def main() -> None:
    """Runs the pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('image', type=Path, metavar='FILE', help='photograph')
    parser.add_argument('--side', type=int, required=True, metavar='PIXELS',
                        help='side of the square image')
    parser.add_argument('--seed', type=int, default=0, metavar='N',
                        help='seed of the weights (default: 0)')
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = LaplacianFormer('tiny').eval()
    model.init_weights()
    image = normalized(square_photograph(options.image, options.side))
    with torch.inference_mode():
        # Loads and compiles what the first call of all needs.
        model(torch.zeros(1, 3, 64, 64))
        before = resident_peak()
        start = time.perf_counter()
        maps = model(image)
    seconds = time.perf_counter() - start
    if not all(x.isfinite().all() for x in maps):
        sys.exit('the maps are not finite')
    print(json.dumps({'seconds': seconds, 'before_bytes': before, 'peak_bytes': resident_peak(),
                      'shapes': [list(x.shape) for x in maps]}))


if __name__ == '__main__':
    main()
