"""The benchmarks' own code, run on the CPU at tiny sizes: nothing here is a figure."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / 'benchmarks'
CPU = torch.device('cpu')
ATTENTION_PEERS = {'unfused kernels', 'torch.cdist + exp', 'compiled broadcast', 'SDPA, N x N',
                   'SDPA, N x M'}
OPS = ('laplacian_kernel', 'newton_schulz_inverse', 'nystrom_attention')


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Modules of the folder, as its scripts import them; the C++ compiler is spared."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    original = torch.compile
    monkeypatch.setattr(torch, 'compile',
                        lambda function, **options: original(
                            function, **{'backend': 'aot_eager', **options}))
    return importlib.import_module


def tiny_cases(op_cases: ModuleType) -> list[object]:
    """Each op, pass and dtype of the benchmark."""
    kept = {(case.op, case.mode, case.dtype): case for case in op_cases.cases(quick=True)}
    return [op_cases.Case(case.op, case.mode, 2, min(case.n, 12), min(case.d, 4), case.dtype, m=5)
            for case in kept.values()]


def test_every_figure_of_a_record(load, tmp_path: Path) -> None:
    op_cases, gpu_ops = load('op_cases'), load('gpu_ops')
    chosen, lines = tiny_cases(op_cases), []
    assert len(chosen) == 10
    record = gpu_ops.measure(chosen, {}, CPU, seconds=60, say=lines.append)
    gpu_ops.write(record, gpu_ops.markdown(record), tmp_path / 'new' / 'figures.json')

    stored = json.loads((tmp_path / 'new' / 'figures.json').read_text())
    assert stored == record and stored['red_tests'] == []
    assert stored['environment']['device'] == 'CPU'
    assert stored['environment']['torch'] == torch.__version__
    peers = dict(zip(OPS, [{'torch.cdist + exp', 'compiled broadcast'}, {'torch.linalg.inv'},
                           ATTENTION_PEERS], strict=True))
    for case, row, line in zip(chosen, stored['rows'], lines, strict=True):
        assert set(row['outcomes']) == {'mmlaplacian', *peers[case.op]}
        assert all(outcome['milliseconds'] > 0 and outcome['repeats'] >= 3
                   for outcome in row['outcomes'].values())
        own = row['outcomes']['mmlaplacian']['milliseconds']
        for name, ratio in row['speedup'].items():
            assert ratio == pytest.approx(row['outcomes'][name]['milliseconds'] / own)
        if (case.op, case.mode) == ('laplacian_kernel', 'forward'):
            assert row['elements_per_s'] == pytest.approx(2 * 12 * 5 * 4 / (own * 1e-3))
        assert case.op in line and ' ms' in line

    table = (tmp_path / 'new' / 'figures.md').read_text()
    assert [line for line in table.splitlines() if line.startswith('###')] \
        == [f'### {op}' for op in ('newton_schulz_inverse', 'laplacian_kernel',
                                   'nystrom_attention')]
    body = [line for line in table.splitlines() if line.startswith('| 2 |')]
    assert len(body) == len(chosen) and all(line.count(' ms') >= 2 for line in body)
    widths = {line.count('|') for line in table.split('###')[2].splitlines() if '|' in line}
    assert len(widths) == 1


def test_peers_compute_what_the_op_computes(load) -> None:
    op_cases = load('op_cases')
    for case in tiny_cases(op_cases):
        if case.mode == 'forward':
            inputs = op_cases.inputs(case, CPU)
            expected, *others = [f(*inputs) for name, f in op_cases._contestants(case.op).items()
                                 if not name.startswith('SDPA')]
            assert len(others) >= 1
            for other in others:
                assert other.dtype == expected.dtype
                torch.testing.assert_close(other, expected, rtol=2e-2, atol=1e-3)


def test_softmax_over_landmarks(load) -> None:
    """A landmark for each token is softmax attention."""
    op_cases = load('op_cases')
    q, k, v = torch.randn(3, 2, 1, 12, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(op_cases.landmark_softmax(q, k, v, k),
                               op_cases.softmax_attention(q, k, v, k))
    assert op_cases.landmark_softmax(q, k, v, k[:, :, :5]).shape == v.shape


def test_unfused_kernels_serve_in_forward_and_backward(load, monkeypatch) -> None:
    from mmlaplacian.ops.nystrom_attention import cupy_impl

    op_cases, seen = load('op_cases'), []
    original = cupy_impl.serves

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q: torch.Tensor) -> torch.Tensor:
            seen.append(cupy_impl.serves is original)
            return q * 2

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            seen.append(cupy_impl.serves is original or cupy_impl.serves(None, None, 'whiten'))
            return grad * 2

    monkeypatch.setattr(op_cases, 'attention', lambda q, k, v, landmarks: Noted.apply(q))
    case = op_cases.Case('nystrom_attention', 'forward + backward', 2, 12, 4, torch.float32, m=5)
    calls = op_cases.functions(case, CPU)
    calls['unfused kernels']()
    calls['mmlaplacian']()
    assert seen == [False, False, True, True] and cupy_impl.serves is original


def test_compiled_peer_has_one_variant_for_each_head_dim(load, monkeypatch) -> None:
    """Not one for each number of tokens, nor one with a symbolic head dim."""
    op_cases, graphs = load('op_cases'), []

    def backend(graph, inputs):
        graphs.append([x.shape for x in inputs if isinstance(x, torch.Tensor)])
        return graph

    compiled = torch.compile(op_cases.broadcast, backend=backend, fullgraph=True)
    monkeypatch.setattr(op_cases, '_compiled_broadcast', lambda: compiled)
    torch.compiler.reset()
    with op_cases.compile_settings():
        for d in (4, 6):
            for groups, n in ((2, 12), (3, 20), (5, 7)):
                case = op_cases.Case('laplacian_kernel', 'forward', groups, n, d, torch.float32,
                                     m=5)
                op_cases.functions(case, CPU)[op_cases.BROADCAST]()
    torch.compiler.reset()
    assert [q[-1] for q, _ in graphs] == [4, 6]


def test_timer_takes_turns_and_survives_peers_that_fail(load) -> None:
    timing, calls = load('timing'), []

    def fail(error: Exception) -> None:
        raise error

    outcomes = timing.time_in_turn(
        {'a': lambda: calls.append('a'),
         'large': lambda: fail(torch.OutOfMemoryError('CUDA out of memory')),
         'wide': lambda: fail(RuntimeError('\nCUDA error: invalid configuration\nmore')),
         'b': lambda: calls.append('b')}, CPU, most_repeats=4)
    assert list(outcomes) == ['a', 'large', 'wide', 'b']
    assert outcomes['large'] == timing.NotTimed('out of memory')
    assert outcomes['wide'] == timing.NotTimed('fails: CUDA error: invalid configuration')
    assert calls == ['a'] * 2 + ['b'] * 2 + ['a', 'b'] * 4
    assert outcomes['a'].repeats == 4 and outcomes['a'].peak_bytes is None


def test_slow_functions_get_fewer_repeats_and_the_median_counts(load, monkeypatch) -> None:
    timing = load('timing')
    # The last warm-up, then the three that fit least.
    durations = iter([60.0, 70.0, 10.0, 50.0])
    monkeypatch.setattr(timing, 'time_call', lambda function, device: next(durations))
    slow = timing.time_in_turn({'slow': lambda: None}, CPU)['slow']
    assert slow == timing.Timing(50.0, 10.0, 70.0, 3, None)


def test_what_would_take_too_long_is_not_run(load, monkeypatch) -> None:
    op_cases, gpu_ops, timing = load('op_cases'), load('gpu_ops'), load('timing')
    called = []

    def pretend(contestants, device):
        called.append(set(contestants))
        return {name: timing.Timing(100.0, 99.0, 101.0, 3, None) for name in contestants}

    monkeypatch.setattr(gpu_ops, 'time_in_turn', pretend)
    chosen = [op_cases.Case('nystrom_attention', 'forward', 1, n, 4, torch.float32, m=2)
              for n in (4, 8, 16)]
    rows = gpu_ops.measure(chosen, {}, CPU, 60, say=lambda line: None)['rows']
    # 100 ms at 4 tokens are 400 at 8, and again 100 there are 400 at 16: all allowed.
    everyone = {'mmlaplacian', *ATTENTION_PEERS}
    assert called == [everyone] * 3
    chosen[1:] = [op_cases.Case('nystrom_attention', 'forward', 1, 16, 4, torch.float32, m=2)]
    called.clear()
    rows = gpu_ops.measure(chosen, {}, CPU, 60, say=lambda line: None)['rows']
    assert called == [everyone, everyone - {'SDPA, N x N'}]
    assert rows[1]['outcomes']['SDPA, N x N'] == {'reason': 'not run: over 1 s expected'}


def test_red_tests_refuse_their_op_and_what_is_built_on_it(load, tmp_path: Path) -> None:
    """Through a real results file: the names are pytest's."""
    red_tests = load('red_tests')
    (tmp_path / 'test_gpu.py').write_text(
        'import pytest\n'
        "@pytest.mark.parametrize('name', ['newton_schulz_inverse', 'laplacian_kernel'])\n"
        'def test_graph(name):\n'
        "    assert name == 'laplacian_kernel'\n"
        'def test_skipped():\n'
        "    pytest.skip('no second device')\n")
    results = tmp_path / 'results.xml'
    subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', tmp_path,
                    f'--junitxml={results}'], cwd=tmp_path, check=False, timeout=120,
                   stdout=subprocess.DEVNULL)
    red = red_tests.red_tests(results)
    assert len(red) == 1 and 'test_graph[newton_schulz_inverse]' in red[0]
    assert red_tests.refused_ops(red) == {'newton_schulz_inverse': red, 'nystrom_attention': red}
    assert set(red_tests.refused_ops(['tests.ops.test_fork_workers.test_b26'])) == set(OPS)
    assert set(red_tests.refused_ops(['tests.ops.test_gpu_sizes.test_b16'])) \
        == {'laplacian_kernel', 'nystrom_attention'}
    assert red_tests.refused_ops([]) == {}


def test_results_without_a_test_that_ran_are_refused(load, tmp_path: Path) -> None:
    results = tmp_path / 'results.xml'
    results.write_text('<testsuites><testsuite><testcase classname="a" name="b"><skipped/>'
                       '</testcase></testsuite></testsuites>')
    with pytest.raises(ValueError, match='holds no test that ran'):
        load('red_tests').red_tests(results)


def test_refused_and_late_cases_have_no_figures(load) -> None:
    op_cases, gpu_ops = load('op_cases'), load('gpu_ops')
    record = gpu_ops.measure(tiny_cases(op_cases), {'laplacian_kernel': ['red']}, CPU, seconds=-1,
                             say=lambda line: None)
    assert record['red_tests'] == ['red']
    for row in record['rows']:
        reason = 'refused: 1 red tests' if row['op'] == 'laplacian_kernel' else 'not run: after'
        assert row['outcomes']['mmlaplacian']['reason'].startswith(reason)
        assert 'speedup' not in row and 'elements_per_s' not in row


@pytest.mark.parametrize('processors, capability, clock_khz, floor', [
    (132, (9, 0), 1_980_000, 1.67e13), (108, (8, 0), 1_410_000, 4.87e12),
    (100, (3, 5), 1_000_000, None)], ids=['H200', 'A100', 'unknown'])
def test_floor_of_the_additions(load, monkeypatch, processors, capability, clock_khz,
                                floor) -> None:
    properties = SimpleNamespace(multi_processor_count=processors, clock_rate=clock_khz,
                                 major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: properties)
    found = load('report').add_floor(torch.device('cuda'))
    assert found == (None if floor is None else pytest.approx(floor, rel=5e-3))


def test_sizes(load) -> None:
    op_cases = load('op_cases')
    chosen = list(op_cases.cases(quick=False))
    assert len(chosen) == len(set(chosen)) == 3 * 2 + 3 * 3 * 2 * 2 * (2 + 1)
    assert set(op_cases.cases(quick=True)) < set(chosen)
    assert [case.n for case in chosen] == sorted(case.n for case in chosen)


@pytest.mark.parametrize('command', [
    [sys.executable, BENCHMARKS / 'gpu_ops.py', '--tests', 'a.xml', '--out', 'b.json'],
    [sys.executable, BENCHMARKS / 'gpu_backbones.py', '--tests', 'a.xml', '--out', 'b.json'],
    [BENCHMARKS / 'gpu_check.sh', '--out', 'b.json']],
    ids=['gpu_ops', 'gpu_backbones', 'gpu_check'])
def test_without_a_gpu_one_sentence_and_status_2(command, tmp_path: Path) -> None:
    result = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False,
                            timeout=120, env={**os.environ, 'CUDA_VISIBLE_DEVICES': '',
                                              'PYTHONPATH': str(ROOT), 'PYTHON': sys.executable})
    assert result.returncode == 2 and result.stdout == ''
    assert 'needs a CUDA device, but torch' in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_unknown_flag_of_the_check(tmp_path: Path) -> None:
    result = subprocess.run([BENCHMARKS / 'gpu_check.sh', '--fast'], cwd=tmp_path, text=True,
                            capture_output=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr == 'gpu_check.sh takes --quick and --out FILE.json, got --fast.\n'


@pytest.fixture
def green(tmp_path: Path) -> Path:
    """A results file with a test that passed."""
    results = tmp_path / 'green.xml'
    results.write_text('<testsuites><testsuite><testcase classname="a" name="b"/></testsuite>'
                       '</testsuites>')
    return results


@pytest.fixture
def no_packages(load, monkeypatch) -> None:
    """Peers that compile or are large are as good as not installed."""
    for name in ('cpu_cases', 'backbone_models', 'backbones', 'memory'):
        module = load(name)
        monkeypatch.setattr(module, 'missing',
                            lambda name: f'{name} is left out' if name in (
                                'KeOps', 'scikit-learn', 'timm pvt_v2_b1') else None)


def test_every_cpu_case_has_times_and_errors(load, no_packages, green: Path,
                                             tmp_path: Path) -> None:
    cpu_ops = load('cpu_ops')
    out = tmp_path / 'new' / 'ops.json'
    assert cpu_ops.main(['--quick', '--tests', str(green), '--out', str(out)]) == 0
    rows = json.loads(out.read_text())['rows']
    assert [(row['op'], row['mode']) for row in rows] == [
        (op, mode) for op in ('laplacian_kernel', 'laplacian_kernel @ V', 'nystrom_attention')
        for mode in ('forward', 'forward + backward')]
    for row in rows:
        timed = {name for name, outcome in row['outcomes'].items() if 'reason' not in outcome}
        assert 'mmlaplacian' in timed and len(timed) >= 2 and set(row['errors']) == timed
        for name in timed:
            outcome = row['outcomes'][name]
            assert outcome['repeats'] >= 5
            assert 0 < outcome['fastest'] <= outcome['milliseconds'] <= outcome['slowest']
            assert 0 < row['errors'][name] < 1e-4
    assert rows[0]['outcomes']['scikit-learn'] == {'reason': 'scikit-learn is left out'}
    assert 'KeOps is left out' in out.with_suffix('.md').read_text()


def test_errors_see_a_wrong_output_and_a_wrong_gradient(load) -> None:
    cpu_cases, op_cases = load('cpu_cases'), load('op_cases')
    right = op_cases.cdist
    cases = [op_cases.Case('laplacian_kernel', mode, 2, 12, 4, torch.float32, m=5)
             for mode in op_cases.MODES]
    chosen = {'scaled': lambda q, k: right(q, k) * 1.01,
              'detached': lambda q, k: right(q, k) + (q.sum() - q.detach().sum())}
    forward, both = (cpu_cases.errors(case, chosen) for case in cases)
    assert forward['scaled'] == pytest.approx(0.01, rel=1e-3) and forward['detached'] < 1e-6
    assert both['scaled'] > 9e-3 and both['detached'] > 0.1


def test_attention_peers_approach_softmax(load) -> None:
    """With a landmark for each token, and on average over many directions."""
    peers = load('attention_peers')
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 4, generator=generator) for _ in range(3))
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(peers.nystromformer(q, k, v, 12), softmax, rtol=0, atol=0.05)
    # The variance of the features grows with exp(|q + k|^2).
    q, k = q / 2, k / 2
    directions = peers.orthogonal_features(4096, 4, generator)
    torch.testing.assert_close(peers.performer(q, k, v, directions),
                               torch.nn.functional.scaled_dot_product_attention(q, k, v), rtol=0,
                               atol=0.05)
    means = peers.segment_means(v, 5)
    torch.testing.assert_close(means[:, :, 0], v[:, :, :2].mean(2))
    torch.testing.assert_close(means[:, :, 4], v[:, :, 9:].mean(2))


def test_stored_attention_is_the_op(load) -> None:
    from mmlaplacian.ops import nystrom_attention

    stored = load('stored_attention').stored_attention
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, n, 4, generator=generator).requires_grad_()
              for n in (30, 30, 30, 5)]
    options = (4.0, 1e-2, 1e-5, None, 'laplacian', 'whiten')
    found, expected = stored(*inputs, *options), nystrom_attention(*inputs, *options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn(found.shape, generator=generator)
    for own, other in zip(*(torch.autograd.grad(x, inputs, weight) for x in (found, expected)),
                          strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="got 'gaussian' and 'whiten'"):
        stored(*inputs, *options[:4], 'gaussian', 'whiten')


def test_peak_counts_what_is_alive_at_once(load) -> None:
    def call() -> None:
        x = torch.empty(1000)
        y = x + 1
        del x
        y.sum()

    assert load('cpu_memory').peak_bytes(call) == pytest.approx(8000, abs=400)


def test_exponent_of_a_power(load) -> None:
    assert load('scaling').exponent({n: 3 * n**1.5 for n in (10, 20, 80)}) == pytest.approx(1.5)


def test_few_repeats_are_spread_over_the_turns(load, monkeypatch) -> None:
    timing, calls = load('timing'), []
    durations = {'slow': 1000.0, 'fast': 1.0}

    def pretend(function: Callable[[], None], device: torch.device) -> float:
        function()
        return durations[calls[-1]]

    monkeypatch.setattr(timing, 'time_call', pretend)
    outcomes = timing.time_in_turn({name: lambda name=name: calls.append(name)
                                    for name in durations}, CPU, most_repeats=9)
    assert outcomes['slow'].repeats == 3 and outcomes['fast'].repeats == 9
    timed = calls[4:]
    assert [i for i, name in enumerate(timed) if name == 'slow'] == [2, 6, 10]


class Stage(torch.nn.Module):
    """A model as small as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 4, 3)
        self.calls: list[tuple[bool, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        out = self.layer(x)
        self.calls.append((self.training, out.dtype))
        return [out]


@pytest.fixture
def gpu_backbones(load, monkeypatch) -> ModuleType:
    """On the CPU: without a GPU a graph is its call."""
    module = load('gpu_backbones')
    models = {'mmlaplacian': Stage(), 'torchvision swin_t': Stage()}
    monkeypatch.setattr(module, 'available', lambda: models)
    monkeypatch.setattr(module, 'missing',
                        lambda name: None if name in models else f'{name} not installed')
    monkeypatch.setattr(module, '_SECONDS_EACH', 0.001)
    monkeypatch.setattr(module.Graphed, '_captured',
                        lambda self: SimpleNamespace(replay=self.call))
    module.models = models
    return module


def test_backbones_on_a_gpu(gpu_backbones, tmp_path: Path) -> None:
    chosen = [gpu_backbones.Case(kind, 2, 8, 8, amp)
              for kind in gpu_backbones.SIZES for amp in (False, True)]
    record = gpu_backbones.measure(chosen, None, CPU, 60, say=lambda line: None)
    gpu_backbones.write(record, gpu_backbones.markdown(record), tmp_path / 'a.json')
    assert json.loads((tmp_path / 'a.json').read_text()) == record
    for row in record['rows']:
        assert row['outcomes'].pop('timm pvt_v2_b1') == {'reason': 'timm pvt_v2_b1 not installed'}
        assert set(row['outcomes']) == {'mmlaplacian', 'mmlaplacian, CUDA graph',
                                        'torchvision swin_t'} == set(row['images_per_s'])
        for name, outcome in row['outcomes'].items():
            assert row['images_per_s'][name] == pytest.approx(2e3 / outcome['milliseconds'])
    table = (tmp_path / 'a.md').read_text().splitlines()
    assert sum(line.count(' images/s') for line in table) == 4 * 3
    assert len({line.count('|') for line in table if '|' in line}) == 1
    for model in gpu_backbones.models.values():
        assert {call for call in model.calls} == {(training, dtype) for training in (False, True)
                                                  for dtype in (torch.float32, torch.bfloat16)}
        assert model.layer.weight.grad is not None


def test_red_and_late_backbones_have_no_figures(gpu_backbones) -> None:
    chosen = [gpu_backbones.Case('inference', 2, 8, 8, False)]
    row, = gpu_backbones.measure(chosen, 'refused: 1 red tests', CPU, 60,
                                 say=lambda line: None)['rows']
    assert set(row['images_per_s']) == {'torchvision swin_t'} and row['speedup'] == {}
    assert row['outcomes']['mmlaplacian, CUDA graph'] == {'reason': 'refused: 1 red tests'}
    assert gpu_backbones.models['mmlaplacian'].calls == []
    row, = gpu_backbones.measure(chosen, None, CPU, -1, say=lambda line: None)['rows']
    assert row['outcomes'] == {'mmlaplacian': {'reason': 'not run: after -1 s'}}
    assert row['images_per_s'] == {}


def test_a_graph_is_captured_once(load, monkeypatch) -> None:
    """With doubles of torch.cuda: warm-up calls come before the capture, replays after it."""
    graphed, log = load('gpu_backbones').Graphed, []

    class Block:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            log.append(f'enter {self.name}')

        def __exit__(self, *error: object) -> None:
            log.append(f'leave {self.name}')

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, double in (('Stream', lambda: stream), ('current_stream', lambda: stream),
                         ('stream', lambda stream: Block('stream')),
                         ('graph', lambda graph: Block('capture')),
                         ('CUDAGraph', lambda: SimpleNamespace(
                             replay=lambda: log.append('replay')))):
        monkeypatch.setattr(torch.cuda, name, double)
    call = graphed(lambda: log.append('call'))
    call()
    call()
    assert log == ['enter stream', 'call', 'call', 'leave stream', 'enter capture', 'call',
                   'leave capture', 'replay', 'replay']


def test_the_check_takes_five_minutes(load) -> None:
    """Both parts together leave two minutes to the tests and to cases that have begun."""
    seconds = sum(float(re.search(r'seconds=(\d+)', (BENCHMARKS / f'{part}.py').read_text())[1])
                  for part in ('gpu_ops', 'gpu_backbones'))
    assert seconds <= 180
    assert 'gpu_backbones.py' in (BENCHMARKS / 'gpu_check.sh').read_text()


@pytest.mark.parametrize('part', ['cpu_ops', 'backbones', 'scaling', 'memory',
                                  'sequence_length'])
def test_red_ops_are_not_timed(load, monkeypatch, part: str, tmp_path: Path) -> None:
    results, out = tmp_path / 'red.xml', tmp_path / 'part.json'
    results.write_text('<testsuites><testsuite><testcase classname="a" name="b"><failure/>'
                       '</testcase></testsuite></testsuites>')
    assert load(part).main(['--quick', '--tests', str(results), '--out', str(out)]) == 0
    table = out.with_suffix('.md').read_text()
    assert 'refused: 1 red tests' in table
    own = [row.get('outcomes', {}).get('mmlaplacian', {'reason': ''})
           for row in json.loads(out.read_text())['rows']]
    assert all('milliseconds' not in outcome for outcome in own)


def test_parts_and_plots_at_tiny_sizes(load, no_packages, green: Path, tmp_path: Path) -> None:
    arguments = ['--quick', '--tests', str(green)]
    for part in ('backbones', 'scaling', 'sequence_length'):
        out = tmp_path / f'{part}.json'
        assert load(part).main([*arguments, '--out', str(out)]) == 0
        assert ' ms' in out.with_suffix('.md').read_text()
    rows = json.loads((tmp_path / 'backbones.json').read_text())['rows']
    assert all(set(row['gmacs']) == {'mmlaplacian', 'torchvision swin_t'} or
               'timm pvt_v2_b1' in row['gmacs'] for row in rows)
    assert {image.name for image in load('plots').draw(tmp_path, tmp_path / 'images')} \
        == {'scaling.png', 'sequence_length.png', 'resolution.png'}


def test_memory_is_of_one_step_in_its_own_process(load, no_packages, green: Path,
                                                  tmp_path: Path) -> None:
    out = tmp_path / 'memory.json'
    assert load('memory').main(['--quick', '--tests', str(green), '--out', str(out)]) == 0
    rows = json.loads(out.read_text())['rows']
    assert rows.pop('timm pvt_v2_b1') == {'reason': 'timm pvt_v2_b1 is left out'}
    assert len(rows) == 2
    for measured in rows.values():
        assert 2**26 < measured['before_bytes'] <= measured['peak_bytes']


def test_output_that_cannot_be_written_is_known_first(load, green: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        load('scaling').main(['--tests', str(green), '--out', str(green / 'a.json')])
    assert 'argument --out: cannot make its folder' in capsys.readouterr().err


def test_no_contract_test_no_figures(load, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match='must run before anything is timed'):
        load('scaling').main(['--tests', str(tmp_path / 'none.xml'), '--out',
                              str(tmp_path / 'a.json')])


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='getrusage inherits the peak')
def test_peak_memory_is_of_one_process(load) -> None:
    """Started by a larger process, a small one has a small peak."""
    child = 'from resident_memory import resident_peak; print(resident_peak(), flush=True)'
    parent = ('import subprocess, sys; x = b"1" * 2**28; '
              f'subprocess.run([sys.executable, "-c", {child!r}]); {child}')
    done = subprocess.run([sys.executable, '-c', parent], capture_output=True, text=True,
                          check=True, env=dict(os.environ, PYTHONPATH=str(BENCHMARKS)))
    small, large = map(int, done.stdout.split())
    assert small < 2**28 < large < 2**29
