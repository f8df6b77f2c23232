"""The GPU benchmark's own code, run on the CPU at tiny sizes: nothing here is a figure."""

from __future__ import annotations

import importlib
import json
import os
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
    gpu_ops.write(record, tmp_path / 'new' / 'figures.json')

    stored = json.loads((tmp_path / 'new' / 'figures.json').read_text())
    assert stored == record and stored['red_tests'] == []
    assert stored['environment']['device'] == 'CPU'
    assert stored['environment']['torch'] == torch.__version__
    peers = dict(zip(OPS, [{'torch.cdist + exp', 'compiled broadcast'}, {'torch.linalg.inv'},
                           {'SDPA, N x N'}], strict=True))
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
        if case.mode == 'forward' and case.op != 'nystrom_attention':
            inputs = op_cases.inputs(case, CPU)
            expected, *others = [f(*inputs) for f in op_cases._contestants(case.op).values()]
            for other in others:
                assert other.dtype == expected.dtype
                torch.testing.assert_close(other, expected, rtol=2e-2, atol=1e-3)


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
    assert called == [{'mmlaplacian', 'SDPA, N x N'}] * 3
    chosen[1:] = [op_cases.Case('nystrom_attention', 'forward', 1, 16, 4, torch.float32, m=2)]
    called.clear()
    rows = gpu_ops.measure(chosen, {}, CPU, 60, say=lambda line: None)['rows']
    assert called == [{'mmlaplacian', 'SDPA, N x N'}, {'mmlaplacian'}]
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
    assert len(chosen) == len(set(chosen)) == 3 * 2 + 3 * 3 * 2 * 2 * 2 * 2
    assert set(op_cases.cases(quick=True)) < set(chosen)
    assert [case.n for case in chosen] == sorted(case.n for case in chosen)


@pytest.mark.parametrize('command', [
    [sys.executable, BENCHMARKS / 'gpu_ops.py', '--tests', 'a.xml', '--out', 'b.json'],
    [BENCHMARKS / 'gpu_check.sh', '--out', 'b.json']], ids=['gpu_ops', 'gpu_check'])
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
