"""The tiny backbone eager, compiled and in onnxruntime: file, memory, latency, AP of int8.

::

    python benchmarks/deploy.py CONFIG CHECKPOINT --out deploy.json

Dynamic int8: weights of the linear layers are int8, their inputs are quantised at every call;
convolutions and attention stay float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from parts import CPU, ROOT, write
from report import environment, place, table
from runtimes import COMPILED, EAGER, INT8, ONNX, RUNTIMES

SIZES, QUICK_SIZES = ((224, 224), (800, 1344)), ((200, 200), )
THREADS, QUICK_THREADS = (1, 2), (1, )
_QUANTISED = ('MatMul', 'Gemm')


def quantise(file: Path, out: Path) -> None:
    """The file with int8 weights in its linear layers."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    quantize_dynamic(file, out, op_types_to_quantize=list(_QUANTISED), weight_type=QuantType.QInt8)


def write_backbone(folder: Path) -> dict[str, Path]:
    """Writes the untrained tiny backbone for every runtime: one file for all image sizes."""
    from mmlaplacian import LaplacianFormer
    from mmlaplacian.export import onnx_translations

    torch.manual_seed(0)
    model = LaplacianFormer(arch='tiny')
    model.init_weights()
    model.eval()
    weights, file, int8 = (folder / name for name in ('tiny.pth', 'tiny.onnx', 'tiny_int8.onnx'))
    torch.save(model.state_dict(), weights)
    side = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (torch.rand(1, 3, 250, 333), ),
                                  dynamic_shapes=({2: side, 3: side}, ))
    torch.onnx.export(program, dynamo=True, opset_version=18, verbose=False,
                      custom_translation_table=onnx_translations()).save(file)
    quantise(file, int8)
    return {EAGER: weights, COMPILED: weights, ONNX: file, INT8: int8}


def in_new_process(runtime: str, file: Path, size: Sequence[int],
                   threads: int) -> dict[str, float | str | None]:
    """Figures of a runtime in a process of its own, or the reason why there are none."""
    made = subprocess.run(
        [sys.executable, str(ROOT / 'benchmarks' / 'runtimes.py'), runtime, str(file), '--size',
         *map(str, size), '--threads', str(threads)],
        capture_output=True, text=True, check=False)
    if made.returncode:
        last = (made.stderr.strip().splitlines() or [f'status {made.returncode}'])[-1]
        return {'reason': f'fails: {last[:100]}'}
    return json.loads(made.stdout.splitlines()[-1])


def int8_precision(config: str, checkpoint: str, folder: Path) -> dict[str, dict[str, float]]:
    """What mmdet's metric says of a detector's file, and of the same with int8 weights."""
    from onnx_ap import average_precisions, export, load_config

    file, int8 = folder / 'detector.onnx', folder / 'detector_int8.onnx'
    if status := export([config, checkpoint, '--out', str(file)]):
        sys.exit(status)
    quantise(file, int8)
    found = average_precisions(load_config(config), (file, int8), torch.get_num_threads())
    return dict(zip((ONNX, INT8), found, strict=True))


def measure(sizes: Sequence[Sequence[int]], threads: Sequence[int],
            detector: Sequence[str] | None,
            say: Callable[[str], None] = print) -> dict[str, object]:
    """Every runtime at every size and number of threads, ready for JSON.

    Args:
        sizes: Heights and widths.
        threads: Numbers of threads.
        detector: Config and checkpoint whose AP is compared; None for no AP.
        say: Takes a line of progress for each process.
    """
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_backbone(folder)
        for size in sizes:
            for count in threads:
                for runtime in RUNTIMES:
                    say(f'{runtime}, {size[0]} x {size[1]}, threads: {count}')
                    rows.append({'runtime': runtime, 'size': list(size), 'threads': count,
                                 **in_new_process(runtime, files[runtime], size, count)})
        held = {runtime: file.stat().st_size for runtime, file in files.items()}
        precision = int8_precision(*detector, folder) if detector else {}
    return {'environment': environment(CPU, ROOT), 'file_bytes': held, 'rows': rows,
            'precision': precision}


def markdown(record: Mapping[str, object]) -> list[str]:
    """The record as one table, a runtime a row: file, then time and memory, then AP."""
    rows, precision = record['rows'], record['precision']
    columns = list(dict.fromkeys((*row['size'], row['threads']) for row in rows))
    metrics = list(precision.get(ONNX, {}))
    metrics = [key for key in metrics if key.endswith('_mAP')]
    body = []
    for runtime in RUNTIMES:
        cells = {(*row['size'], row['threads']): row for row in rows if row['runtime'] == runtime}
        body.append([runtime, f'{record["file_bytes"][runtime] / 2**20:.1f} MiB',
                     *(_cell(cells.get(column)) for column in columns),
                     *(f'{precision[runtime][key]:.3f}' if runtime in precision else ''
                       for key in metrics)])
    header = ['', 'file', *(f'{height}x{width}, threads: {threads}'
                            for height, width, threads in columns),
              *(f'{key.split("/")[-1].removesuffix("_mAP")} AP' for key in metrics)]
    return [place(record['environment']), '', *table(header, body)]


def _cell(row: Mapping[str, object] | None) -> str:
    if row is None or 'reason' in row:
        return row['reason'].replace('|', '/') if row else ''
    memory = row['process_bytes']
    return f'{row["milliseconds"]:.4g} ms' + (f', {memory / 2**20:.0f} MiB' if memory else '')


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('detector', nargs='*', metavar='CONFIG CHECKPOINT',
                        help='a detector whose AP with int8 weights is measured, over the '
                             "config's validation set (default: no AP)")
    parser.add_argument('--out', type=Path, required=True, metavar='FILE',
                        help='JSON file to write; the table goes beside it, with suffix .md')
    parser.add_argument('--quick', action='store_true', help='one small size, one thread')
    options = parser.parse_args(arguments)
    if len(options.detector) not in (0, 2):
        parser.error('expected CONFIG and CHECKPOINT, or neither, got '
                     f'{len(options.detector)} arguments')
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'argument --out: cannot make its folder: {error}')
    record = measure(QUICK_SIZES if options.quick else SIZES,
                     QUICK_THREADS if options.quick else THREADS, options.detector or None)
    write(record, markdown(record), options.out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
