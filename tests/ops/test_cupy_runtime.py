"""The runtime's twin without a GPU: what reaches CuPy, on which stream and device."""

import ctypes
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmlaplacian.ops import cupy_runtime
from mmlaplacian.ops.cupy_runtime import Kernel, KernelCompileError
from mmlaplacian.ops.laplacian_kernel import cupy_impl as laplacian_cupy
from mmlaplacian.ops.newton_schulz import cupy_impl as solver_cupy
from mmlaplacian.ops.nystrom_attention import cupy_impl as attention_cupy

DEVICE = torch.device('cuda', 1)
STREAM = 0x5EED
KERNEL = Kernel('laplacian_kernel', 'laplacian_kernel_forward',
                (('HEAD_DIM', 32), ('SCALAR_TYPE', 0)))


class CompileException(Exception):
    pass


class FakeCuPy:
    """Records compilations and launches, and fails where a test asks for it."""

    def __init__(self, state):
        self.state = state
        self.compiled, self.launches = [], []
        self.compile_error = self.launch_error = None
        self.cuda = SimpleNamespace(compiler=SimpleNamespace(CompileException=CompileException))

    def RawKernel(self, code, name, options, backend):  # noqa: N802
        fake = self

        class Raw:
            max_dynamic_shared_size_bytes = 0

            def compile(self):
                fake.compiled.append((name, options, fake.state['device']))
                if fake.compile_error:
                    raise fake.compile_error

            def __call__(self, grid, block, arguments, shared_mem, stream):
                fake.launches.append(SimpleNamespace(
                    grid=grid, block=block, arguments=arguments, stream=stream.ptr,
                    device=fake.state['device'], code=code, shared=shared_mem,
                    opted_in=self.max_dynamic_shared_size_bytes))
                if fake.launch_error:
                    raise fake.launch_error

        assert backend == 'nvrtc'
        return Raw()


@pytest.fixture
def cupy(monkeypatch):
    state = {'device': 0}

    @contextmanager
    def device_guard(device):
        previous, state['device'] = state['device'], torch.device(device).index
        try:
            yield
        finally:
            state['device'] = previous

    fake = FakeCuPy(state)
    monkeypatch.setattr(cupy_runtime, '_import_cupy', lambda: fake)
    monkeypatch.setattr(torch.cuda, 'device', device_guard)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: state['device'])
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: 'a GPU')
    monkeypatch.setattr(torch.cuda, 'current_stream',
                        lambda device: SimpleNamespace(cuda_stream=STREAM + device.index))
    cupy_runtime._compiled.cache_clear()
    yield fake
    cupy_runtime._compiled.cache_clear()


def launch(*arguments, blocks=10, device=DEVICE, kernel=KERNEL, shared_bytes=0):
    cupy_runtime.launch(kernel, blocks, 224, arguments, device, shared_bytes)


def test_b04_b22_launch_on_torchs_stream_and_device(cupy):
    launch(torch.zeros(3))
    record, = cupy.launches
    assert (record.stream, record.device) == (STREAM + 1, 1)
    assert (record.grid, record.block) == ((10, ), (224, ))
    assert cupy.state['device'] == 0


def test_b22_device_is_restored_after_a_failed_launch(cupy):
    cupy.launch_error = RuntimeError('out of resources')
    with pytest.raises(RuntimeError, match='out of resources'):
        launch(torch.zeros(3))
    assert cupy.state['device'] == 0


def test_b18_arguments_have_the_exact_type(cupy):
    x = torch.zeros(3)
    launch(x, ctypes.c_float(-0.25), ctypes.c_longlong(2**40))
    pointer, scale, size = cupy.launches[0].arguments
    assert (pointer, type(pointer)) == (x.data_ptr(), np.uint64)
    assert (scale, scale.dtype) == (-0.25, np.float32)
    assert (size, size.dtype) == (2**40, np.int64)


@pytest.mark.parametrize('raw', [4.0, 2, np.float64(2), None], ids=repr)
def test_b18_raw_numbers_are_refused(cupy, raw):
    with pytest.raises(TypeError, match='a tensor or a ctypes scalar, got'):
        launch(torch.zeros(3), raw)
    assert not cupy.launches


@pytest.mark.parametrize('blocks, grid', [(0, 1), (2**31 - 1, 2**31 - 1), (2**40, 2**31 - 1)])
def test_b16_grid_keeps_its_limits(cupy, blocks, grid):
    launch(torch.zeros(3), blocks=blocks)
    assert cupy.launches[0].grid == (grid, )


def test_large_shared_memory_is_opted_into_once(cupy):
    for shared_bytes in (0, 48 * 1024, 100_000, 60_000, 200_000):
        launch(torch.zeros(3), shared_bytes=shared_bytes)
    assert [(record.shared, record.opted_in) for record in cupy.launches] == [
        (0, 0), (48 * 1024, 0), (100_000, 100_000), (60_000, 100_000), (200_000, 200_000)]


def test_compiled_once_for_each_device_and_macro_set(cupy):
    other = Kernel(KERNEL.source, KERNEL.function, (('HEAD_DIM', 64), ('SCALAR_TYPE', 0)))
    for kernel, device in [(KERNEL, 0), (KERNEL, 1), (KERNEL, 1), (other, 1), (KERNEL, 0)]:
        launch(torch.zeros(3), kernel=kernel, device=torch.device('cuda', device))
    assert [(options[1], device) for _, options, device in cupy.compiled] == [
        ('-DHEAD_DIM=32', 0), ('-DHEAD_DIM=32', 1), ('-DHEAD_DIM=64', 1)]
    assert [record.device for record in cupy.launches] == [0, 1, 1, 1, 0]
    assert cupy.compiled[0][1][0] == '--std=c++17'


def test_b25_failed_compilation_names_the_fix_and_is_not_tried_again(cupy):
    cupy.compile_error = CompileException('unknown architecture')
    for _ in range(2):
        with pytest.raises(KernelCompileError, match='update CuPy .*MMLAPLACIAN_BACKEND') as info:
            launch(torch.zeros(3))
        assert info.value.__cause__ is cupy.compile_error
    assert len(cupy.compiled) == 1 and not cupy.launches


def test_a_read_only_kernel_cache_is_named(cupy):
    cupy.compile_error = PermissionError(13, 'Permission denied')
    with pytest.raises(KernelCompileError, match='CUPY_CACHE_DIR') as info:
        launch(torch.zeros(3))
    assert info.value.__cause__ is cupy.compile_error and not cupy.launches
    # The folder may be mended while the process lives.
    cupy.compile_error = None
    launch(torch.zeros(3))
    assert len(cupy.launches) == 1


def check_launches(cupy, names):
    """What every launch must have, whatever the kernel."""
    assert [name for name, _, _ in cupy.compiled] == names
    for record in cupy.launches:
        assert (record.stream, record.device) == (STREAM + 1, 1)
        assert len(record.grid) == 1 and 1 <= record.grid[0] <= 2**31 - 1
        assert len(record.block) == 1 and 32 <= record.block[0] <= 1024
        assert {type(argument) for argument in record.arguments} <= {
            np.uint64, np.float32, np.int64}
    assert cupy.state['device'] == 0


# B*h, N, M, d: a 4128 x 4128 image, B*h above 65 535, more than 2^31 elements in K and in q.
@pytest.mark.filterwarnings('ignore:Accessing the data pointer of FakeTensor')
@pytest.mark.parametrize('groups, n, m, d', [
    (1, 1_065_024, 49, 32), (70_000, 3136, 49, 32), (1, 33_554_560, 64, 4),
    (8, 16_777_344, 49, 64)])
def test_b04_b16_b22_b45_launches_for_sizes_that_cannot_be_allocated_here(cupy, groups, n, m, d):
    with FakeTensorMode():
        q, k = (torch.empty(groups, 1, tokens, d, device=DEVICE) for tokens in (n, m))
        output = laplacian_cupy.kernel_matrix(q, k, 4.0, 'laplacian')
        grads = laplacian_cupy.kernel_matrix_backward(output, q, k, output, 4.0, 'laplacian',
                                                      True, True)
    assert [x.shape for x in (output, *grads)] == [(groups, 1, n, m), q.shape, k.shape]
    check_launches(cupy, [f'laplacian_kernel_{name}' for name in (
        'forward', 'backward_q', 'backward_k', 'reduce_k')])
    for record in cupy.launches[:3]:
        sizes = [int(argument) for argument in record.arguments if type(argument) is np.int64]
        assert sizes[:3] == [groups, n, m]


@pytest.mark.filterwarnings('ignore:Accessing the data pointer of FakeTensor')
@pytest.mark.parametrize('batch, m', [(70_000, 49), (2, 40_000)])
def test_b16_b22_b45_solver_launches_for_sizes_that_cannot_be_allocated_here(
        cupy, monkeypatch, batch, m):
    monkeypatch.setattr(cupy_runtime, 'shared_memory_limit', lambda device: 99 * 1024)
    with FakeTensorMode():
        w = torch.empty(batch, m, m, device=DEVICE)
        x = solver_cupy.newton_schulz_inverse(w, 3, 1e-2)
        grad = solver_cupy.newton_schulz_inverse_backward(x, x)
        residual = solver_cupy.newton_schulz_residual(w, x)
    assert (x.shape, grad.shape, residual.shape) == (w.shape, w.shape, (batch, ))
    assert len(cupy.launches) == (1 if m == 49 else 1 + 3 * 2) + 2 + 1
    check_launches(cupy, [name for name, _, _ in cupy.compiled])


# The same of tokens that lie beside each other in one layer's output.
@pytest.mark.filterwarnings('ignore:Accessing the data pointer of FakeTensor')
@pytest.mark.parametrize('batch, heads, n, m, d', [
    (1, 1, 1_065_024, 49, 32), (35_000, 2, 3136, 49, 32), (1, 1, 33_554_560, 64, 4),
    (8, 1, 16_777_344, 49, 64)])
def test_b04_b16_b22_b45_attention_launches_for_sizes_that_cannot_be_allocated_here(
        cupy, monkeypatch, batch, heads, n, m, d):
    monkeypatch.setattr(cupy_runtime, 'shared_memory_limit', lambda device: 99 * 1024)
    with FakeTensorMode():
        q, k, v = torch.empty(batch, n, 3, heads, d, device=DEVICE).permute(2, 0, 3, 1, 4)
        landmarks = torch.empty(batch, heads, m, d, device=DEVICE)
        assert attention_cupy.serves(v, landmarks, 'whiten')
        out, kept = attention_cupy.nystrom_attention(q, k, v, landmarks, 4.0, 1e-2, 1e-5, None,
                                                     'laplacian', 'whiten')
    assert out.shape == v.shape and [x.shape[1:] for x in kept] == [
        (m, m), (m, m), (m, d), (1, m), (m, m)]
    check_launches(cupy, ['nystrom_attention_landmarks', 'newton_schulz_inverse', *(
        f'nystrom_attention_{name}' for name in (
            'statistics', 'merge_statistics', 'keys', 'merge_keys', 'output'))])
    assert len(cupy.launches) == 7
    for index in (2, 4, 6):
        sizes = [int(argument) for argument in cupy.launches[index].arguments
                 if type(argument) is np.int64]
        assert sizes[:3] == [batch * heads, heads, n]
        assert sizes[4:7] == [3 * n * heads * d, d, 3 * heads * d]  # nothing is copied


def test_text_is_one_unit_without_includes():
    for source, header, kernel in (
            ('laplacian_kernel', 'SCALAR_TYPE == 0', 'laplacian_kernel_forward'),
            ('nystrom_attention', 'int TILE_ROWS', 'nystrom_attention_output(')):
        text = cupy_runtime.source_text(source)
        assert text.index('SCALAR_TYPE == 0') <= text.index(header) < text.index(kernel)
        assert '#include' not in text
    with pytest.raises(FileNotFoundError, match='missing.cu'):
        cupy_runtime.source_text('missing')


@pytest.mark.parametrize('error', [ImportError('No module named cupy'), OSError('libcuda.so.1')],
                         ids=['missing', 'broken'])
def test_b23_cupy_that_does_not_import_shows_its_own_error(monkeypatch, error):
    monkeypatch.setattr(cupy_runtime, '_import_cupy', lambda: error)
    with pytest.raises(ImportError, match=r'mmlaplacian\[cuda13\]') as info:
        cupy_runtime.require_cupy()
    assert info.value.__cause__ is error and str(error) in str(info.value)


def test_b23_missing_cupy_is_found_out_once(monkeypatch):
    cupy_runtime._import_cupy.cache_clear()
    monkeypatch.setitem(sys.modules, 'cupy', None)
    with pytest.raises(ImportError, match='CuPy cannot be imported'):
        cupy_runtime.require_cupy()
    cupy_runtime._import_cupy.cache_clear()
