"""The C form of the whitened attention against the torch form in float64."""

import platform
import shutil
import subprocess
import sys
from ctypes import c_float, c_int, c_int64

import pytest
import torch
import torch.nn.functional as F

from mmlaplacian.ops import cpu_runtime, nystrom_attention, use_backend
from mmlaplacian.ops.newton_schulz import default_iters
from mmlaplacian.ops.nystrom_attention import cpu_impl, reference, torch_impl
from mmlaplacian.ops.nystrom_attention.tiles import empty_tokens

if not any(map(shutil.which, ('cc', 'gcc', 'clang'))):
    pytest.skip('no C compiler on PATH: cc, gcc or clang', allow_module_level=True)

SOURCE = 'nystrom_attention'
EPS = torch.finfo(torch.float32).eps
NAMES = ('out', 'grad_q', 'grad_k', 'grad_v', 'grad_landmarks')
kernels = pytest.mark.parametrize('kernel', ['laplacian', 'gaussian'])
# n, m, d, d_v, B, h: tiles are of 192 tokens with AVX-512, chunks of 768.
SHAPES = [
    (1, 1, 8, 32, 3, 2), (1, 130, 64, 1, 1, 1), (2, 3, 1, 8, 1, 1), (2, 49, 32, 16, 1, 1),
    (47, 4, 20, 16, 1, 3), (48, 5, 16, 20, 1, 2), (48, 3, 160, 72, 1, 5), (49, 8, 33, 32, 2, 2),
    (191, 49, 32, 33, 1, 2), (192, 64, 48, 32, 1, 1), (193, 65, 64, 48, 2, 1),
    (193, 256, 8, 160, 1, 1), (767, 49, 72, 32, 2, 3), (769, 130, 32, 64, 1, 1),
    (1537, 1, 16, 1, 1, 4), (1537, 256, 20, 8, 1, 1), (1537, 49, 1, 32, 1, 1)]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """What the C text does not write is NaN, in its results and in its scratch memory."""
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


@pytest.fixture
def replace_text(monkeypatch):
    """Has another text compiled in the place of the C text, with the flags in force."""
    text_of, library_of = cpu_runtime.source_text, cpu_runtime._library

    def replace(old, new):
        assert text_of(SOURCE).count(old) == 1
        monkeypatch.setattr(cpu_runtime, 'source_text',
                            lambda source: text_of(source).replace(old, new))
        other = cpu_runtime._load(SOURCE)
        monkeypatch.setattr(cpu_runtime, '_library',
                            lambda source: other if source == SOURCE else library_of(source))

    return replace


def make_inputs(n, m=49, d=32, d_v=None, batch=1, heads=2, kernel='laplacian'):
    """q, k, v, landmarks and an incoming gradient; kernel values of about 1/e, whatever d is."""
    generator = torch.Generator().manual_seed(n * 7919 + m * 31 + d)

    def normal(tokens, channels, scale=1.):
        return torch.randn(batch, heads, tokens, channels, generator=generator) * scale

    scale, d_v = 4 / d if kernel == 'laplacian' else 2 / d**0.5, d_v or d
    return (normal(n, d, scale), normal(n, d, scale), normal(n, d_v), normal(m, d, scale),
            normal(n, d_v))


def smooth_inputs(n, spread, offset=0.3, heads=2):
    """The same, where tokens differ by ``spread`` and landmarks are means of keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, heads, n, 32, generator=generator, dtype=torch.float64)
    q, k = (x * spread + torch.randn(32, generator=generator, dtype=torch.float64) * offset
            for x in (q, k))
    landmarks = F.adaptive_avg_pool1d(k[0].mT, 49).mT[None]
    return tuple(x.float() for x in (q, k, v, landmarks, grad))


def run(form, inputs, kernel='laplacian', kernel_scale=4.0, ridge=1e-2, whiten_eps=1e-5,
        solver_iters=None, backward=None):
    """Output and gradients by one form, or with another form's backward."""
    *tensors, grad = inputs
    with use_backend('torch' if form is torch_impl else 'auto'):
        out, kept = form.nystrom_attention(*tensors, kernel_scale, ridge, whiten_eps,
                                           solver_iters, kernel, 'whiten')
        return out, *(backward or form).nystrom_attention_backward(
            grad, *tensors, kept, kernel_scale, whiten_eps, kernel, 'whiten')


def expected(inputs, *arguments, **options):
    return run(torch_impl, [x.double() for x in inputs], *arguments, **options)


def assert_as_accurate(inputs, factor, roundings, *arguments, each=False, **options):
    """The C form's errors are at most ``factor`` times the torch form's, plus roundings of the
    output and of the largest gradient, or of ``each``."""
    single = run(torch_impl, inputs, *arguments, **options)
    exact = expected(inputs, *arguments, **options)
    largest = max(x.norm() for x in exact[1:])
    for name, got, other, want in zip(NAMES, run(cpu_impl, inputs, *arguments, **options), single,
                                      exact, strict=True):
        size = want.norm() if each or name == 'out' else largest
        assert (got - want).norm() <= factor * (other - want).norm() + roundings * EPS * size, name


def assert_same_bits(got, want):
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert torch.equal(x, y), name


@kernels
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_values_and_gradients(kernel, shape):
    assert_as_accurate(make_inputs(*shape, kernel), 2, 32, kernel)


@kernels
def test_values_against_the_dense_formula(kernel):
    """The torch form in float64 and the C form share no text, but their algebra."""
    *tensors, grad = make_inputs(193, 20, 32, 16, kernel=kernel)
    leaves = [x.double().requires_grad_() for x in tensors]
    out = reference.nystrom_attention(*leaves, 4.0, 1e-2, 1e-5, kernel, 'whiten')
    exact = out.detach(), *torch.autograd.grad(out, leaves, grad.double())
    for name, got, want in zip(NAMES, run(cpu_impl, (*tensors, grad), kernel), exact,
                               strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm(), name


@pytest.mark.parametrize('m, normalize, served', [
    (256, 'whiten', True), (257, 'whiten', False), (9, 'row', False), (9, 'none', False)])
@pytest.mark.parametrize('backend', ['auto', 'cpu'])
def test_what_is_left_to_the_torch_form(m, normalize, served, backend, monkeypatch):
    *tensors, grad = make_inputs(100, m)
    called, call = [], cpu_runtime.call
    monkeypatch.setattr(cpu_runtime, 'call', lambda source, function, arguments: (
        called.append(function), call(source, function, arguments)))
    with use_backend(backend):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = nystrom_attention(*leaves, normalize=normalize)
        got = out.detach(), *torch.autograd.grad(out, leaves, grad)
    assert ('nystrom_attention_forward' in called, 'nystrom_attention_backward' in called) \
        == (served, served)
    # Its kernels are those of the C text all the same.
    assert {'laplacian_kernel_forward', 'laplacian_kernel_backward'} <= set(called)
    leaves = [x.double().requires_grad_() for x in tensors]
    out = reference.nystrom_attention(*leaves, 4.0, 1e-2, 1e-5, 'laplacian', normalize)
    want = out.detach(), *torch.autograd.grad(out, leaves, grad.double())
    for name, x, exact in zip(NAMES, got, want, strict=True):
        assert (x - exact).norm() <= 1e-4 * exact.norm(), name


@pytest.mark.parametrize('forms', [(cpu_impl, torch_impl), (torch_impl, cpu_impl)],
                         ids=['C, torch', 'torch, C'])
def test_one_form_s_backward_takes_what_the_other_kept(forms):
    """The backend may change between the two."""
    inputs = make_inputs(500)
    for name, got, want in zip(NAMES, run(forms[0], inputs, backward=forms[1]), expected(inputs),
                               strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm(), name


# ---- Strides ----


def beside(x):
    """A token's heads beside each other."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def transposed_channels(x):
    return x.mT.contiguous().mT


def at_an_offset(x):
    return torch.empty(x.numel() + 3)[3:].view(x.shape).copy_(x)


def every_other_token(x):
    return x.repeat_interleave(2, 2)[:, :, ::2]


def every_other_channel(x):
    return x.repeat_interleave(2, 3)[..., ::2]


LAYOUTS = [beside, transposed_channels, at_an_offset, every_other_token, every_other_channel]


@pytest.mark.parametrize('d', [32, 20])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_any_strides(layout, d):
    inputs = make_inputs(200, 9, d, d, 2, 3)
    want = run(cpu_impl, inputs)
    assert_same_bits(run(cpu_impl, [layout(x) for x in inputs]), want)
    # One tensor alone: another one's strides would show.
    for i in range(5):
        assert_same_bits(
            run(cpu_impl, [layout(x) if i == j else x for j, x in enumerate(inputs)]), want)


@pytest.mark.parametrize('d', [32, 20])
def test_slices_of_one_projection(d):
    inputs = make_inputs(200, 9, d, d, 2, 3)
    joint = torch.stack(inputs[:3]).permute(1, 3, 0, 2, 4).contiguous()
    slices = joint.permute(2, 0, 3, 1, 4).unbind()
    assert all(x.stride() == slices[0].stride() and not x.is_contiguous() for x in slices)
    assert_same_bits(run(cpu_impl, (*slices, *inputs[3:])), run(cpu_impl, inputs))


@pytest.mark.parametrize('dim', [(0, ), (1, ), (2, ), (3, ), (0, 1, 2, 3)], ids=str)
def test_expanded_tensors(dim):
    """Strides of 0, as the gradient of a mean or a sum has."""
    inputs = make_inputs(200, 9, batch=2, heads=3)
    for i in (0, 1, 2, 4):
        narrow = inputs[i]
        for axis in dim:
            narrow = narrow.narrow(axis, 0, 1)
        expanded = narrow.expand_as(inputs[i])
        assert_same_bits(
            run(cpu_impl, [expanded if i == j else x for j, x in enumerate(inputs)]),
            run(cpu_impl, [expanded.contiguous() if i == j else x
                           for j, x in enumerate(inputs)]))


@pytest.mark.parametrize('d, d_v', [(32, 48), (20, 33), (32, 1)])
def test_results_have_heads_beside_each_other(d, d_v):
    *tensors, grad = make_inputs(50, 9, d, d_v, 2, 3)
    out, grad_q, grad_k, grad_v, grad_landmarks = run(cpu_impl, (*tensors, grad))
    for x, like in zip((out, grad_q, grad_k, grad_v), (grad, *tensors[:3]), strict=True):
        assert x.shape == like.shape and x.stride() == empty_tokens(like).stride()
    assert grad_landmarks.is_contiguous()
    options = 1e-2, 1e-5, None, 'laplacian', 'whiten'
    operators = torch.ops.mmlaplacian
    torch.library.opcheck(operators.nystrom_attention.default,
                          (*(beside(x).requires_grad_() for x in tensors), 4.0, *options))
    kept = operators.nystrom_attention(*tensors, 4.0, *options)[1:]
    torch.library.opcheck(operators.nystrom_attention_backward.default,
                          (grad.mean(2, keepdim=True).expand_as(grad), *tensors, kept, 4.0, 1e-5,
                           'laplacian', 'whiten'))


def test_compiles_as_one_graph():
    *tensors, grad = make_inputs(100, 9, 20, 33)
    torch._dynamo.reset()
    compiled = torch.compile(nystrom_attention, fullgraph=True, backend='aot_eager')
    results = []
    for function in (compiled, nystrom_attention):
        leaves = [beside(x).requires_grad_() for x in tensors]
        out = function(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    assert_same_bits(*results)


# Every tensor that the op is given or makes ends where a page without access begins; what lies
# before it on its first page stays zero.
GUARDED = """
import ctypes, mmap
import torch
from mmlaplacian.ops.nystrom_attention import cpu_impl
from mmlaplacian.ops import cpu_runtime

libc, maps = ctypes.CDLL(None), []

def guarded(*shape, dtype=torch.float32):
    shape = shape[0] if shape and not isinstance(shape[0], int) else shape
    count, bytes_each = torch.Size(shape).numel(), dtype.itemsize
    size = -(-count * bytes_each // mmap.PAGESIZE) * mmap.PAGESIZE
    offset = size - count * bytes_each
    maps.append((mmap.mmap(-1, size + mmap.PAGESIZE), offset))
    x = torch.frombuffer(maps[-1][0], dtype=dtype, count=count, offset=offset)
    end = ctypes.c_void_p(x.data_ptr() + count * bytes_each)
    assert libc.mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    # What is not written is NaN.
    return x.view(shape).fill_(float('nan') if dtype.is_floating_point else 0)

def beside(batch, heads, n, d):
    return guarded(batch, n, heads, d).transpose(1, 2)

torch.empty = guarded
torch.empty_like = lambda x: guarded(*x.shape)
torch.Tensor.new_empty = lambda x, *shape: guarded(*shape)
cpu_impl.empty_tokens = lambda x: beside(*x.shape)
lanes = cpu_runtime.constant('nystrom_attention', 'lanes')
for n, m, d, d_v in [(1, 1, lanes, 2 * lanes), (2, 3, lanes, lanes), (47, 5, 2 * lanes, lanes),
                     (193, 50, 3 * lanes, 4 * lanes), (385, 49, 5 * lanes, 2 * lanes),
                     (50, 130, lanes, 2 * lanes), (1537, 8, 2 * lanes, 2 * lanes)]:
    generator = torch.Generator().manual_seed(0)
    def random(x):
        return x.copy_(torch.randn(x.shape, generator=generator) * 4 / d)
    q, k = (random(beside(2, 2, n, d)) for _ in range(2))
    v, grad = random(guarded(2, 2, n, d_v)), random(beside(2, 2, n, d_v))
    landmarks = random(guarded(2, 2, m, d))
    for batch in (q, q[:, :, -1:].expand_as(q)):
        out, kept = cpu_impl.nystrom_attention(
            batch, k, v, landmarks, 4.0, 1e-2, 1e-5, None, 'laplacian', 'whiten')
        results = out, *cpu_impl.nystrom_attention_backward(
            grad, batch, k, v, landmarks, kept, 4.0, 1e-5, 'laplacian', 'whiten')
        assert all(x.isfinite().all() for x in results), (n, m)
        assert not any(any(memory[:offset]) for memory, offset in maps), (n, m)
print('inside')
"""


def test_reads_and_writes_stay_inside_the_tensors():
    result = subprocess.run([sys.executable, '-c', GUARDED], text=True, capture_output=True,
                            check=False, timeout=120)
    assert (result.returncode, result.stdout) == (0, 'inside\n'), result.stderr


# ---- Accuracy ----


@pytest.mark.parametrize('spread', [1e-3, 1e-2, 0.1, 0.5, 2.0])
@pytest.mark.parametrize('n', [49, 400, 3136])
def test_accuracy_on_nearly_flat_maps(spread, n):
    assert_as_accurate(smooth_inputs(n, spread), 1.5, 16, each=True)


def covariance_of(inputs):
    """That of the kernel's rows, and their mean, as the forward keeps them."""
    mean, covariance = cpu_impl.nystrom_attention(*inputs[:4], 4.0, 1e-2, 1e-5, None, 'laplacian',
                                                  'whiten')[1][3:]
    c = reference.KERNELS['laplacian'](inputs[0].double(), inputs[3].double(), 4.0).flatten(0, 1)
    centered = c - c.mean(1, keepdim=True)
    return (mean, covariance), (c.mean(1, keepdim=True), centered.mT @ centered / c.shape[1])


def assert_statistics(inputs, rtol):
    for got, want in zip(*covariance_of(inputs), strict=True):
        assert (got - want).norm() <= rtol * want.norm()


def test_covariance_of_nearly_equal_queries_does_not_cancel():
    """Variances of 1e-9 about means of 0.4, over several chunks; the offset is exact."""
    inputs = list(make_inputs(20_000, 9, heads=1))
    inputs[0] = (inputs[0][:, :, :1] + 1e-3 * inputs[0]) + 2
    inputs[1], inputs[3] = inputs[1] + 2, inputs[3] + 2
    assert_statistics(inputs, 1e-3)
    assert_as_accurate(inputs, 1.5, 16)


@pytest.mark.parametrize('outlying', [slice(192), slice(1), slice(-1, None), slice(768, 1536)],
                         ids=['first tile', 'first token', 'last token', 'second chunk'])
def test_covariance_with_outlying_tokens(outlying):
    """What tiles and chunks are centred with is far from the mean of all."""
    inputs = make_inputs(4000, 9, heads=1)
    inputs[0][:, :, outlying] = inputs[3][:, :, :1] + 0.01 * inputs[0][:, :, outlying]
    assert_statistics(inputs, 1e-5)
    assert_as_accurate(inputs, 2, 32)


@pytest.mark.parametrize('n', [767, 768, 769, 1000, 1537, 4000])
def test_covariance_of_tokens_that_drift(n):
    """Chunks of unlike means and lengths."""
    inputs = make_inputs(n, 9, heads=1)
    inputs[0].add_(torch.linspace(-0.2, 0.2, n)[:, None])
    assert_statistics(inputs, 1e-5)


@pytest.mark.parametrize('options', [
    dict(whiten_eps=1e-12), dict(whiten_eps=10.), dict(whiten_eps=1e30), dict(ridge=10.),
    dict(ridge=1e-3), dict(kernel_scale=0.5)], ids=str)
def test_options(options):
    assert_as_accurate(make_inputs(400), 2, 32, **options)


@pytest.mark.parametrize('kernel_scale', [20., 1000.])
def test_flat_kernels(kernel_scale):
    """P is large, and so is what it makes of roundings in sums over tokens."""
    assert_as_accurate(make_inputs(3136), 1.5, 16, each=True, kernel_scale=kernel_scale)


@pytest.mark.parametrize('ridge', [2.02 * 49 * EPS, 1e-4, 1e-3])
@pytest.mark.parametrize('whiten_eps', [1e-5, 1e-12])
def test_small_ridge_on_smooth_maps(ridge, whiten_eps):
    inputs = smooth_inputs(400, 0.5)
    assert_as_accurate(inputs, 2, 32, ridge=ridge, whiten_eps=whiten_eps)


def test_variance_that_rounds_below_zero():
    """Queries of two values: some keys' variance is all rounding. It is held at 0, without a
    gradient, which would be 1e20 and more."""
    inputs = list(make_inputs(4000, heads=8))
    inputs[0] = inputs[0][:, :, :2].repeat(1, 1, 2000, 1)
    out, *grads = run(cpu_impl, inputs, whiten_eps=1e-24)
    assert out.isfinite().all()
    for name, grad in zip(NAMES[1:], grads, strict=True):
        assert (grad.abs() < 1e15).all(), name


@pytest.mark.parametrize('solver_iters', [1, 2, 3, 30])
def test_steps_of_the_solver(solver_iters):
    """Before convergence too: the steps are those of the torch form."""
    inputs = make_inputs(400)
    got = run(cpu_impl, inputs, solver_iters=solver_iters)
    want = expected(inputs, solver_iters=solver_iters)
    for name, x, exact in zip(NAMES, got, want, strict=True):
        assert (x - exact).norm() <= 2e-5 * exact.norm(), name


def test_default_steps_are_those_of_float32():
    inputs = make_inputs(100)
    steps = default_iters(49, 1e-2, torch.float32)
    assert_same_bits(run(cpu_impl, inputs), run(cpu_impl, inputs, solver_iters=steps))
    fewer = run(cpu_impl, inputs, solver_iters=3)
    assert not torch.equal(fewer[0], run(cpu_impl, inputs)[0])


def test_equal_tokens():
    """No variance: the mean value, whatever the landmarks."""
    x = torch.full((1, 2, 500, 32), 0.3)
    v, landmarks, grad = (make_inputs(500)[i] for i in (2, 3, 4))
    for marks in (landmarks, x[:, :, :49]):
        out, *grads = run(cpu_impl, (x, x, v, marks, grad))
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
        assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0] == 0).all() and (grads[1] == 0).all()


def test_one_token_gives_its_value():
    *tensors, grad = make_inputs(1, 9, batch=2)
    out, grad_q, grad_k, grad_v, grad_landmarks = run(cpu_impl, (*tensors, grad))
    assert torch.equal(out, tensors[2]) and torch.equal(grad_v, grad)
    assert all((x == 0).all() for x in (grad_q, grad_k, grad_landmarks))


# ---- The same bits ----


@pytest.mark.parametrize('kept', [1, 1 << 18], ids=['no tiles', 'fewer groups at once'])
@kernels
def test_kept_tiles_or_computed_again(kernel, kept, replace_text):
    shapes = [(1000, 49, 32, 20, 1, 5), (193, 5, 20, 32, 3, 2), (2000, 130, 16, 16, 1, 2)]
    inputs = [make_inputs(*shape, kernel) for shape in shapes]
    want = [run(cpu_impl, x, kernel) for x in inputs]
    before = scratch_bytes('forward', 5, 1000)
    replace_text('KEPT = 1 << 20', f'KEPT = {kept}')
    assert scratch_bytes('forward', 5, 1000) < before
    for x, y in zip(inputs, want, strict=True):
        assert_same_bits(run(cpu_impl, x, kernel), y)


def test_groups_alone_and_together():
    inputs = make_inputs(1000, batch=3, heads=4)
    together = run(cpu_impl, inputs)
    for image in range(3):
        for head in range(4):
            part = slice(image, image + 1), slice(head, head + 1)
            assert_same_bits(run(cpu_impl, [x[part] for x in inputs]),
                             [x[part] for x in together])


@pytest.mark.parametrize('shape', [(3136, 49, 32, 32, 1, 2), (800, 20, 32, 64, 1, 12),
                                   (20_000, 49, 32, 32, 1, 1)], ids=str)
def test_same_bits_twice_and_for_any_number_of_threads(shape, set_threads):
    inputs = make_inputs(*shape)
    assert inputs[0].numel() * shape[1] > 5 * 2**18
    set_threads(1)
    want = run(cpu_impl, inputs)
    for threads in (1, 2, 3, 5):
        set_threads(threads)
        assert_same_bits(run(cpu_impl, inputs), want)


# ---- What is not finite ----


@kernels
@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('which', range(5), ids='q k v landmarks grad'.split())
def test_what_is_not_finite_stays_in_its_group(which, value, kernel):
    clean = make_inputs(300, 9, 32, 16, 3, 2, kernel)
    want = run(cpu_impl, clean, kernel)
    dirty = [x.clone() for x in clean]
    dirty[which][1, 0, 3, 7] = value
    got, exact = run(cpu_impl, dirty, kernel), expected(dirty, kernel)
    for name, x, y, z in zip(NAMES, got, want, exact, strict=True):
        others = torch.ones(3, 2, dtype=torch.bool)
        others[1, 0] = False
        assert torch.equal(x[others], y[others]), name
        # As in the formula, if not entry by entry: sums carry it further or not.
        assert x.isfinite().all() == z.isfinite().all(), name


# ---- Compilers, processors, memory ----


@pytest.mark.skipif(platform.machine() != 'x86_64', reason='the flags are those of x86-64')
@pytest.mark.parametrize('flag, lanes', [('-march=x86-64', 4), ('-march=haswell', 8)])
def test_processors_with_narrower_vectors(flag, lanes, monkeypatch):
    if lanes == 8 and cpu_runtime.constant(SOURCE, 'lanes') < 8:
        pytest.skip('this processor has no AVX2')
    monkeypatch.setattr(cpu_runtime, '_FLAGS', (*cpu_runtime._FLAGS, flag))
    narrow = {source: cpu_runtime._load(source) for source in (SOURCE, 'laplacian_kernel')}
    monkeypatch.setattr(cpu_runtime, '_library', narrow.__getitem__)
    assert cpu_runtime.constant(SOURCE, 'lanes') == lanes
    for kernel in ('laplacian', 'gaussian'):
        for shape in [(1, 1, 1, 8, 1, 2), (31, 3, 8, 20, 2, 1), (33, 50, 32, 33, 1, 2),
                      (65, 130, 72, 4, 1, 1), (1537, 49, 12, 32, 1, 2), (769, 256, 20, 8, 1, 1)]:
            assert_as_accurate(make_inputs(*shape, kernel), 2, 32, kernel)
    assert_as_accurate(smooth_inputs(400, 1e-2), 1.5, 16)


def test_b45_no_size_or_offset_is_narrowed_to_32_bits():
    """2^31 elements do not fit here: the compiler says where 64 bits become 32."""
    compiler = cpu_runtime._find_compiler()
    command = [*compiler.command, *cpu_runtime._FLAGS, '-fopenmp', '-Wall', '-Wextra',
               '-Wconversion', '-Werror', '-x', 'c', '-fsyntax-only', '-']
    text = cpu_runtime.source_text(SOURCE)
    result = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    narrowed = text.replace('const int64_t local = item / p->chunks,',
                            'const int local = item / p->chunks,')
    assert narrowed != text
    result = subprocess.run(command, input=narrowed, text=True, capture_output=True, check=False)
    assert result.returncode and 'conversion' in result.stderr


def scratch_bytes(direction, groups, n, m=49, d=32, threads=2):
    """What the C function asks for."""
    tensors, strides = {'forward': (6, 12), 'backward': (12, 21)}[direction]
    results, numbers = {'forward': (4, 1), 'backward': (2, 0)}[direction]
    floats = torch.zeros((), dtype=torch.int64)
    scalars = (c_float(1e-2), c_int64(10), c_int(0), c_float(-1), c_float(0), c_float(1e-5)) \
        if numbers else (c_int(0), c_float(-1), c_float(0), c_float(-1), c_float(1e-5))
    cpu_runtime.call(SOURCE, f'nystrom_attention_{direction}', (
        *[None] * tensors, (c_int64 * strides)(), *[None] * results, None, floats, *scalars,
        *map(c_int64, (groups, groups, n, m, d, d)), c_int(threads)))
    return 4 * int(floats)


@pytest.mark.parametrize('direction', ['forward', 'backward'])
@pytest.mark.parametrize('groups', [1, 2, 16])
def test_memory_does_not_grow_with_the_tokens(direction, groups):
    largest = scratch_bytes(direction, groups, 200_704)
    assert largest < 40e6
    assert largest <= 1.05 * scratch_bytes(direction, groups, 50_000)
    # Over all sizes: what is kept ends where it would be more.
    assert max(scratch_bytes(direction, groups, n) for n in range(1, 60_000, 997)) < 40e6


def test_memory_that_is_said_is_memory_that_is_taken(monkeypatch):
    sizes = []
    call = cpu_runtime.call
    monkeypatch.setattr(cpu_runtime, 'call', lambda source, function, arguments: (
        sizes.extend(x.numel() for x in arguments
                     if isinstance(x, torch.Tensor) and x.dim() == 1),
        call(source, function, arguments)))
    run(cpu_impl, make_inputs(1000))
    threads = cpu_runtime.threads(2 * 1000 * 32 * 49)
    assert [4 * size for size in sizes if size > 1] == [
        scratch_bytes(direction, 2, 1000, threads=threads)
        for direction in ('forward', 'backward')]
