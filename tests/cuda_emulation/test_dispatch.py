"""The whole way from the op to the kernels' text: dispatch, launch plan, kernel, gradients.

The launcher of conftest.py runs the same launches on the host.
"""

from collections import Counter

import pytest
import torch

from mmlaplacian.ops import (
    gaussian_kernel,
    laplacian_kernel,
    newton_schulz_inverse,
    nystrom_attention,
    use_backend,
)
from mmlaplacian.ops.laplacian_kernel import reference
from mmlaplacian.ops.laplacian_kernel.tiling import CHUNK_ROWS, Tiling

OPS = {'laplacian': (laplacian_kernel, reference.laplacian_kernel),
       'gaussian': (gaussian_kernel, reference.gaussian_kernel)}


FORWARD = {'laplacian_kernel_forward': 1}
GRAD_Q = {'laplacian_kernel_backward_q': 1}
GRAD_K = {'laplacian_kernel_backward_k': 1, 'laplacian_kernel_reduce_k': 1}


def make_inputs(batch, heads, n, m, d, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(batch, heads, size, d, generator=generator) * 4 / d).to(dtype)
            .requires_grad_() for size in (n, m)]


@pytest.mark.parametrize('kind', OPS)
@pytest.mark.parametrize('shape, dtype', [
    ((2, 3, 130, 49, 32), torch.float32), ((1, 1, 1, 1, 32), torch.float32),
    ((1, 2, 1100, 49, 32), torch.float32), ((1, 2, 65, 49, 32), torch.float16),
    ((1, 2, 65, 49, 32), torch.bfloat16)], ids=str)
def test_op_through_the_kernels(launches, kind, shape, dtype):
    op, ref = OPS[kind]
    q, k = make_inputs(*shape, dtype)
    weight = torch.randn(*shape[:2], shape[2], shape[3]).to(dtype)
    out = op(q, k, 4.0)
    out.backward(weight)
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    expected = ref(*exact, 4.0)
    expected.backward(weight.double())
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    for got, want in [(out, expected), (q.grad, exact[0].grad), (k.grad, exact[1].grad)]:
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=rtol,
                                   atol=atol * want.abs().max().item())
    assert launches == {**FORWARD, **GRAD_Q, **GRAD_K}


def test_b06_any_strides_of_tensors_and_gradient(launches):
    q, k = make_inputs(2, 2, 70, 49, 32)
    q_strided = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    laplacian_kernel(q_strided, k, 4.0).sum().backward()
    exact = [x.detach().clone().requires_grad_() for x in (q, k)]
    reference.laplacian_kernel(*exact, 4.0).sum().backward()
    torch.testing.assert_close([q_strided.grad, k.grad], [x.grad for x in exact],
                               rtol=1e-3, atol=1e-4)


def test_smallest_scale_keeps_ties(launches):
    q, _ = make_inputs(1, 1, 4, 4, 32)
    # The frontend refuses it; the operator's factor would be infinite.
    kernel = torch.ops.mmlaplacian.kernel_matrix(q, q, 1e-40, 'laplacian')
    assert torch.equal(kernel[0, 0], torch.eye(4))


def test_only_the_gradients_that_are_asked_for(launches):
    q, k = make_inputs(1, 1, 30, 49, 32)
    laplacian_kernel(q.detach(), k, 4.0).sum().backward()
    assert launches == {**FORWARD, **GRAD_K}


@pytest.mark.parametrize('batch, n', [(0, 16), (1, 0)])
def test_b43_nothing_is_launched_for_nothing(launches, batch, n):
    q = torch.zeros(batch, 2, n, 32, requires_grad=True)
    k = torch.ones(batch, 2, 4, 32, requires_grad=True)
    out = laplacian_kernel(q, k, 4.0)
    out.sum().backward()
    assert out.shape == (batch, 2, n, 4) and (k.grad == 0).all() and not launches


@pytest.mark.parametrize('normalize', ['row', 'none'])
def test_unfused_attention_reaches_the_kernels(launches, normalize):
    """Three distances forward, two of them again in the backward, and through each of them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 32, generator=generator) * .3 for _ in range(3))
    inputs = [q, k, v, k[:, :, ::3].clone()]
    results = []
    for backend in ('cupy', 'torch'):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with use_backend(backend):
            out = nystrom_attention(*leaves, normalize=normalize)
            out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())
    assert launches == {
        **{name: 3 for name in (*GRAD_Q, *GRAD_K)}, **{name: 5 for name in FORWARD},
        'newton_schulz_inverse': 1, 'newton_schulz_product': 2}


@pytest.mark.parametrize('m, forward', [
    (49, {'newton_schulz_inverse': 1}), (91, {'newton_schulz_start': 1,
                                              'newton_schulz_product': 8})])
@pytest.mark.parametrize('bound', [2., None], ids=['spd', 'two-norm'])
def test_solver_through_the_kernels(launches, m, forward, bound):
    """The launcher's device has shared memory for M = 90: beyond, products serve."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, m, 8, generator=generator) * .5
    w = (laplacian_kernel(x, x, 4.0) / m + 2 * torch.eye(m)).detach()
    if bound is None:  # not symmetric: a transposed factor shows
        w += torch.randn(w.shape, generator=generator) / m
    launches.clear()
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = w.to(dtype, copy=True).requires_grad_()
        with use_backend('cupy' if dtype == torch.float32 else 'torch'):
            inverse, residual = newton_schulz_inverse(leaf, 4, bound, return_residual=True)
            inverse.square().sum().backward()
        results.append((inverse.detach().double(), leaf.grad.double(), residual))
    for got, want in zip(results[0][:2], results[1][:2], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[0][2].double(), results[1][2], rtol=1e-2, atol=1e-6)
    assert launches == Counter(forward) + Counter(newton_schulz_product=3)


def test_solver_of_nothing_and_of_half_precision(launches):
    assert newton_schulz_inverse(torch.zeros(0, 5, 5)).shape == (0, 5, 5)
    assert not launches
    w = (2 * torch.eye(20)).bfloat16()
    x = newton_schulz_inverse(w, spd_lower_bound=1.)
    assert x.dtype == torch.bfloat16 and torch.equal(x, (.5 * torch.eye(20)).bfloat16())


@pytest.mark.parametrize('sizes', [(70_000, 3136, 49, 32), (1, 1_065_024, 49, 32),
                                   (1, 33_554_560, 64, 4), (4, 520, 520, 256)], ids=str)
def test_b16_launch_plans_of_sizes_that_cannot_be_allocated_here(sizes):
    tiling = Tiling(*sizes)
    groups, n, m, d = sizes
    for blocks, threads in (tiling.forward(), tiling.backward_q(), tiling.backward_k(),
                            tiling.reduce_k()):
        assert blocks >= 1 and 32 <= threads <= 1024
    assert tiling.rows_per_chunk % CHUNK_ROWS == 0
    assert (tiling.n_chunks - 1) * tiling.rows_per_chunk < n
    assert tiling.n_chunks * tiling.rows_per_chunk >= n
    # The partial sums are at most one for 512 queries, and few where the groups fill a GPU.
    assert tiling.n_chunks <= max(1, -(-n // 512), 1024 // groups)
    assert groups < 1024 or tiling.n_chunks == 1
