"""Wrong variants of kernels and runtime: the suite fails on each, and for the reason named."""

import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from mutation_list import BARRIER, BARRIERS, KINDS, MUTATIONS, RUNTIME, SOLVER, WRONG
from mutation_runner import (
    ROOT,
    Mutation,
    MutationError,
    Outcome,
    check_caught,
    copy_repository,
    mutated,
    run_tests,
)

COMPILER = shutil.which('g++')
SHORT = [mutation for mutation in MUTATIONS if not mutation.soak]
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason='g++ is not installed: kernel text cannot be run on the host')


def marks(mutation):
    return [*([needs_compiler] if mutation.runs_kernels else []),
            *([pytest.mark.soak] if mutation.soak else [])]


@pytest.fixture(scope='module')
def checks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[dict[Mutation, Future]]:
    """The checks of all mutations of this run, one at a time on each processor.

    Most of a check is the start of an interpreter with torch, which has one thread.
    """
    chosen = [item.callspec.params['mutation'] for item in request.session.items
              if getattr(item, 'originalname', '') == test_is_caught.__name__]
    folder = tmp_path_factory.mktemp('mutations')
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield {mutation: pool.submit(check_caught, mutation, folder / str(number))
               for number, mutation in enumerate(chosen)
               if COMPILER or not mutation.runs_kernels}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize('mutation', [
    pytest.param(mutation, marks=marks(mutation), id=str(mutation)) for mutation in MUTATIONS])
def test_is_caught(mutation, checks):
    checks[mutation].result()


@pytest.mark.parametrize('mutations', [
    SHORT, pytest.param(MUTATIONS, marks=pytest.mark.soak)], ids=['short', 'all'])
def test_unmutated_copy_passes(mutations, tmp_path):
    tests = {mutation.test for mutation in mutations if COMPILER or not mutation.runs_kernels}
    outcomes = run_tests(copy_repository(tmp_path / 'copy'), sorted(tests))
    assert outcomes == dict.fromkeys(tests, Outcome('passed', ''))


def test_all_can_be_applied_and_have_names_of_their_own():
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text(encoding='utf-8')
        assert mutated(mutation, text) != text
    assert len(set(map(str, MUTATIONS))) == len(MUTATIONS)


def test_every_kind_and_every_kernel_is_in_make_test():
    assert {mutation.kind for mutation in SHORT} >= set(KINDS)
    kernels = {name for file in BARRIERS for name in re.findall(
        r'^(?:laplacian_kernel|newton_schulz|nystrom_attention)_(\w+)\(',
        (ROOT / file).read_text(), re.MULTILINE)}
    # A barrier of a header belongs to several kernels.
    assert kernels == {kernel for barriers in BARRIERS.values()
                       for names, _, test, soak in barriers if test and not soak
                       for kernel in names.split(', ')}


def test_every_barrier_is_dropped():
    found = {path.relative_to(ROOT).as_posix(): path.read_text(encoding='utf-8').count(BARRIER)
             for path in (ROOT / 'cuda').iterdir() if path.suffix in ('.cu', '.cuh')}
    assert {file: count for file, count in found.items() if count} == {
        file: len(barriers) for file, barriers in BARRIERS.items()}


TEST = 'tests/ops/test_cupy_runtime.py::test_text_is_one_unit_without_includes'
HARMLESS = Mutation('none', 'harmless', RUNTIME, '_MAX_BLOCKS = 2**31 - 1',
                    '_MAX_BLOCKS = 2**31 - 2 + 1', TEST, WRONG)


def test_a_survivor_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match='none: harmless: survived .*one_unit'):
        check_caught(HARMLESS, tmp_path / 'copy')


def test_an_import_error_does_not_count_as_caught(tmp_path):
    broken = replace(HARMLESS, old='import ctypes', new='import no_such_module', failure='')
    with pytest.raises(MutationError, match='(?s)ran none of .*no_such_module'):
        check_caught(broken, tmp_path / 'copy')


@needs_compiler
def test_text_that_does_not_compile_does_not_count_as_caught(tmp_path):
    broken = replace(HARMLESS, file=SOLVER, old=BARRIER, new='__syncthreads(;', occurrence=0,
                     test='tests/cuda_emulation/test_newton_schulz.py::test_inverse[1-spd]')
    with pytest.raises(AssertionError, match='(?s)should fail by .* g.. refuses the kernel text'):
        check_caught(broken, tmp_path / 'copy')


def test_an_unknown_test_is_an_error(tmp_path):
    with pytest.raises(MutationError, match=r'(?s)ran none of .*not found: .*::test_of_nothing'):
        check_caught(replace(HARMLESS, test=f'{TEST.split("::")[0]}::test_of_nothing'),
                     tmp_path / 'copy')


def test_another_package_than_the_copys_is_an_error(tmp_path):
    copy = copy_repository(tmp_path / 'copy')
    shutil.rmtree(copy / 'mmlaplacian')
    with pytest.raises(MutationError, match='was tested instead of the package in .*copy'):
        run_tests(copy, [TEST])


def test_replaced_text():
    assert mutated(replace(HARMLESS, old='a', new='b', occurrence=1), 'a a a') == 'a b a'
    assert mutated(replace(HARMLESS, old='a', new='b'), 'c a') == 'c b'


@pytest.mark.parametrize('occurrence, text, message', [
    (None, 'c', "cupy_runtime.py does not hold 'a' any more"),
    (None, 'a a', "holds 'a' 2 times, say which occurrence is meant"),
    (2, 'a a', "holds 'a' 2 times, there is no occurrence 2")])
def test_text_that_is_not_there_or_not_clear_is_an_error(occurrence, text, message):
    with pytest.raises(MutationError, match=message):
        mutated(replace(HARMLESS, old='a', new='b', occurrence=occurrence), text)
