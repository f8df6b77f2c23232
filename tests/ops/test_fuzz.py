"""Every op on drawn shapes, strides, dtypes and values against the float64 reference.

On the CPU Hypothesis draws, without a random seed, and shrinks a case that fails. On a CUDA
device, where torch, CuPy and pytest are all that a machine needs, case n is drawn from seed n:
``check('laplacian_kernel', Seeded(n), 'cuda')`` repeats it.
"""

import random
from contextlib import nullcontext

import pytest
import torch

from mmlaplacian.ops import (
    gaussian_kernel,
    laplacian_kernel,
    newton_schulz_inverse,
    nystrom_attention,
    use_backend,
)
from mmlaplacian.ops.laplacian_kernel import reference as kernels
from mmlaplacian.ops.newton_schulz import reference as solver
from mmlaplacian.ops.nystrom_attention import reference as attention

FEW, MANY = 300, 10_000
SHARE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""How far a result may be from the reference, relative to its largest entry."""


class Seeded(random.Random):
    """Numbers that messages name by their seed."""

    def __init__(self, seed):
        super().__init__(seed)
        self.name = f'seed {seed}'

    def __repr__(self):
        return self.name


def drawn(draw, shape, dtype, device):
    """A tensor ``(B, h, tokens, d)`` of any layout, as a leaf in float64 and as the op gets it."""
    batch, heads, tokens, d = shape
    generator = torch.Generator().manual_seed(draw.getrandbits(31))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = draw.choice(['plain', 'plain', 'ties', 'flat', 'zero', 'offset'])
    x = {'plain': x, 'ties': (2 * x).round() / 2, 'flat': x[:, :, :1].expand(shape) if tokens
         else x, 'zero': torch.zeros(shape, dtype=x.dtype), 'offset': x + 3}[kind]
    x = (x * draw.choice([1e-3, 0.1, 1., 4.])).to(dtype).to(device)
    leaf = x.double().cpu().requires_grad_()
    layout = draw.choice(['dense', 'heads_last', 'step', 'expanded', 'reversed'])
    if layout == 'heads_last':
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == 'step':
        wide = x.new_full((batch, heads, tokens, 2 * d + 1), float('nan'))
        wide[..., 1::2] = x
        x = wide[..., 1::2]
    elif layout == 'reversed':
        x = x.mT.contiguous().mT
    elif layout == 'expanded' and batch:
        x = x[:1].expand(shape)
        leaf = leaf.detach()[:1].expand(shape).clone().requires_grad_()
    return leaf, x.detach().requires_grad_()


def compared(op, reference, tensors, dtype, share, what):
    """Checks the output and the gradients of a weighted sum of it."""
    leaves, inputs = zip(*tensors, strict=True)
    expected, actual = reference(*leaves), op(*inputs)
    assert actual.shape == expected.shape and actual.dtype == dtype, what
    # Drawn: a sum of a row and a column would vanish in the gradient of a flat matrix's inverse.
    weights = torch.randn(expected.shape, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(expected.numel()))
    (expected * weights).sum().backward()
    (actual.double().cpu() * weights).sum().backward()
    results = [(actual, expected), *((x.grad, leaf.grad) for leaf, x in tensors)]
    for got, wanted in results:
        assert got.shape == wanted.shape and got.isfinite().all(), what
        if got.numel():
            error = (got.double().cpu() - wanted).abs().max()
            assert error <= share * wanted.abs().max() + share * 1e-2, (what, error.item())


def sizes(draw):
    return (draw.choice([0, 1, 1, 2, 3]), draw.randint(1, 3),
            draw.choice([0, 1, 2, 5, 17, 64, 65, 130]), draw.randint(1, 70), draw.randint(1, 80))


def dtypes(form):
    return [torch.float32] if form == 'cpu' else \
        [torch.float32, torch.float16, torch.bfloat16] + [torch.float64] * (form == 'torch')


def check_kernel(name, draw, form):
    op, reference = {'laplacian_kernel': (laplacian_kernel, kernels.laplacian_kernel),
                     'gaussian_kernel': (gaussian_kernel, kernels.gaussian_kernel)}[name]
    batch, heads, n, m, d = sizes(draw)
    dtype, device = draw.choice(dtypes(form)), 'cuda' if form == 'cuda' else 'cpu'
    scale = d * 10 ** draw.uniform(-1, 1)
    tensors = [drawn(draw, (batch, heads, tokens, d), dtype, device) for tokens in (n, m)]
    compared(lambda q, k: op(q, k, scale), lambda q, k: reference(q, k, scale), tensors, dtype,
             SHARE[dtype], f'{name}, {draw}, {form}: {(batch, heads, n, m, d)}, {dtype}')


def check_solver(name, draw, form):
    batch, _, _, m, d = sizes(draw)
    dtype = torch.float64 if form == 'torch' and draw.random() < 0.5 else torch.float32
    device = 'cuda' if form == 'cuda' else 'cpu'
    ridge = 10 ** draw.uniform(-2, 1)
    marks, _ = drawn(draw, (batch, 1, m, d), torch.float64, 'cpu')
    w = kernels.laplacian_kernel(marks, marks, 4.0)[:, 0].detach() + ridge * torch.eye(
        m, dtype=torch.float64)
    # With a bound, the default steps are those of kernel values, which are at most 1.
    bound = draw.choice([None, 0.99 * ridge])
    factor = 10 ** draw.uniform(-3, 3) if bound is None else 1.
    leaf = (w * factor).to(dtype).double().requires_grad_()
    x = leaf.detach().to(dtype).to(device).requires_grad_()
    condition = (m + ridge) / ridge
    share = 100 * condition * torch.finfo(dtype).eps
    compared(lambda w: newton_schulz_inverse(w, spd_lower_bound=bound), solver.inverse,
             [(leaf, x)], dtype, share,
             f'{name}, {draw}, {form}: {(batch, m)}, {dtype}, ridge {ridge:.3g}, {bound}')


def check_attention(name, draw, form):
    batch, heads, n, m, d = sizes(draw)
    m, n = min(m, 30), min(n, 65)
    dtype = torch.float64 if form == 'torch' else torch.float32
    device = 'cuda' if form == 'cuda' else 'cpu'
    shapes = [(batch, heads, n, d)] * 2 + [(batch, heads, n, draw.randint(1, 40)),
                                           (batch, heads, m, d)]
    tensors = [drawn(draw, shape, dtype, device) for shape in shapes]
    kernel = draw.choice(['laplacian', 'gaussian'])
    normalize = draw.choice(['whiten', 'row', 'none'])
    scale, ridge = d * 10 ** draw.uniform(-1, 0.5), 10 ** draw.uniform(-1, 0)
    options = (scale, ridge, 1e-2)
    if not n:
        return
    compared(lambda *x: nystrom_attention(*x, *options, None, kernel, normalize),
             lambda *x: attention.nystrom_attention(*x, *options, kernel, normalize), tensors,
             dtype, 1e-6 if dtype == torch.float64 else 5e-2,
             f'{name}, {draw}, {form}: {shapes}, {kernel}, {normalize}, {options}')


CHECKS = {'laplacian_kernel': check_kernel, 'gaussian_kernel': check_kernel,
          'newton_schulz_inverse': check_solver, 'nystrom_attention': check_attention}


def check(name, draw, form):
    """One case; an op without a C text runs in torch where ``form`` is 'cpu'."""
    with use_backend('auto') if form == 'cpu' else nullcontext():
        CHECKS[name](name, draw, form)


counts = pytest.mark.parametrize('count', [FEW, pytest.param(MANY, marks=pytest.mark.soak)])


@counts
@pytest.mark.parametrize('name', CHECKS)
@pytest.mark.parametrize('form', ['torch', 'cpu'])
def test_drawn_cases(name, form, count, tmp_path):
    from hypothesis import HealthCheck, configuration, given, settings, strategies

    configuration.set_hypothesis_home_dir(tmp_path)

    @settings(max_examples=count, derandomize=True, database=None, deadline=None,
              suppress_health_check=[HealthCheck.too_slow])
    @given(strategies.randoms(use_true_random=False))
    def run(draw):
        check(name, draw, form)

    run()


@counts
@pytest.mark.gpu
@pytest.mark.parametrize('name', CHECKS)
@pytest.mark.parametrize('form', ['cuda'])
def test_cases_of_seeds_on_a_gpu(name, form, count):
    for seed in range(count):
        check(name, Seeded(seed), form)
