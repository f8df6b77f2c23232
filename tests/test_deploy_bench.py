"""The logic of ``benchmarks/deploy.py``, at tiny sizes: nothing here is a figure."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config

import mmlaplacian

pytest.importorskip('onnxruntime', reason='extra deploy is not installed')
pytest.importorskip('onnxscript', reason='extra deploy is not installed')

BENCHMARKS = Path(__file__).resolve().parents[1] / 'benchmarks'
ARCH = dict(embed_dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4),
            mlp_ratios=(2, 2, 2, 1))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Modules of the folder, as its scripts import them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_all_runtimes_compute_the_same_maps(load, monkeypatch, tmp_path) -> None:
    """Int8 weights change them a little: a file that is not quantised would be equal."""
    deploy, runtimes, build = load('deploy'), load('runtimes'), mmlaplacian.LaplacianFormer
    monkeypatch.setattr(mmlaplacian, 'LaplacianFormer',
                        lambda arch: build(arch={'tiny': ARCH}[arch], out_indices=(0, 1)))
    compiled = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda model: compiled(model, backend='eager'))
    files = deploy.write_backbone(tmp_path)
    assert files[runtimes.INT8].stat().st_size < files[runtimes.ONNX].stat().st_size
    image = np.random.default_rng(0).standard_normal((1, 3, 200, 230)).astype(np.float32)
    expected = None
    for name in runtimes.RUNTIMES:
        maps = [torch.as_tensor(x) for x in runtimes.prepare(name, files[name], image, 1)()]
        expected = expected or maps
        errors = [float((a - b).norm() / b.norm())
                  for a, b in zip(maps, expected, strict=True)]
        assert max(errors) < (.2 if name == runtimes.INT8 else 1e-4)
        assert (max(errors) > 1e-4) == (name == runtimes.INT8)

    # A process without torch, whose last line is read.
    blocked = tmp_path / 'run.py'
    blocked.write_text('import runpy, sys\nsys.modules["torch"] = None\n'
                       f'sys.path.insert(0, {str(BENCHMARKS)!r})\n'
                       f'runpy.run_path({str(BENCHMARKS / "runtimes.py")!r}, run_name="__main__")')
    made = subprocess.run([sys.executable, str(blocked), runtimes.ONNX, str(files[runtimes.ONNX]),
                           '--size', '200', '200', '--seconds', '0', '--least-repeats', '2'],
                          capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    figures = json.loads(made.stdout)
    assert figures['repeats'] == 2
    assert 0 < figures['fastest'] <= figures['milliseconds'] <= figures['slowest']
    # Less than this process with torch, whose peak the other would inherit in getrusage.
    assert 2**24 < figures['process_bytes'] < torch_process_peak()


def torch_process_peak() -> int:
    """Of this process, in bytes."""
    status = Path('/proc/self/status').read_text(encoding='utf-8')
    return int(re.search(r'VmHWM:\s+(\d+) kB', status)[1]) * 1024


def test_warm_up_calls_do_not_count(load, monkeypatch) -> None:
    runtimes, calls = load('runtimes'), []
    # The beginning, start and end of the call that counts, and the end.
    times = iter([0., 1., 1.1, 9.])
    monkeypatch.setattr(runtimes.time, 'perf_counter', lambda: next(times))
    figures = runtimes.measure(lambda: calls.append(1), 0., 1)
    assert figures['repeats'] == 1 and len(calls) == 3
    assert figures['milliseconds'] == pytest.approx(100)


def test_a_runtime_that_fails_says_why(load, tmp_path) -> None:
    deploy, runtimes = load('deploy'), load('runtimes')
    text = tmp_path / 'text.onnx'
    text.write_text('no model')
    assert deploy.in_new_process(runtimes.ONNX, text, (200, 200), 1)['reason'].startswith('fails:')


def test_table(load) -> None:
    deploy, runtimes = load('deploy'), load('runtimes')
    rows = [dict(runtime=name, size=[200, 300], threads=count, milliseconds=10. * i + count,
                 fastest=1., slowest=9., repeats=5, process_bytes=2**20 * i)
            for i, name in enumerate(runtimes.RUNTIMES, 1) for count in (1, 2)]
    rows[3] = dict(runtime=runtimes.COMPILED, size=[200, 300], threads=2, reason='fails: a|b')
    record = dict(
        environment=dict(processor='P', threads=2, date='D', commit=None, torch='T'), rows=rows,
        file_bytes={name: 2**20 * i for i, name in enumerate(runtimes.RUNTIMES, 5)},
        precision={runtimes.ONNX: {'coco/bbox_mAP': .5, 'coco/bbox_mAP_50': .7},
                   runtimes.INT8: {'coco/bbox_mAP': .25, 'coco/bbox_mAP_50': .7}})
    head, _, *body = deploy.markdown(record)[2:]
    assert head == '|  | file | 200x300, threads: 1 | 200x300, threads: 2 | bbox AP |'
    assert body == ['| eager | 5.0 MiB | 11 ms, 1 MiB | 12 ms, 1 MiB |  |',
                    '| compiled | 6.0 MiB | 21 ms, 2 MiB | fails: a/b |  |',
                    '| onnxruntime | 7.0 MiB | 31 ms, 3 MiB | 32 ms, 3 MiB | 0.500 |',
                    '| onnxruntime, int8 weights | 8.0 MiB | 41 ms, 4 MiB | 42 ms, 4 MiB '
                    '| 0.250 |']


def test_compiled_against_eager(load, monkeypatch) -> None:
    """The ratio is of the times; a training step reaches the parameters."""
    compiled, models, made = load('compiled'), load('backbone_models'), []
    build = mmlaplacian.LaplacianFormer

    def small() -> torch.nn.Module:
        made.append(build(arch=ARCH, out_indices=(0, )))
        return made[-1]

    original = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda model: original(model, backend='eager'))
    monkeypatch.setitem(models.BUILDERS, compiled.OWN, small)
    record = compiled.measure(compiled.QUICK, None, 0., say=lambda line: None)
    assert [model.training for model in made] == [False, True]
    assert [next(model.parameters()).grad is not None for model in made] == [False, True]
    for row in record['rows']:
        times = {name: outcome['milliseconds'] for name, outcome in row['outcomes'].items()}
        assert row['ratio'] == pytest.approx(times['compiled'] / times['eager'])
    head, _, *body = compiled.markdown(record)[2:]
    assert head == '|  | images | eager | compiled |'
    assert [line.count(' ms') for line in body] == [2, 2]
    assert compiled.markdown(compiled.measure(compiled.QUICK, 'refused: 1 red tests'))[-1] \
        == 'refused: 1 red tests.'


def test_config_and_checkpoint_come_together(load, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        load('deploy').main(['config.py', '--out', str(tmp_path / 'x.json')])
    assert 'expected CONFIG and CHECKPOINT, or neither, got 1' in capsys.readouterr().err


def test_precision_is_that_of_the_detections(load, monkeypatch, tmp_path) -> None:
    """The objects themselves give AP 1; each at the place of another image's gives 0."""
    onnx_ap = load('onnx_ap')
    images, annotations = [], []
    for number, left in ((3, 0), (7, 30)):
        path = tmp_path / f'{number}.png'
        cv2.imwrite(str(path), np.full((40, 60, 3), number, np.uint8))
        images.append(dict(id=number, file_name=path.name, height=40, width=60))
        annotations.append(dict(
            id=number, image_id=number, category_id=1, bbox=[left, 5, 20, 10], area=200,
            iscrowd=0, segmentation=[[left, 5, left + 20, 5, left + 20, 15, left, 15]]))
    (tmp_path / 'val.json').write_text(json.dumps(dict(
        images=images, annotations=annotations, categories=[dict(id=1, name='nut')])))
    cfg = Config(dict(
        val_dataloader=dict(dataset=dict(
            type='CocoDataset', data_root=str(tmp_path), ann_file='val.json', pipeline=[],
            data_prefix=dict(img=''),
            metainfo=dict(classes=('nut', )))),
        val_evaluator=dict(type='CocoMetric', metric=['bbox', 'segm'],
                           ann_file=str(tmp_path / 'val.json'))))

    class Detector:
        """Finds the object of the image by its grey level, ``file`` apart."""

        def __init__(self, file: str, threads: int) -> None:
            self.shifted = 'shifted' in file

        def __call__(self, image: np.ndarray) -> dict[str, np.ndarray]:
            left = 30 if (image[0, 0, 0] == 7) != self.shifted else 0
            masks = np.zeros((1, 40, 60), bool)
            masks[0, 5:15, left:left + 20] = True
            return dict(boxes=np.array([[left, 5, left + 20, 15]], np.float32), masks=masks,
                        labels=np.zeros(1, np.int64), scores=np.ones(1, np.float32))

    monkeypatch.setattr(onnx_ap, 'Detector', Detector)
    good, bad = onnx_ap.average_precisions(cfg, [Path('good'), Path('shifted')], 1)
    for kind in ('bbox', 'segm'):
        assert good[f'coco/{kind}_mAP'] == pytest.approx(1)
        assert bad[f'coco/{kind}_mAP'] == pytest.approx(0)
