"""The ops as torch.library operators: schema, fake tensors, compile, autocast, FLOPs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from mmlaplacian.ops import (
    gaussian_kernel,
    laplacian_kernel,
    newton_schulz_inverse,
    nystrom_attention,
)
from mmlaplacian.ops.newton_schulz import default_iters
from mmlaplacian.ops.nystrom_attention import NORMALIZATIONS

OPERATORS = torch.ops.mmlaplacian


def inputs(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=generator, dtype=torch.float64) * .5).to(dtype)
            .requires_grad_() for shape in shapes]


def spd_matrices(batch=2, m=9, dtype=torch.float32):
    x, = inputs((batch, 1, m, 8), dtype=dtype)
    w = laplacian_kernel(x.detach(), x.detach(), 4.0)[:, 0]
    return (w + 1e-2 * torch.eye(m, dtype=dtype)).requires_grad_()


def operator_calls(dtype):
    q, k = inputs((2, 2, 9, 4), (2, 2, 5, 4), dtype=dtype)
    grad, output = inputs((2, 2, 9, 5), (2, 2, 9, 5), dtype=dtype)
    w = spd_matrices(dtype=dtype)
    for kernel in ('laplacian', 'gaussian'):
        yield OPERATORS.kernel_matrix, (q, k, 4.0, kernel)
        for needs in ((True, True), (True, False), (False, True)):
            yield OPERATORS.kernel_matrix_backward, (
                *(x.detach() for x in (grad, q, k, output)), 4.0, kernel, *needs)
    yield OPERATORS.newton_schulz_inverse, (w, None, 1e-2)
    yield OPERATORS.newton_schulz_inverse, (w, 20, None)
    yield OPERATORS.newton_schulz_inverse_backward, (w.detach(), w.detach() + 1)
    yield OPERATORS.newton_schulz_residual, (w.detach(), w.detach() + 1)
    q, k, v, landmarks, grad = inputs((2, 2, 9, 4), (2, 2, 9, 4), (2, 2, 9, 3), (2, 2, 5, 4),
                                      (2, 2, 9, 3), dtype=dtype)
    for normalize in NORMALIZATIONS:
        tensors = q, k, v, landmarks
        yield OPERATORS.nystrom_attention, (*tensors, 4.0, 1e-2, 1e-5, None, 'laplacian',
                                            normalize)
        tensors = [x.detach() for x in (grad, *tensors)]
        kept = OPERATORS.nystrom_attention(*tensors[1:], 4.0, 1e-2, 1e-5, None, 'laplacian',
                                           normalize)[1:]
        yield OPERATORS.nystrom_attention_backward, (*tensors, kept, 4.0, 1e-5, 'laplacian',
                                                     normalize)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_opcheck(dtype):
    """Schema, autograd registration, fake against real strides, AOT dispatch with symbols."""
    for operator, arguments in operator_calls(dtype):
        torch.library.opcheck(operator.default, arguments)


def test_opcheck_of_half_precision_and_strides():
    q, k = inputs((2, 9, 2, 4), (2, 5, 2, 4), dtype=torch.bfloat16)
    q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
    torch.library.opcheck(OPERATORS.kernel_matrix.default, (q, k, 4.0, 'laplacian'))


PUBLIC = {
    'laplacian_kernel': (lambda q, k: laplacian_kernel(q, k, 4.0), ((1, 2, 20, 8), (1, 2, 9, 8))),
    'gaussian_kernel': (lambda q, k: gaussian_kernel(q, k, 4.0), ((1, 2, 20, 8), (1, 2, 9, 8))),
    'newton_schulz_inverse': (
        lambda w: newton_schulz_inverse(w + 6 * torch.eye(9), return_residual=True)[0],
        ((2, 3, 9, 9), )),
    **{f'nystrom_attention, {normalize}': (
        lambda q, k, v, landmarks, normalize=normalize: nystrom_attention(
            q, k, v, landmarks, normalize=normalize),
        ((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 6), (1, 2, 9, 8)))
       for normalize in ('whiten', 'row', 'none')},
}
public = pytest.mark.parametrize('name', PUBLIC)


def run(function, leaves):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    output = function(*leaves)
    output.square().sum().backward()
    return [output.detach(), *(x.grad for x in leaves)]


@public
@pytest.mark.parametrize('dynamic', [False, True], ids=['static', 'dynamic'])
def test_compiles_as_one_graph(name, dynamic):
    function, shapes = PUBLIC[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend='aot_eager', dynamic=dynamic)
    leaves = inputs(*shapes)
    for got, want in zip(run(compiled, leaves), run(function, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_compiles_as_one_graph_with_options_as_symbols():
    """A module's own numbers are symbolic where sizes are dynamic."""
    torch._dynamo.reset()

    def function(q, k, v, landmarks, kernel_scale, ridge, whiten_eps):
        return nystrom_attention(q, k, v, landmarks, kernel_scale, ridge, whiten_eps) \
            + laplacian_kernel(q, k, kernel_scale).mean()

    compiled = torch.compile(function, fullgraph=True, backend='eager', dynamic=True)
    for n, options in ((20, (4., 1e-2, 1e-5)), (33, (3., 2e-2, 1e-4))):
        leaves = inputs((1, 2, n, 8), (1, 2, n, 8), (1, 2, n, 6), (1, 2, 9, 8))
        torch.testing.assert_close(compiled(*leaves, *options), function(*leaves, *options))


def test_compiles_under_autocast():
    function, shapes = PUBLIC['nystrom_attention, whiten']
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend='aot_eager')
    leaves = inputs(*shapes, dtype=torch.bfloat16)
    with torch.autocast('cpu', torch.bfloat16):
        torch.testing.assert_close(compiled(*leaves), function(*leaves))


@public
def test_fake_cuda_tensors_on_any_machine(name):
    function, shapes = PUBLIC[name]
    if name == 'newton_schulz_inverse':
        function = newton_schulz_inverse
    real = function(*inputs(*shapes))
    with FakeTensorMode():
        output = function(*(torch.empty(shape, device='cuda') for shape in shapes))
    assert (output.shape, output.stride()) == (real.shape, real.stride())
    assert output.device.type == 'cuda'


def test_fake_cuda_gradients():
    """Through the operators: autograd's engine would ask for a driver."""
    for operator, arguments in operator_calls(torch.float32):
        if 'backward' in str(operator):
            real = operator(*arguments)
            with FakeTensorMode():
                fake = operator(*tree_map_only(
                    torch.Tensor, lambda x: torch.empty(x.shape, device='cuda'), arguments))
            for got, want in zip(tree_leaves(fake), tree_leaves(real), strict=True):
                assert (got.shape, got.stride(), got.device.type) == (
                    want.shape, want.stride(), 'cuda')


@pytest.mark.parametrize('op', [laplacian_kernel, gaussian_kernel])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_b08_b09_autocast_computes_in_float32(op, dtype):
    q, k = inputs((1, 2, 30, 8), (1, 2, 9, 8), dtype=dtype)
    with torch.autocast('cpu', torch.bfloat16):
        output = op(q, k, 4.0)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, op(q.float(), k.float(), 4.0))
    output.sum().backward()
    assert (q.grad.dtype, k.grad.dtype) == (dtype, dtype)


def test_b08_solver_under_autocast_keeps_float32():
    w = spd_matrices().detach()
    with torch.autocast('cpu', torch.bfloat16):
        x, residual = newton_schulz_inverse(w, spd_lower_bound=1e-2, return_residual=True)
    assert torch.equal(x, newton_schulz_inverse(w, spd_lower_bound=1e-2))
    assert residual.max() < 1e-4


@pytest.mark.parametrize('function, leaves', [
    (lambda q, k: laplacian_kernel(q, k, 4.0), inputs((1, 1, 3, 2), (1, 1, 2, 2))),
    (lambda w: newton_schulz_inverse(w), [spd_matrices()])], ids=['kernel', 'solver'])
def test_second_derivative_is_refused(function, leaves):
    output = function(*leaves)
    grad, = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match='no autograd formula was registered'):
        grad.sum().backward()


@pytest.mark.parametrize('op', [laplacian_kernel, gaussian_kernel])
def test_flops_of_a_kernel(op):
    q, k = inputs((2, 3, 20, 8), (2, 3, 9, 8))
    elements = 2 * 3 * 20 * 9 * 8
    for needs_k, gradients in ((False, 1), (True, 2)):
        with FlopCounterMode(display=False) as counter:
            op(q, k if needs_k else k.detach(), 4.0).sum().backward()
        assert counter.get_total_flops() == 2 * elements + 3 * gradients * elements


def test_flops_of_the_solver():
    w = spd_matrices(batch=4)
    product = 2 * 4 * 9**3
    with FlopCounterMode(display=False) as counter:
        x, _ = newton_schulz_inverse(w, spd_lower_bound=1e-2, return_residual=True)
    steps = default_iters(9, 1e-2, torch.float32)
    assert counter.get_total_flops() == (2 * steps + 1) * product
    with FlopCounterMode(display=False) as counter:
        x.sum().backward()
    assert counter.get_total_flops() == 2 * product


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning',
                            'ignore:`torch.jit.trace` is deprecated:DeprecationWarning')
def test_traced_graph_holds_the_operators():
    q, k = (x.detach() for x in inputs((1, 1, 6, 4), (1, 1, 3, 4)))
    graph = str(torch.jit.trace(lambda q, k: laplacian_kernel(q, k, 4.0), (q, k)).graph)
    assert 'mmlaplacian::kernel_matrix' in graph and 'PythonOp' not in graph
