"""``tools/analysis/complexity.py``: growth of time and memory with the number of tokens."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

ANALYSIS = Path(__file__).resolve().parents[2] / 'tools' / 'analysis'


@pytest.fixture(scope='module')
def complexity(tool: Callable[[str], ModuleType]) -> ModuleType:
    if str(ANALYSIS) not in sys.path:
        sys.path.append(str(ANALYSIS))
    return tool('analysis/complexity')


def test_fast_run(complexity: ModuleType, tmp_path: Path) -> None:
    assert complexity.CLAIM.run(['--fast', '--out', str(tmp_path)]) == 0
    with (tmp_path / 'complexity.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    methods = {'Laplacian', 'SOFT-style (Gaussian)', 'Nystromformer', 'Performer',
               'softmax, fused', 'softmax, N x N stored'}
    assert len(rows) == 2 * 2 * len(methods) and {row['method'] for row in rows} == methods
    peaks = {row['n']: int(row['peak_bytes']) for row in rows
             if (row['part'], row['method']) == ('attention', 'softmax, N x N stored')}
    for n, peak in peaks.items():
        # Logits and their softmax at once, beside the queries.
        matrix = 12 * int(n)**2 * 4
        assert 2 * matrix <= peak < 2.2 * matrix
    for row in rows:
        if row['method'] == 'Laplacian':
            assert float(row['peak_bytes_exponent']) < 1.1
        if row['method'] == 'softmax, N x N stored' and row['part'] == 'attention':
            assert float(row['peak_bytes_exponent']) > 1.9


def test_every_attention_is_what_its_name_says(complexity: ModuleType) -> None:
    q, k, v = torch.randn(3, 1, 12, 784, 32, generator=torch.Generator().manual_seed(0))
    cores = complexity.cores()
    softmax = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(cores['softmax, N x N stored'](q, k, v), softmax, rtol=1e-4,
                               atol=1e-5)
    torch.testing.assert_close(cores['softmax, fused'](q, k, v), softmax, rtol=1e-4, atol=1e-5)
    outputs = [core(q, k, v) for core in cores.values()]
    assert all(out.shape == v.shape for out in outputs)
    # No two of the others are the same function under two names.
    for i, one in enumerate(outputs[:4]):
        assert all((one - other).abs().max() > 1e-3 for other in outputs[i + 1:])


def _rows(complexity: ModuleType, power: float) -> list[dict[str, object]]:
    return complexity.with_exponents(
        [{'part': part, 'method': name, 'n': n, 'processor_milliseconds': factor * n**power,
          'peak_bytes': n} for part in ('attention', 'layer')
         for name, factor in (('Laplacian', 2), ('other', 1), ('slow', 3))
         for n in (100, 200, 400)])


@pytest.mark.parametrize(('power', 'verdict'), [(1., 'holds'), (1.3, 'does not hold here')])
def test_verdict_follows_the_numbers(complexity: ModuleType, power: float,
                                     verdict: str) -> None:
    rows = _rows(complexity, power)
    assert all(row['processor_milliseconds_exponent'] == pytest.approx(power) for row in rows)
    text = complexity.describe(rows)
    assert f'**{verdict}**' in text
    assert 'Faster than the Laplacian attention at that N: other.' in text


def test_processor_time_leaves_waiting_out(complexity: ModuleType) -> None:
    def busy() -> None:
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass

    found = complexity.processor_milliseconds({'busy': busy, 'idle': lambda: time.sleep(0.03)}, 2)
    assert 30 <= found['busy'] < 60 and found['idle'] < 15
