"""Compiling, caching and calling C text: what can go wrong on a user's machine."""

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_int64
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from mmlaplacian.ops import cpu_runtime
from mmlaplacian.ops.backend import UnsupportedError
from mmlaplacian.ops.laplacian_kernel import cpu_impl

if not any(map(shutil.which, ('cc', 'gcc', 'clang'))):
    pytest.skip('no C compiler on PATH: cc, gcc or clang', allow_module_level=True)

TEXT = """
#include "common.h"
static void count(const void *job, int64_t item, int worker) {
    (void)worker;
    __atomic_fetch_add(*(int *const *)job + item, 1, __ATOMIC_RELAXED);
}
void count_items(int *counts, int64_t items, int threads) {
    for_items(items, threads, count, &counts);
}
extern int omp_get_num_threads(void);
void team(int *size, int threads) {
#pragma omp parallel num_threads(threads)
    __atomic_store_n(size, omp_get_num_threads(), __ATOMIC_RELAXED);
}
void fill(float *to, float value, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = value;
}
void weighted_sum(const float *x, const int64_t *weights, int64_t count, double *sum) {
    for (int64_t i = 0; i < count; ++i) *sum += x[i] * (double)weights[i];
}
void reverse(const float *x, float *y, float *scratch, int64_t *floats, int64_t count) {
    *floats = count;
    if (!scratch) return;
    memcpy(scratch, x, sizeof(float) * (size_t)count);
    for (int64_t i = 0; i < count; ++i) y[i] = scratch[count - 1 - i];
}
"""
FORK = multiprocessing.get_context('fork')


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache, and nothing loaded."""
    folder = tmp_path / 'new' / 'cache'
    monkeypatch.setenv(cpu_runtime.CACHE_VARIABLE, str(folder))
    cpu_runtime._library.cache_clear()
    yield folder
    cpu_runtime._library.cache_clear()


@pytest.fixture
def sources(cache, monkeypatch, tmp_path) -> Path:
    """A small text in the place of the kernels'."""
    folder = tmp_path / 'cpu_src'
    folder.mkdir()
    shutil.copy(cpu_runtime._SOURCE_FOLDER / 'common.h', folder)
    (folder / 'small.c').write_text(TEXT)
    monkeypatch.setattr(cpu_runtime, '_SOURCE_FOLDER', folder)
    return folder


@pytest.fixture
def set_threads(monkeypatch):
    """What torch answers. After torch.set_num_threads(3) on two cores, MKL's LU is wrong or hangs
    in the whole process (torch 2.11)."""
    return lambda count: monkeypatch.setattr(torch, 'get_num_threads', lambda: count)


def filled(value: float) -> float:
    """Through the C function of the small text."""
    x = torch.zeros(3)
    cpu_runtime.call('small', 'fill', (x, c_float(value), c_int64(3)))
    assert (x == x[0]).all()
    return x[0].item()


def fresh() -> None:
    """Forgets what is loaded, as another process would."""
    cpu_runtime._library.cache_clear()


def test_compiled_once_and_kept_private(sources, cache, monkeypatch):
    assert filled(2.) == 2
    file, = cache.iterdir()
    assert file.name.startswith('small-') and file.stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700
    fresh()
    monkeypatch.setattr(cpu_runtime, '_build', None)
    assert filled(3.) == 3


@pytest.mark.parametrize('change', ['text', 'header', 'flags', 'processor'])
def test_what_a_compiled_file_depends_on(sources, cache, monkeypatch, change):
    filled(1.)
    if change == 'flags':
        monkeypatch.setattr(cpu_runtime, '_FLAGS', (*cpu_runtime._FLAGS, '-g0'))
    elif change == 'processor':
        compiler = cpu_runtime._find_compiler()
        other = cpu_runtime._Compiler(compiler.command, compiler.macros + '#define __NEW__ 1\n')
        monkeypatch.setattr(cpu_runtime, '_find_compiler', lambda: other)
    else:
        name = {'text': 'small.c', 'header': 'common.h'}[change]
        with open(sources / name, 'a') as file:
            file.write('\nextern int nothing;\n')
    fresh()
    filled(1.)
    assert len(list(cache.iterdir())) == 2


def test_the_compiler_tells_its_version_and_the_instruction_sets():
    macros = cpu_runtime._find_compiler().macros
    assert '__VERSION__' in macros or '__clang_version__' in macros
    flags = Path('/proc/cpuinfo')
    if flags.exists() and ' avx2 ' in flags.read_text():
        assert '#define __AVX2__ 1' in macros


@pytest.mark.parametrize('damage', [
    lambda content: b'', lambda content: content[:len(content) // 2],
    lambda content: content[:1000] + b'?' + content[1001:], lambda content: b'text' * 100],
    ids=['empty', 'cut', 'one byte', 'other'])
def test_a_damaged_file_is_built_again(sources, cache, damage):
    filled(1.)
    file, = cache.iterdir()
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(damage(content))
    fresh()
    assert filled(4.) == 4
    assert [path.name for path in cache.iterdir()] == [file.name] and cpu_runtime._intact(file)


def test_a_folder_that_cannot_be_used_gives_way_to_a_temporary_one(
        sources, monkeypatch, tmp_path):
    (tmp_path / 'file').touch()
    temporary = tmp_path / 'temporary'
    temporary.mkdir()
    monkeypatch.setattr(cpu_runtime.tempfile, 'tempdir', str(temporary))
    monkeypatch.setenv(cpu_runtime.CACHE_VARIABLE, str(tmp_path / 'file' / 'cache'))
    assert filled(5.) == 5
    assert list(temporary.iterdir()) == []
    monkeypatch.setattr(cpu_runtime.tempfile, 'tempdir', str(tmp_path / 'file'))
    fresh()
    with pytest.raises(UnsupportedError, match='cannot be loaded: .*MMLAPLACIAN_CACHE'):
        filled(5.)


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv(cpu_runtime.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv('XDG_CACHE_HOME', '/general')
    monkeypatch.setenv('HOME', '/home/user')
    assert cpu_runtime._cache_folder() == tmp_path
    monkeypatch.delenv(cpu_runtime.CACHE_VARIABLE)
    assert cpu_runtime._cache_folder() == Path('/general/mmlaplacian')
    monkeypatch.setenv('XDG_CACHE_HOME', 'relative')
    assert cpu_runtime._cache_folder() == Path('/home/user/.cache/mmlaplacian')


def test_no_home_folder(sources, monkeypatch):
    def no_home():
        raise RuntimeError('Could not determine home directory.')

    monkeypatch.delenv(cpu_runtime.CACHE_VARIABLE)
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setattr(cpu_runtime.Path, 'home', no_home)
    assert filled(6.) == 6


def test_a_folder_without_room_is_passed_by(sources, cache, monkeypatch):
    """The compiled file then serves this process alone."""
    write = Path.write_bytes

    def full(path, content):
        if cache in path.parents:
            raise OSError(errno.ENOSPC, 'No space left on device')
        return write(path, content)

    monkeypatch.setattr(Path, 'write_bytes', full)
    assert filled(2.) == 2 and list(cache.iterdir()) == []


def test_a_compiler_may_say_anything(cache, monkeypatch, tmp_path):
    compiler = tmp_path / 'compiler'
    compiler.write_bytes(b'#!/bin/sh\nprintf "error: gr\\366\\337e" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('CC', str(compiler))
    with pytest.raises(UnsupportedError, match='cannot compile for this processor: error: gr'):
        cpu_impl.check(torch.zeros(1, 1, 2, 3))


def _load_in_child(barrier, results) -> None:
    barrier.wait(30)
    results.put(filled(7.))


def test_several_processes_at_once(sources, cache):
    barrier, results = FORK.Barrier(4), FORK.SimpleQueue()
    children = [FORK.Process(target=_load_in_child, args=(barrier, results), daemon=True)
                for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4
    assert [results.get() for _ in children] == [7.] * 4
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize('variables, message', [
    ({'PATH': ''}, 'need a C compiler, but none of cc, gcc and clang is on PATH'),
    ({'CC': 'no-such-cc -m64'}, 'no-such-cc, from the environment variable CC, is not on PATH'),
    ({'CC': 'gcc "'}, 'variable CC is .gcc ".: No closing quotation'),
    ({'CC': 'false'}, 'C compiler false cannot compile for this processor: exit status 1')])
def test_no_compiler(cache, monkeypatch, variables, message):
    monkeypatch.delenv('CC', raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=message):
            cpu_impl.check(torch.zeros(1, 1, 2, 3))
    assert not cache.exists()


def test_text_that_does_not_compile(sources):
    (sources / 'small.c').write_text('int x = ;\n')
    with pytest.raises(UnsupportedError, match='cannot compile for this processor: .*small.c:1'):
        filled(1.)


@pytest.mark.parametrize('argument', [1, 1., True, [1.]])
def test_python_values_are_refused(sources, argument):
    with pytest.raises(TypeError, match='must be a tensor, None or a ctypes scalar, got'):
        cpu_runtime.call('small', 'fill', (torch.zeros(3), c_float(1), argument))


def test_arrays_of_ctypes_are_passed_by_their_address(sources):
    x, total = torch.arange(4.) + 1, torch.zeros((), dtype=torch.float64)
    weights = (c_int64 * 3)(2**40, -1, 7)
    cpu_runtime.call('small', 'weighted_sum', (x, weights, c_int64(3), total))
    assert total == 2**40 - 2 + 21


def test_memory_of_the_size_that_the_function_says(sources, monkeypatch):
    arguments = []
    call = cpu_runtime.call
    monkeypatch.setattr(cpu_runtime, 'call', lambda *all: (arguments.append(all[2]), call(*all)))
    x, y = torch.arange(5.), torch.zeros(5)
    cpu_runtime.call_with_scratch('small', 'reverse', (x, y), (c_int64(5), ))
    assert y.tolist() == [4, 3, 2, 1, 0]
    assert [a[2] is None for a in arguments] == [True, False]
    assert arguments[1][2].shape == (5, ) and arguments[1][2].dtype == torch.float32


def test_own_headers_come_once_in_the_place_of_the_first(sources):
    (sources / 'inner.h').write_text('#include <math.h>\n#include "common.h"\nint inner;\n')
    (sources / 'outer.h').write_text('int outer;\n#include "inner.h"\nint behind;\n')
    (sources / 'whole.c').write_text(
        '#include "outer.h"\n#include "inner.h"\n#include "outer.h"\nint last;\n')
    text = cpu_runtime.source_text('whole')
    lines = [line for line in text.splitlines() if line.startswith('int ')]
    assert lines == ['int outer;', 'int inner;', 'int behind;', 'int last;']
    assert text.count('enum { LANES = 16 };') == 1
    assert '#include "' not in text and text.count('#include <math.h>') == 1


@pytest.mark.parametrize('name, place', [('inner.h', 'inner.h:2'), ('whole.c', 'whole.c:4')])
def test_errors_name_the_file_and_the_line(sources, name, place):
    texts = {'inner.h': '/* one\n*/\n', 'whole.c': '#include "inner.h"\n#include "inner.h"\n\n'}
    texts[name] = texts[name].replace('*/', 'two */ int x = ;') + 'int y = ;\n'
    for file, text in texts.items():
        (sources / file).write_text(text)
    with pytest.raises(UnsupportedError, match=place):
        cpu_runtime.library('whole')


def test_threads_follow_torch(monkeypatch, set_threads):
    plenty = 2**40
    for threads in (1, 2, 5):
        set_threads(threads)
        assert cpu_runtime.threads(plenty) == threads
        assert cpu_runtime.threads(0) == cpu_runtime.threads(1000) == 1
    monkeypatch.setattr(cpu_runtime._Process, 'forked', True)
    assert cpu_runtime.threads(plenty) == 1


def _openmp_runtimes() -> set[str]:
    """Files of OpenMP runtimes in this process."""
    maps = Path('/proc/self/maps').read_text().split()
    return {name for name in maps if any(part in Path(name).name
                                         for part in ('libgomp', 'libomp', 'libiomp'))}


@pytest.mark.skipif(not Path('/proc/self/maps').exists(), reason='needs Linux')
@pytest.mark.skipif('OpenMP' not in torch.__config__.parallel_info(),
                    reason='torch is built without OpenMP')
def test_regions_run_on_the_runtime_that_torch_loaded(sources, cache):
    if '__clang__' in cpu_runtime._find_compiler().macros:
        pytest.skip("clang's regions need LLVM's runtime, torch for Linux has GNU's")
    before = _openmp_runtimes()
    assert cpu_runtime._find_compiler().openmp
    for threads in (1, 2, 3):
        size = torch.zeros(1, dtype=torch.int32)
        cpu_runtime.call('small', 'team', (size, c_int(threads)))
        assert size.item() == threads
    assert _openmp_runtimes() == before
    file, = cache.iterdir()
    assert not any(name in file.read_bytes() for name in (b'libgomp', b'libomp', b'libiomp'))


def test_without_openmp_one_thread_does_it_all(sources, monkeypatch):
    monkeypatch.setattr(cpu_runtime._Compiler, 'openmp', False)
    test_every_item_once(sources)


def test_every_item_once(sources):
    for threads in (1, 2, 3):
        for items in (0, 1, 1000):
            counts = torch.zeros(1001, dtype=torch.int32)
            cpu_runtime.call('small', 'count_items', (counts, c_int64(items), c_int(threads)))
            assert (counts[:items] == 1).all() and (counts[items:] == 0).all()


@pytest.fixture
def inputs(set_threads) -> tuple[torch.Tensor, ...]:
    """q, k and an incoming gradient, large enough for several threads."""
    set_threads(2)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 3000, 32, generator=generator)
    assert cpu_runtime.threads(q.numel() * 49) == 2
    return q, q[:, :, :49].contiguous(), torch.ones(1, 2, 3000, 49)


def run_kernel(q, k, grad) -> bytes:
    """All bits of the output and of both gradients."""
    output = cpu_impl.kernel_matrix(q, k, 4.0, 'laplacian')
    grads = cpu_impl.kernel_matrix_backward(grad, q, k, output, 4.0, 'laplacian', True, True)
    return b''.join(x.numpy().tobytes() for x in (output, *grads))


def _run_in_child(inputs, digests) -> None:
    # torch's own parallel operators would wait for ever here.
    digests.put((torch.get_num_threads(), sha256(run_kernel(*inputs)).hexdigest()))


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_b26_forked_children_of_a_process_that_ran_the_kernels(inputs):
    """Without torch's own precaution, one thread in each worker of a data loader."""
    expected, digests = run_kernel(*inputs), FORK.SimpleQueue()
    children = [FORK.Process(target=_run_in_child, args=(inputs, digests), daemon=True)
                for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    assert [digests.get() for _ in children] == [(2, sha256(expected).hexdigest())] * 2
    assert run_kernel(*inputs) == expected


def test_several_python_threads_at_once(inputs):
    expected = run_kernel(*inputs)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: run_kernel(*inputs), range(8))) == [expected] * 8


def test_import_compiles_nothing(tmp_path):
    code = 'import mmlaplacian.ops.laplacian_kernel.cpu_impl, mmlaplacian'
    subprocess.run([sys.executable, '-c', code], check=True, timeout=120,
                   env={**os.environ, cpu_runtime.CACHE_VARIABLE: str(tmp_path / 'cache')})
    assert not (tmp_path / 'cache').exists()
