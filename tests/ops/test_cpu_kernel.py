"""The C form of the kernels against the float64 reference, at sizes that miss every tile."""

import ctypes
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mmlaplacian.ops import cpu_runtime
from mmlaplacian.ops.backend import UnsupportedError
from mmlaplacian.ops.laplacian_kernel import cpu_impl, reference

if not any(map(shutil.which, ('cc', 'gcc', 'clang'))):
    pytest.skip('no C compiler on PATH: cc, gcc or clang', allow_module_level=True)

REFERENCES = {'laplacian': reference.laplacian_kernel, 'gaussian': reference.gaussian_kernel}
kernels = pytest.mark.parametrize('kernel', REFERENCES)
N = (1, 15, 16, 17, 63, 65, 1000)
M = (1, 3, 16, 49, 50, 130)
D = (1, 3, 16, 20, 31, 32, 33, 64, 72, 160, 256)
SHAPES = [*((n, m, 32) for n in N for m in M), *((n, m, d) for n, m in ((65, 50), (17, 3))
                                                 for d in D if d != 32), (30, 300, 40)]


@pytest.fixture(autouse=True, scope='module')
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu_runtime.CACHE_VARIABLE, str(tmp_path_factory.mktemp('cache')))
        yield


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """What a kernel does not write is NaN."""
    monkeypatch.setattr(torch.utils.deterministic, 'fill_uninitialized_memory', True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def set_threads(monkeypatch):
    """What torch answers. After torch.set_num_threads(3) on two cores, MKL's LU is wrong or hangs
    in the whole process (torch 2.11)."""
    return lambda count: monkeypatch.setattr(torch, 'get_num_threads', lambda: count)


def make_inputs(n, m, d, batch=1, heads=2):
    """q, k and an incoming gradient; distances of about 4, whatever d is."""
    generator = torch.Generator().manual_seed(n * 7919 + m * 31 + d)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return (normal(batch, heads, n, d) * 4 / d, normal(batch, heads, m, d) * 4 / d,
            normal(batch, heads, n, m))


def run(kernel, q, k, grad, kernel_scale=4.0):
    """Output and both gradients."""
    output = cpu_impl.kernel_matrix(q, k, kernel_scale, kernel)
    return output, *cpu_impl.kernel_matrix_backward(grad, q, k, output, kernel_scale, kernel,
                                                    True, True)


def expected(kernel, q, k, grad, kernel_scale=4.0):
    q, k = (x.double().requires_grad_() for x in (q, k))
    output = REFERENCES[kernel](q, k, kernel_scale)
    return output.detach(), *torch.autograd.grad(output, (q, k), grad.double())


def assert_right(got, want):
    # The roundings of the distance are those of the exponent.
    error, exponent = (got[0] - want[0]).abs(), -want[0].log()
    assert (error <= want[0] * 6e-7 * (1 + exponent)).all()
    for grad, exact in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(grad.double(), exact, rtol=1e-5,
                                   atol=2e-6 * exact.abs().max().item())


@kernels
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_values_and_gradients(kernel, shape):
    inputs = make_inputs(*shape)
    assert_right(run(kernel, *inputs), expected(kernel, *inputs))


def _narrowed(monkeypatch, flag):
    """Has the text compiled without the widest vectors from here on."""
    monkeypatch.setattr(cpu_runtime, '_FLAGS', (*cpu_runtime._FLAGS, flag))
    narrow = cpu_runtime._load('laplacian_kernel')
    monkeypatch.setattr(cpu_runtime, '_library', lambda source: narrow)


@pytest.mark.skipif(platform.machine() != 'x86_64', reason='the flags are those of x86-64')
@pytest.mark.parametrize('flag, lanes', [('-march=x86-64', 4), ('-march=haswell', 8)])
def test_processors_with_narrower_vectors(flag, lanes, monkeypatch):
    if lanes == 8 and cpu_runtime.constant('laplacian_kernel', 'lanes') < 8:
        pytest.skip('this processor has no AVX2')
    _narrowed(monkeypatch, flag)
    assert cpu_runtime.constant('laplacian_kernel', 'lanes') == lanes
    for kernel in REFERENCES:
        for shape in [(1, 1, 1), (17, 3, 3), (65, 50, 33), (130, 49, 64), (30, 300, 72)]:
            inputs = make_inputs(*shape)
            assert_right(run(kernel, *inputs), expected(kernel, *inputs))
    test_gradients_are_zero_at_ties()
    test_nan_stays_where_the_formula_puts_it('laplacian', 20)


@kernels
@pytest.mark.parametrize('needs_q, needs_k', [(True, False), (False, True), (False, False)])
def test_gradients_that_are_not_needed(kernel, needs_q, needs_k):
    q, k, grad = make_inputs(100, 49, 20)
    output, *both = run(kernel, q, k, grad)
    got = cpu_impl.kernel_matrix_backward(grad, q, k, output, 4.0, kernel, needs_q, needs_k)
    for x, full, needed in zip(got, both, (needs_q, needs_k), strict=True):
        assert torch.equal(x, full) if needed else x.shape == (0, )


def test_exponential_to_two_ulp():
    """One channel: the distance is exact, so the exponential's is the only error."""
    q = torch.linspace(0, 87.3, 100_001).reshape(1, 1, -1, 1)
    for kernel_scale in (1.0, 3.0):
        out = cpu_impl.kernel_matrix(q * kernel_scale, torch.zeros(1, 1, 1, 1), kernel_scale,
                                     'laplacian')
        exact = (-(q * kernel_scale).double() / kernel_scale).exp()
        assert ((out - exact).abs() / exact).max() < 2 * 2**-23
        assert out[0, 0, 0, 0] == 1


@kernels
@pytest.mark.parametrize('distance', [90., 1e4, 1e30, float('inf')])
def test_underflow_is_zero(kernel, distance):
    q, k = torch.full((1, 1, 3, 32), distance), torch.zeros(1, 1, 2, 32)
    output = cpu_impl.kernel_matrix(q, k, 4.0, kernel)
    assert (output == 0).all()
    if distance < float('inf'):
        assert all((x == 0).all() for x in cpu_impl.kernel_matrix_backward(
            torch.ones(1, 1, 3, 2), q, k, output, 4.0, kernel, True, True))


@kernels
@pytest.mark.parametrize('kernel_scale', [1e-40, 1e-3, 1e3, 1e30, 1e300])
def test_scales_at_the_end_of_float32(kernel, kernel_scale):
    q = make_inputs(4, 4, 8)[0]
    output, *grads = run(kernel, q, q, torch.ones(1, 2, 4, 4), kernel_scale)
    torch.testing.assert_close(output.double(), expected(kernel, q, q, output, kernel_scale)[0],
                               rtol=5e-6, atol=1e-30)
    assert all(x.isfinite().all() for x in grads)


def test_gradients_are_zero_at_ties():
    generator = torch.Generator().manual_seed(0)
    for d in (1, 20, 32):
        q = torch.randn(1, 1, 50, d, generator=generator)
        k = q[:, :, :20].clone()
        weight = torch.zeros(1, 1, 50, 20)
        weight.diagonal(dim1=-2, dim2=-1).fill_(1)
        for x in run('laplacian', q, k, weight)[1:]:
            assert (x == 0).all()
        # A tie in one channel alone.
        k = k + 1
        k[..., 0] = q[:, :, :20, 0]
        output, *grads = run('laplacian', q, k, weight)
        for x in grads:
            assert (x[..., 0] == 0).all() and (x[:, :, :20, 1:] != 0).all()
        if d > 1:
            torch.testing.assert_close(grads[0][0, 0, :20, 1], output[0, 0].diagonal() / 4)


def test_a_difference_below_normal_numbers_is_no_tie():
    k = torch.tensor([[[[1e-40], [-1e-40], [0.]]]])
    grad_q, grad_k = run('laplacian', torch.zeros(1, 1, 1, 1), k, torch.ones(1, 1, 1, 3), 1.0)[1:]
    assert grad_k.flatten().tolist() == [-1, 1, 0] and grad_q.item() == 0


@kernels
def test_equal_tokens_and_landmarks(kernel):
    x = torch.full((1, 2, 49, 32), 0.3)
    output, *grads = run(kernel, x, x, make_inputs(49, 49, 32)[2])
    assert (output == 1).all() and all((grad == 0).all() for grad in grads)
    x = make_inputs(49, 49, 32)[0]
    output = cpu_impl.kernel_matrix(x, x, 4.0, kernel)
    assert torch.equal(output, output.mT) and (output.diagonal(dim1=-2, dim2=-1) == 1).all()


@kernels
@pytest.mark.parametrize('d', [1, 20, 32])
def test_nan_stays_where_the_formula_puts_it(kernel, d):
    q, k, grad = make_inputs(40, 20, d)
    q[0, 0, 7, 0] = float('nan')
    k[0, 1, 3, d - 1] = float('nan')
    got, want = run(kernel, q, k, grad), expected(kernel, q, k, grad)
    assert got[0].isnan().sum() == 20 + 40
    for x, exact in zip(got, want, strict=True):
        assert torch.equal(x.isnan(), exact.isnan())
    # Another group's token changes no bit of this one's.
    clean = run(kernel, *(x[:, 1:].contiguous() for x in make_inputs(40, 20, d)))
    dirty = run(kernel, *(x[:, 1:].contiguous() for x in (q, make_inputs(40, 20, d)[1], grad)))
    assert all(map(torch.equal, clean, dirty))


@kernels
def test_float32_accuracy_far_from_the_origin(kernel):
    """2 max(q, k) - q - k and the expanded square would cancel about a common offset."""
    q, k, grad = make_inputs(50, 20, 32)
    inputs = q + 30, k + 30, grad
    assert_right(run(kernel, *inputs), expected(kernel, *inputs))


@kernels
def test_any_alignment_of_the_storage(kernel):
    inputs = make_inputs(65, 49, 32)
    want = run(kernel, *inputs)
    for offset in (1, 2, 3):
        shifted = []
        for x in inputs:
            memory = torch.empty(x.numel() + offset)
            shifted.append(memory[offset:].view(x.shape).copy_(x))
            assert shifted[-1].data_ptr() % 16
        assert all(map(torch.equal, run(kernel, *shifted), want))


@kernels
def test_same_bits_twice_and_for_any_number_of_threads(kernel, set_threads):
    inputs = make_inputs(3136, 49, 32)
    set_threads(1)
    want = run(kernel, *inputs)
    for threads in (1, 2, 3, 5):
        set_threads(threads)
        assert all(map(torch.equal, run(kernel, *inputs), want))


def test_b45_no_size_or_offset_is_narrowed_to_32_bits():
    """2^31 elements do not fit here: the compiler says where 64 bits become 32."""
    compiler = cpu_runtime._find_compiler()
    command = [*compiler.command, *cpu_runtime._FLAGS, '-fopenmp', '-Wall', '-Wextra',
               '-Wconversion', '-Werror', '-x', 'c', '-fsyntax-only', '-']
    text = cpu_runtime.source_text('laplacian_kernel')
    result = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    narrowed = text.replace('const int64_t group = item / f->items',
                            'const int group = item / f->items')
    assert narrowed != text
    result = subprocess.run(command, input=narrowed, text=True, capture_output=True, check=False)
    assert result.returncode and 'conversion' in result.stderr


def test_b45_sizes_are_passed_in_64_bits(monkeypatch):
    """A larger tensor than memory holds, whose data nobody reads."""
    passed = []
    monkeypatch.setattr(cpu_runtime, 'call', lambda source, name, arguments:
                        passed.append([x for x in arguments if isinstance(x, ctypes.c_int64)]))
    q = torch.empty(1).expand(1, 1, 2**33, 16)
    k = torch.zeros(1, 1, 2, 16)
    monkeypatch.setattr(torch.Tensor, 'new_empty', lambda x, *shape: torch.empty(1))
    cpu_impl.kernel_matrix(q, k, 4.0, 'laplacian')
    assert [x.value for x in passed[0]] == [1, 2**33, 2, 16]


# Every tensor ends where a page without access begins.
GUARDED = """
import ctypes, mmap
from ctypes import c_float, c_int, c_int64
import torch
from mmlaplacian.ops import cpu_runtime

libc, maps = ctypes.CDLL(None), []

def guarded(*shape):
    count = torch.Size(shape).numel()
    size = -(-count * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
    maps.append(mmap.mmap(-1, size + mmap.PAGESIZE))
    x = torch.frombuffer(maps[-1], dtype=torch.float32, count=count, offset=size - count * 4)
    end = ctypes.c_void_p(x.data_ptr() + count * 4)
    assert libc.mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return x.view(shape).fill_(0.25)

lanes = cpu_runtime.constant('laplacian_kernel', 'lanes')
for n, m, d in [(1, 1, 1), (17, 3, 5), (65, 50, 33), (49, 49, lanes), (30, 300, 3 * lanes)]:
    q, k, out, grad = guarded(2, n, d), guarded(2, m, d), guarded(2, n, m), guarded(2, n, m)
    sizes = [c_int64(x) for x in (2, n, m, d)]
    cpu_runtime.call('laplacian_kernel', 'laplacian_kernel_forward', (
        q, k, out, c_int(0), c_float(-1), c_float(0), *sizes, c_int(1)))
    assert (out == 1).all()
    if d % lanes == 0:
        grad_q, grad_k = guarded(2, n, d), guarded(2, m, d)
        cpu_runtime.call('laplacian_kernel', 'laplacian_kernel_backward', (
            grad, q, k, out, grad_q, guarded(2, -(-n // 8), m, d), grad_k, c_int(0), c_float(-1),
            *sizes, c_int64(8), c_int(1)))
        assert (grad_q == 0).all() and (grad_k == 0).all()
print('inside')
"""


def test_reads_and_writes_stay_inside_the_tensors():
    result = subprocess.run([sys.executable, '-c', GUARDED], text=True, capture_output=True,
                            check=False, timeout=120)
    assert (result.returncode, result.stdout) == (0, 'inside\n'), result.stderr


@pytest.mark.parametrize('tensor, message', [
    (SimpleNamespace(device=torch.device('cuda', 0), dtype=torch.float32),
     'need CPU tensors, got cuda:0'),
    (torch.zeros(1, 1, 2, 3, dtype=torch.float64), 'take torch.float32, got torch.float64'),
    (torch.zeros(1, 1, 2, 3, dtype=torch.bfloat16), 'take torch.float32, got torch.bfloat16')])
def test_refused_tensors(tensor, message):
    with pytest.raises(UnsupportedError, match=message):
        cpu_impl.check(tensor)


def test_the_compiler_s_reason_is_passed_on(monkeypatch):
    cpu_impl.check(torch.zeros(1, 1, 2, 3))
    monkeypatch.setattr(cpu_runtime, '_library', lambda source: UnsupportedError('the reason'))
    with pytest.raises(UnsupportedError, match='the reason'):
        cpu_impl.check(torch.zeros(1, 1, 2, 3))
