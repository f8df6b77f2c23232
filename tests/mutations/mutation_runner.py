"""Applies a mutation to a copy of the repository and runs there the tests that must catch it.

Each mutation has an interpreter of its own: a Python file can be imported in one form only, the
next mutation meets nothing that this one left behind, and a kernel's text goes the same way as
the runtime's, so one judge serves both. Starting one and compiling a kernel takes 2 to 4 s.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ('mmlaplacian', 'cuda', 'tests/cuda_emulation', 'tests/ops', 'pyproject.toml')
# Above the emulator's own 300 s, so that its program ends first.
_TIMEOUT = 400


class MutationError(ValueError):
    """A mutation cannot be applied, or its tests did not run."""


@dataclass(frozen=True)
class Mutation:
    """A wrong variant of one file.

    Args:
        kind: What kind of mistake it is.
        name: What is wrong.
        file: Path in the repository.
        old: Text that is replaced. It occurs once, or ``occurrence`` says which is meant.
        new: Text that takes its place.
        test: Node id of the test that must fail.
        failure: Regular expression for how it fails: found in 'TYPE: MESSAGE' of the exception.
        occurrence: Index among the occurrences of ``old``.
        soak: Left to ``make soak``, as most are.
    """

    kind: str
    name: str
    file: str
    old: str
    new: str
    test: str
    failure: str
    occurrence: int | None = None
    soak: bool = True

    def __str__(self) -> str:
        return f'{self.kind}: {self.name}'

    @property
    def runs_kernels(self) -> bool:
        """Whether its test compiles CUDA or C text for the host, which takes g++."""
        return self.test.startswith(('tests/cuda_emulation/', 'tests/ops/test_cpu_'))


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    Args:
        result: ``'passed'``, ``'failed'`` in its own body, ``'skipped'``, or ``'error'`` outside
            it: at collection, in a fixture.
        text: 'TYPE: MESSAGE' of the exception, empty where there was none.
    """

    result: str
    text: str


def mutated(mutation: Mutation, text: str) -> str:
    """The file's text with the mutation in it.

    Raises:
        MutationError: The text to replace is not there, or it is not clear which one is meant.
    """
    parts = text.split(mutation.old)
    found, index = len(parts) - 1, mutation.occurrence
    if not found:
        raise MutationError(f'{mutation}: {mutation.file} does not hold {mutation.old!r} any more')
    if index is None and found > 1:
        raise MutationError(f'{mutation}: {mutation.file} holds {mutation.old!r} {found} times, '
                            'say which occurrence is meant')
    if index is not None and not 0 <= index < found:
        raise MutationError(f'{mutation}: {mutation.file} holds {mutation.old!r} {found} times, '
                            f'there is no occurrence {index}')
    at = (index or 0) + 1
    return mutation.old.join(parts[:at]) + mutation.new + mutation.old.join(parts[at:])


def copy_repository(folder: Path) -> Path:
    """Copies the package, the kernels and their tests to ``folder``, which must not exist."""
    for name in _COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def run_tests(copy: Path, tests: Sequence[str]) -> dict[str, Outcome]:
    """Runs tests of a copy, with the copy's own package, in an interpreter of its own.

    Args:
        copy: What :func:`copy_repository` returned.
        tests: Node ids.

    Returns:
        How each test ended, and each file or folder that could not be collected.

    Raises:
        MutationError: Another package than the copy's was imported, or nothing ran: a test does
            not exist, or what it imports cannot be imported.
    """
    report, temporary = (copy.with_name(copy.name + suffix) for suffix in ('.json', '.tmp'))
    search_path = os.pathsep.join(filter(None, (str(copy), os.environ.get('PYTHONPATH'))))
    process = subprocess.run(
        [sys.executable, Path(__file__).with_name('run_and_report.py'), report,
         f'--basetemp={temporary}', '-p', 'no:cacheprovider', '-q',
         # make test and make soak choose among the mutations, not here.
         '-m', 'soak or not soak', *tests],
        cwd=copy, text=True, timeout=_TIMEOUT, check=False, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, 'PYTHONPATH': search_path, 'PYTHONDONTWRITEBYTECODE': '1'})
    if not report.is_file():
        raise MutationError(f'the tests of {copy} left no report:\n{process.stdout}')
    content = json.loads(report.read_text(encoding='utf-8'))
    package = content['package']
    if package is not None and not Path(package).is_relative_to(copy):
        raise MutationError(f'{package} was tested instead of the package in {copy}')
    if not content['outcomes']:
        raise MutationError(f'pytest ran none of {list(tests)}:\n{process.stdout}')
    return {test: Outcome(*outcome) for test, outcome in content['outcomes'].items()}


def check_caught(mutation: Mutation, folder: Path) -> None:
    """Asserts that the named test fails on the mutated copy, in the way that is named.

    Args:
        mutation: What is put into the copy.
        folder: Where the copy is made; it must not exist.

    Raises:
        AssertionError: The test passes, or fails in another way.
        MutationError: The mutation cannot be applied, or its test did not run.
    """
    copy = copy_repository(folder)
    path = copy / mutation.file
    path.write_text(mutated(mutation, path.read_text(encoding='utf-8')), encoding='utf-8')
    outcomes = run_tests(copy, [mutation.test])
    if mutation.test not in outcomes:
        raise MutationError(f'{mutation}: {mutation.test} did not run, only {outcomes}')
    result, text = outcomes[mutation.test].result, outcomes[mutation.test].text
    assert result != 'passed', f'{mutation}: survived {mutation.test}'
    assert result == 'failed' and re.search(mutation.failure, text), (
        f'{mutation}: {mutation.test} should fail by {mutation.failure!r}, but {result}: {text}')
