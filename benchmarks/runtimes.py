"""One runtime in this process: latency of an image, peak memory of the process.

Started by ``deploy.py``. With onnxruntime no torch is loaded, as in a deployed program.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from resident_memory import resident_peak

EAGER, COMPILED, ONNX, INT8 = 'eager', 'compiled', 'onnxruntime', 'onnxruntime, int8 weights'
RUNTIMES = (EAGER, COMPILED, ONNX, INT8)
_WARM_UPS = 2


def prepare(runtime: str, file: Path, image: np.ndarray,
            threads: int) -> Callable[[], Sequence[object]]:
    """A call of a backbone on an image.

    Args:
        runtime: One of :data:`RUNTIMES`.
        file: ONNX file, or the tiny backbone's state dict.
        image: ``(1, 3, H, W)``, float32.
        threads: Of the runtime.

    Returns:
        A function that returns the maps.
    """
    if runtime in (ONNX, INT8):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(file), options,
                                               providers=['CPUExecutionProvider'])
        name = session.get_inputs()[0].name
        return lambda: session.run(None, {name: image})
    import torch

    from mmlaplacian import LaplacianFormer

    torch.set_num_threads(threads)
    model = LaplacianFormer(arch='tiny').eval()
    model.load_state_dict(torch.load(file, weights_only=True))
    function = torch.compile(model) if runtime == COMPILED else model
    x = torch.from_numpy(image)

    def call() -> Sequence[object]:
        with torch.no_grad():
            return function(x)

    return call


def measure(call: Callable[[], object], seconds: float,
            least_repeats: int) -> dict[str, float | None]:
    """Median, fastest and slowest call in ms, their number, and the process's peak in bytes."""
    for _ in range(_WARM_UPS):
        call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least_repeats or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e3)
    return {'milliseconds': median(taken), 'fastest': min(taken), 'slowest': max(taken),
            'repeats': len(taken), 'process_bytes': resident_peak()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('runtime', choices=RUNTIMES)
    parser.add_argument('file', type=Path)
    parser.add_argument('--size', type=int, nargs=2, required=True, metavar='SIDE',
                        help='height and width')
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--seconds', type=float, default=1.)
    parser.add_argument('--least-repeats', type=int, default=5)
    options = parser.parse_args(arguments)
    image = np.random.default_rng(0).standard_normal((1, 3, *options.size)).astype(np.float32)
    call = prepare(options.runtime, options.file, image, options.threads)
    print(json.dumps(measure(call, options.seconds, options.least_repeats)))
    return 0


if __name__ == '__main__':
    sys.exit(main())
