"""What every op keeps to on a CUDA device: streams, devices, graphs, bits, memory."""

import ctypes
import warnings
from collections import Counter

import pytest
import torch

from mmlaplacian.ops import (
    cupy_runtime,
    gaussian_kernel,
    laplacian_kernel,
    newton_schulz_inverse,
    nystrom_attention,
    use_backend,
)
from mmlaplacian.ops.backend import UnsupportedError

pytestmark = pytest.mark.gpu
DEVICE = torch.device('cuda')
RIDGE = 1e-2
SOURCES = {'laplacian_kernel': {'laplacian_kernel'}, 'gaussian_kernel': {'laplacian_kernel'},
           'newton_schulz_inverse': {'newton_schulz'},
           'newton_schulz_inverse, 150': {'newton_schulz'},
           'nystrom_attention': {'nystrom_attention', 'nystrom_attention_backward',
                                 'newton_schulz'}}
OPS = {'laplacian_kernel': lambda q, k: laplacian_kernel(q, k, 4.0),
       'gaussian_kernel': lambda q, k: gaussian_kernel(q, k, 4.0),
       'newton_schulz_inverse': lambda w: newton_schulz_inverse(w, spd_lower_bound=RIDGE),
       'newton_schulz_inverse, 150': lambda w: newton_schulz_inverse(w, spd_lower_bound=RIDGE),
       'nystrom_attention': nystrom_attention}
ops = pytest.mark.parametrize('name', OPS)


def make_inputs(name, seed=0, device=DEVICE, n=1000):
    """Leaves in float32; W by the formula, so that no op is used to test another."""
    generator = torch.Generator().manual_seed(seed)
    if name.startswith('newton_schulz_inverse'):
        m = int(name.partition(', ')[2] or 49)
        x = torch.randn(6, m, 32, generator=generator) * .3
        inputs = [(torch.cdist(x, x, p=1) / -4).exp() + RIDGE * torch.eye(m)]
    else:
        q, k, v = (torch.randn(2, 2, n, 32, generator=generator) * .3 for _ in range(3))
        landmarks = k[:, :, :n // 49 * 49].unflatten(2, (49, -1)).mean(3)
        inputs = [q, landmarks] if name.endswith('kernel') else [q, k, v, landmarks]
    return [x.to(device).requires_grad_() for x in inputs]


def run(name, inputs):
    """The output and the gradients of a loss that weighs all of it."""
    output = OPS[name](*inputs)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]


def assert_close(got, want):
    for x, expected in zip(got, want, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-3,
                                   atol=1e-4 * expected.abs().max().item())


@pytest.fixture
def launches(monkeypatch):
    """Counts launches by source and function; they still take place."""
    counted = Counter()
    launch = cupy_runtime.launch

    def counting(kernel, *arguments, **options):
        counted[kernel.source, kernel.function] += 1
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(cupy_runtime, 'launch', counting)
    return counted


@ops
@pytest.mark.parametrize('backend', ['auto', 'cupy'])
def test_every_op_runs_the_kernels(name, backend, launches):
    inputs = make_inputs(name)
    with use_backend(backend), warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*plain torch')
        got = run(name, inputs)
    assert {source for source, _ in launches} == SOURCES[name]
    if 'laplacian_kernel' in SOURCES[name]:
        assert {function for source, function in launches if source == 'laplacian_kernel'} \
            == {f'laplacian_kernel_{step}'
                for step in ('forward', 'backward_q', 'backward_k', 'reduce_k')}
    counted = launches.total()
    with use_backend('torch'):
        assert_close(got, run(name, inputs))
    assert launches.total() == counted


def test_float64_is_left_to_torch_with_the_reason():
    q, k = (x.detach().double() for x in make_inputs('laplacian_kernel'))
    with pytest.raises(UnsupportedError, match='torch.float64'):
        laplacian_kernel(q, k, 4.0)
    with use_backend('auto'), warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*plain torch.*float64')
        out = laplacian_kernel(q, k, 4.0)
    torch.testing.assert_close(out, (torch.cdist(q, k, p=1) / -4).exp())


@ops
def test_same_bits_twice(name):
    inputs = make_inputs(name)
    for first, second in zip(run(name, inputs), run(name, inputs), strict=True):
        assert torch.equal(first, second)


@ops
def test_memory_does_not_grow(name):
    inputs = make_inputs(name)
    held = []
    for _ in range(50):
        run(name, inputs)
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert set(held[3:]) == {held[3]}


@pytest.mark.parametrize('name, repeats', [('laplacian_kernel', 50), ('newton_schulz_inverse', 5),
                                           ('newton_schulz_inverse, 150', 5),
                                           ('nystrom_attention', 5)])
def test_b04_work_queues_on_torchs_stream(name, repeats):
    """Inputs are NaN before a slow chain on a side stream ends, and NaN again right after."""
    ready = [x.detach() for x in make_inputs(name, n=8192)]
    late = [torch.full_like(x, float('nan')) for x in ready]
    expected = OPS[name](*ready)
    matrix = torch.randn(8192, 8192, device=DEVICE) / 8192**.5
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    outputs, still_busy = [], 0
    with torch.cuda.stream(stream):
        for _ in range(repeats):
            product = matrix
            for _ in range(3):
                product = product @ matrix
            for x, source in zip(late, ready, strict=True):
                x.copy_(source)
            outputs.append(OPS[name](*late))
            for x in late:
                x.fill_(float('nan'))
            still_busy += not stream.query()
            stream.synchronize()
    assert still_busy > repeats / 2, 'the chain was too short to tell one stream from another'
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-4,
                                   atol=1e-5 * expected.abs().max().item())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason='needs two CUDA devices')
@ops
def test_b22_tensors_of_another_device_than_the_current_one(name):
    expected = [x.cpu() for x in run(name, make_inputs(name))]
    before = torch.cuda.current_device()
    for index in (1, 0, 1):
        got = run(name, make_inputs(name, device=torch.device('cuda', index)))
        assert all(x.device.index == index for x in got)
        assert_close([x.cpu() for x in got], expected)
        assert torch.cuda.current_device() == before
    fail_to_compile(torch.device('cuda', 1))
    assert torch.cuda.current_device() == before


def fail_to_compile(device):
    """The text without its macros."""
    kernel = cupy_runtime.Kernel('laplacian_kernel', 'laplacian_kernel_forward', ())
    with pytest.raises(cupy_runtime.KernelCompileError, match='update CuPy') as info:
        cupy_runtime.launch(kernel, 1, 32, (ctypes.c_longlong(1), ), device)
    assert 'HEAD_DIM' in str(info.value.__cause__)


def test_b25_failed_compilation_leaves_the_device_usable():
    for _ in range(2):
        fail_to_compile(torch.device('cuda', torch.cuda.current_device()))
    q, k = make_inputs('laplacian_kernel')
    assert laplacian_kernel(q, k, 4.0).isfinite().all()


def test_b22_tensors_on_two_devices_are_refused():
    q, k = make_inputs('laplacian_kernel')
    with pytest.raises(ValueError, match='one device'):
        laplacian_kernel(q, k.cpu(), 4.0)


@ops
def test_b43_nothing_then_something(name):
    """A launch of no blocks would show in the unrelated work after it."""
    empty = [x.detach()[:0].requires_grad_() for x in make_inputs(name)]
    for x in run(name, empty):
        assert x.shape[0] == 0
    assert torch.arange(1000, device=DEVICE).sum().item() == 499500
    torch.cuda.synchronize()


def warm_up(function):
    """On a side stream, as a capture asks for: kernels are compiled, workspaces made."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)


@ops
@pytest.mark.parametrize('backward', [False, True], ids=['forward', 'backward'])
def test_graph_replays_with_new_inputs(name, backward):
    static = make_inputs(name)

    def step():
        return run(name, static) if backward else [OPS[name](*static).detach()]

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        fresh = make_inputs(name, seed)
        with torch.no_grad():
            for x, source in zip(static, fresh, strict=True):
                x.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        expected = run(name, fresh)
        # The same launches on the same values; cuBLAS may choose other products in a capture.
        assert_close(captured, expected if backward else expected[:1])
