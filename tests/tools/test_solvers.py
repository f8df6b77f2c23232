"""``tools/analysis/solvers.py``: inverses of the landmark matrix and what they do."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mmlaplacian.ops import nystrom_attention

ANALYSIS = Path(__file__).resolve().parents[2] / 'tools' / 'analysis'


@pytest.fixture(scope='module')
def solvers(tool: Callable[[str], ModuleType]) -> ModuleType:
    if str(ANALYSIS) not in sys.path:
        sys.path.append(str(ANALYSIS))
    return tool('analysis/solvers')


@pytest.fixture(scope='module')
def inverses(solvers: ModuleType) -> ModuleType:
    import inverses
    return inverses


@pytest.fixture(scope='module')
def spd(solvers: ModuleType) -> torch.Tensor:
    return solvers.conditioned(100., torch.Generator().manual_seed(0))


def test_fast_run(solvers: ModuleType, tmp_path: Path) -> None:
    arguments = ['--fast', '--runs', '1', '--jobs', '1', '--out', str(tmp_path)]
    assert solvers.CLAIM.run(arguments) == 0
    with (tmp_path / 'solvers.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row['value'] = float(row['value'])

    def value(part: str, case: str, method: str, steps: object = '',
              precision: str = 'float32') -> float:
        found, = (row['value'] for row in rows if (
            row['part'], row['case'], row['method'], row['steps'], row['precision']) ==
            (part, case, method, str(steps), precision))
        return found

    # All ones plus the ridge has the eigenvalues ridge and M + ridge. The error of the slow one
    # is e^(2^s), e = 1 - 2 ridge / (||W||_inf + ridge), and M - 1 of M of it show in an entry.
    start = 1 - 2 * 1e-2 / (49 + 2e-2)
    for steps in (3, 6, 9):
        assert value('residual', 'flat', solvers.SPD, steps) == pytest.approx(
            start**(2**steps), rel=0.05)
    # The printed start has the factor 1 - 2 (M + ridge) at the large one.
    assert value('residual', 'flat', solvers.PAPER, 1) == pytest.approx(
        (1 - 2 * 49.01)**2 / 49, rel=0.05)
    # Two eigenvalues, so two steps of conjugate gradient.
    assert value('residual', 'flat', solvers.GRADIENTS, 2) < 1e-2
    assert value('residual', 'photograph', solvers.CHOLESKY) < 1e-3
    # Too few steps show in the output; all of them do not.
    assert value('output error', 'photograph', solvers.SPD, 1) > 0.05
    assert value('output error', 'photograph', solvers.SPD, solvers.DEFAULT) < 1e-2
    # A rounding of 2^-11 makes eigenvalues of 1e-6 negative.
    assert value('residual', 'condition 1e+06', solvers.CHOLESKY,
                 precision='rounded to float16') == float('inf')
    trained = {row['method']: row['value'] for row in rows if row['part'] == 'accuracy'}
    assert set(trained) == {'solver steps 1', solvers.WITH_DEFAULT, solvers.CONTROL.label}
    assert all(0 <= accuracy < 1 for accuracy in trained.values())


@pytest.mark.parametrize('condition', [10., 1e4])
def test_matrices_have_their_condition(solvers: ModuleType, condition: float) -> None:
    w = solvers.conditioned(condition, torch.Generator().manual_seed(0))
    values = torch.linalg.eigvalsh(w)
    torch.testing.assert_close(values[:, -1] / values[:, 0], torch.full((8, ), condition).double())
    torch.testing.assert_close(values.sum(-1), torch.full((8, ), 49.).double())


def test_every_method_inverts(inverses: ModuleType, spd: torch.Tensor) -> None:
    expected = torch.linalg.inv(spd)
    bound = torch.linalg.eigvalsh(spd).min().item()
    # The printed start converges only where ||W||_2 < 1.
    for name in (inverses.SPD, inverses.GENERAL, inverses.GRADIENTS):
        *_, x = inverses.iterates(name, bound)(spd, 60)
        torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)
    *_, x = inverses.iterates(inverses.PAPER, bound)(spd / 100, 60)
    torch.testing.assert_close(x / 100, expected, rtol=1e-6, atol=1e-6)
    for name in inverses.DIRECT:
        torch.testing.assert_close(inverses.direct(name)(spd), expected, rtol=1e-6, atol=1e-6)


def test_residual_of_what_diverged_is_infinite(inverses: ModuleType) -> None:
    w = 2 * torch.eye(3).expand(2, 3, 3)
    x = torch.stack([torch.eye(3), torch.full((3, 3), torch.nan)])
    assert inverses.residual(w, x).tolist() == [1, float('inf')]


def test_output_is_that_of_the_op(solvers: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, landmarks = (torch.randn(1, 2, n, 4, generator=generator) for n in (30, 30, 30, 5))
    inputs = solvers.AttentionInputs('', (5, 6), q, k, v, landmarks)
    inverse = torch.linalg.inv(solvers.landmark_matrix(landmarks))
    expected = nystrom_attention(*(x.double() for x in (q, k, v, landmarks)))
    torch.testing.assert_close(solvers.output(inputs, inverse), expected)


def test_wrong_options_are_refused(solvers: ModuleType, tmp_path: Path,
                                   capsys: pytest.CaptureFixture) -> None:
    text = tmp_path / 'text.jpg'
    text.write_text('no image')
    assert solvers.CLAIM.run(['--fast', '--out', str(tmp_path), '--image', str(text)]) == 2
    assert '--image' in capsys.readouterr().err
