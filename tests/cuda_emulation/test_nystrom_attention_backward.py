"""The text of nystrom_attention_backward.cu, run over its real grid by its real launch plan,
against the gradients of the float64 reference."""

import math

import numpy as np
import pytest
import torch
from attention_cases import BF16, F16, F32, OPTIONS, error, flat_inputs, make_inputs
from sanitized import LARGEST_SHARED_MEMORY

from mmlaplacian.ops import nystrom_attention, use_backend
from mmlaplacian.ops.laplacian_kernel.cupy_impl import SCALAR_TYPES
from mmlaplacian.ops.nystrom_attention import cupy_impl, reference, tiling, torch_impl
from mmlaplacian.ops.nystrom_attention.tiling import TILE, Tiling

NAMES = ('q', 'k', 'v', 'landmarks')
BACKWARD = tuple(f'nystrom_attention_{name}' for name in (
    'grad_context', 'merge_keys', 'grad_factors', 'grad_values', 'merge_grad_covariance',
    'grad_keys', 'grad_queries', 'grad_landmarks', 'merge_landmarks'))
OUTPUTS = dict(zip(BACKWARD, (1, 2, 3, 3, 1, 2, 2, 1, 1), strict=True))


def make_grad(inputs, seed=7):
    """Large enough that no gradient is below float16's normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (16 * torch.randn(inputs[2].shape, generator=generator)).to(inputs[2].dtype)


def forward(inputs, kernel):
    """What the backward gets from torch's float32 forward."""
    with use_backend('torch'):
        return torch_impl.nystrom_attention(*(x.float() for x in inputs), *OPTIONS.values(), None,
                                            kernel, 'whiten')[1]


def backward(implementation, grad_out, inputs, kept, kernel):
    return dict(zip(NAMES, implementation.nystrom_attention_backward(
        grad_out, *inputs, kept, OPTIONS['kernel_scale'], OPTIONS['whiten_eps'], kernel,
        'whiten'), strict=True))


def fused(inputs, grad_out=None, kernel='laplacian') -> dict[str, torch.Tensor]:
    return backward(cupy_impl, make_grad(inputs) if grad_out is None else grad_out, inputs,
                    forward(inputs, kernel), kernel)


def unfused(inputs, kernel='laplacian') -> dict[str, torch.Tensor]:
    """The same in torch's float32."""
    with use_backend('torch'):
        return backward(torch_impl, make_grad(inputs).float(), [x.float() for x in inputs],
                        forward(inputs, kernel), kernel)


def exact(inputs, kernel='laplacian') -> dict[str, torch.Tensor]:
    """Gradients of the dense formula in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    out = reference.nystrom_attention(*leaves, **OPTIONS, kernel=kernel, normalize='whiten')
    return dict(zip(NAMES, torch.autograd.grad(out, leaves, make_grad(inputs).double()),
                    strict=True))


def check(inputs, kernel='laplacian', factor=2.) -> None:
    """No further off than so many times torch's float32 form, and the rounding of the result."""
    got, single, want = (form(inputs, kernel=kernel) for form in (fused, unfused, exact))
    for (name, expected), x in zip(want.items(), inputs, strict=True):
        assert got[name].dtype == x.dtype and got[name].shape == x.shape, name
        bound = factor * error(single[name], expected) + 4 * torch.finfo(x.dtype).eps
        assert error(got[name], expected) <= bound, (
            name, error(got[name], expected), error(single[name], expected))


NS, MS, DS = (1, 63, 64, 65, 1000), (1, 8, 48, 49, 50, 64, 100), (4, 20, 32, 33, 64, 72)


# The macro sets of the forward's tests, which one launch shares.
@pytest.mark.parametrize('n, m, d, d_v, dtype, kernel, heads', [
    (200, 49, 32, 32, F32, 'laplacian', 2), (1, 1, 1, 1, F32, 'laplacian', 2),
    (63, 16, 20, 20, F16, 'laplacian', 1), (65, 50, 72, 20, BF16, 'gaussian', 1),
    *(pytest.param(*size, marks=pytest.mark.soak) for size in (
        (64, 48, 33, 33, F32, 'laplacian', 2), (63, 8, 4, 33, F32, 'laplacian', 2),
        (65, 100, 64, 72, F32, 'laplacian', 1), (66, 64, 64, 32, F32, 'gaussian', 1),
        (70, 49, 8, 130, BF16, 'laplacian', 1), (65, 128, 64, 64, F32, 'laplacian', 1),
        (5, 128, 256, 33, F32, 'laplacian', 1), (66, 7, 1, 256, F16, 'gaussian', 1)))],
    ids=lambda value: str(value).removeprefix('torch.'))
def test_against_the_reference(sanitized, n, m, d, d_v, dtype, kernel, heads):
    check(make_inputs(n, m, d, d_v, dtype, heads=heads), kernel)
    assert tuple(x.kernel.function for x in sanitized.launches) == BACKWARD


@pytest.mark.soak
@pytest.mark.parametrize('kernel', reference.KERNELS)
@pytest.mark.parametrize('dtype', SCALAR_TYPES, ids=str)
@pytest.mark.parametrize('m', MS)
@pytest.mark.parametrize('d', DS)
def test_every_size(sanitized, d, m, dtype, kernel):
    for n in NS:
        check(make_inputs(n, m, d, d if n % 2 else 24, dtype, heads=2 if n < 100 else 1, seed=n),
              kernel)


# Distances of 0 and 0.005: C is nearly one, and P hundreds of times larger than W.
@pytest.mark.parametrize('flat', ['all', 'queries', 'keys'])
def test_nearly_flat_maps(sanitized, flat):
    check(flat_inputs(flat, .005))


@pytest.mark.parametrize('flat', ['all', 'keys'])
def test_flat_maps_have_exactly_no_gradient(sanitized, flat):
    """Of their keys and landmarks, which tie in every channel."""
    inputs = flat_inputs(flat, 0.)
    got, want = fused(inputs), exact(inputs)
    assert got['k'].count_nonzero() == 0
    if flat == 'all':
        assert got['q'].count_nonzero() == got['landmarks'].count_nonzero() == 0
    assert error(got['v'], want['v']) < 1e-5


def test_b20_ties(sanitized):
    """A token that equals the only landmark has no gradient."""
    q, k, v, landmarks = make_inputs(70, 1, 1, 1)
    q[:, :, ::2], k[:, :, 1::2] = landmarks, landmarks
    got = fused([q, k, v, landmarks])
    assert got['q'][:, :, ::2].count_nonzero() == got['k'][:, :, 1::2].count_nonzero() == 0
    assert got['q'][:, :, 1::2].all() and got['k'][:, :, ::2].all()


def test_variance_that_rounds_below_zero_has_no_gradient(sanitized):
    """The same formula in float64, for a covariance that no queries have."""
    inputs = make_inputs(70, 16, 20, 20, F16)
    kept = forward(inputs, 'laplacian')
    c = reference.KERNELS['laplacian'](inputs[1].float(), inputs[3].float(), 4.0)[0]
    context = (c @ kept[1]).mT @ inputs[2][0].float() / OPTIONS['whiten_eps']**.5
    kept[2], kept[4] = context, -kept[4]
    grad_out = make_grad(inputs)
    got = backward(cupy_impl, grad_out, inputs, kept, 'laplacian')
    with use_backend('torch'):
        want = backward(torch_impl, grad_out.double(), [x.double() for x in inputs],
                        [x.double() for x in kept], 'laplacian')
    for name in NAMES:
        assert error(got[name], want[name]) < 2e-3, name


def same_bits(got: dict, want: dict) -> None:
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


def test_same_bits_whatever_the_order_the_grid_and_the_alignment(sanitized):
    inputs = make_inputs(150, 49, 32, 32, heads=2)
    grad_out = make_grad(inputs)
    want = fused(inputs, grad_out)
    for sanitized.seed, sanitized.grid, offset in ((5, None, 0), (6, 1, 1), (7, 200, 0)):
        moved = []
        for x in (*inputs, grad_out):
            flat = torch.empty(x.numel() + offset)[offset:]
            moved.append(flat.copy_(x.flatten()).reshape(x.shape))
        same_bits(fused(moved[:4], moved[4]), want)


@pytest.mark.parametrize('m, d, dtype', [
    (16, 20, F16), pytest.param(49, 32, F32, marks=pytest.mark.soak)], ids=str)
def test_b06_same_bits_whatever_the_strides(sanitized, m, d, dtype):
    """Heads beside each other in a token's channels, as one linear layer gives q, k and v."""
    dense = make_inputs(70, m, d, d, dtype, batch=2, heads=2)
    grad_out = make_grad(dense)
    want = fused(dense, grad_out)
    sizes = 2, 70, 4, 2, d
    tokens = torch.stack([x.transpose(1, 2) for x in (*dense[:3], grad_out)], 2).reshape(sizes)
    strided = [tokens[:, :, i].transpose(1, 2) for i in range(4)]
    landmarks = dense[3].transpose(1, 2).contiguous().transpose(1, 2)
    sanitized.launches.clear()
    same_bits(fused([*strided[:3], landmarks], strided[3]), want)
    # Nothing is copied first.
    queries = sanitized.launches[0].arguments[0].array
    assert queries.__array_interface__['data'][0] == tokens.data_ptr()
    # The gradient of a sum, and channels apart.
    inputs = [dense[0], dense[1][:, :, :1].expand_as(dense[1]), dense[2].mT.contiguous().mT,
              dense[3]]
    ones = torch.ones((), dtype=dtype).expand_as(grad_out)
    same_bits(fused(inputs, ones), fused([x.contiguous() for x in inputs], ones.contiguous()))


def test_gradients_lie_as_a_layer_takes_them(sanitized):
    got = fused(make_inputs(30, 16, 20, 20, F16, batch=2, heads=3))
    assert all(got[name].transpose(1, 2).is_contiguous() for name in ('q', 'k', 'v'))


def test_chunks_of_tokens(sanitized, monkeypatch):
    """One, some with several tiles and a short last one, the shortest."""
    inputs = make_inputs(1000, 49, 32, 32)
    n_chunks = []
    for blocks in (1, 3, 256):
        monkeypatch.setattr(tiling, '_BLOCKS_FOR_AN_IMAGE', blocks)
        n_chunks.append(Tiling(1, 1, 1000, 49, 32, 32).n_chunks)
        check(inputs)
    assert n_chunks == [1, 3, 8]


def test_b02_same_bits_whatever_the_batch_mates(sanitized):
    first, second = (make_inputs(130, 16, 20, 20, F16, heads=2, seed=seed) for seed in (0, 1))
    grads = [make_grad(first, seed) for seed in (2, 3)]
    kept = [forward(x, 'laplacian') for x in (first, second)]
    together = backward(cupy_impl, torch.cat(grads),
                        [torch.cat(pair) for pair in zip(first, second, strict=True)],
                        [torch.cat(pair) for pair in zip(*kept, strict=True)], 'laplacian')
    for index, image in enumerate((first, second)):
        alone = backward(cupy_impl, grads[index], image, kept[index], 'laplacian')
        for name in NAMES:
            assert torch.equal(together[name][index], alone[name][0]), name


@pytest.mark.parametrize('which', [*NAMES, 'grad_out'])
def test_what_is_not_finite_stays_in_its_group(sanitized, which):
    inputs = make_inputs(70, 16, 20, 20, F16, heads=2)
    changed = [*(x.clone() for x in inputs), make_grad(inputs)]
    want = fused(inputs)
    changed[(*NAMES, 'grad_out').index(which)][0, 0, 3, 2] = math.nan
    got = fused(changed[:4], changed[4])
    for name in NAMES:
        assert torch.equal(got[name][0, 1], want[name][0, 1])
    # The gradient of a value depends on no value.
    assert [name for name in NAMES if got[name][0, 0].isfinite().all()] == (
        ['v'] if which == 'v' else [])


def test_b16_more_groups_than_a_grid_has_rows(sanitized):
    groups, chosen = 70_000, (0, 65_535, 65_536, 69_999)
    inputs = make_inputs(2, 1, 1, 1, batch=groups)
    sanitized.chosen = {name: chosen for name in BACKWARD}
    sanitized.chosen['nystrom_attention_merge_grad_covariance'] = [
        2 * group + i for group in chosen for i in range(2)]  # 64 entries, 32 a block
    grad_out = make_grad(inputs)
    got = fused(inputs, grad_out)
    some = [x[list(chosen)] for x in inputs]
    with use_backend('torch'):
        want = backward(torch_impl, grad_out[list(chosen)].double(), [x.double() for x in some],
                        [x.double() for x in forward(some, 'laplacian')], 'laplacian')
    for name in NAMES:
        assert got[name].isfinite().sum() == got[name][list(chosen)].numel(), name
        assert error(got[name][list(chosen)], want[name]) < 1e-5, name


def test_b45_offsets_beyond_32_bits(sanitized):
    """The last group of many: all tensors of tokens and chunks have more than 2^32 elements."""
    want = fused(make_inputs(130, 49, 32, 32))
    for launched in list(sanitized.launches):
        function = launched.kernel.function
        pairs = sanitized.run_last_of(2**21, launched, OUTPUTS[function])
        for index, (got, expected) in enumerate(pairs):
            written = ~np.isnan(got)
            np.testing.assert_array_equal(got[written], expected[written])
            # Of six partial sums keys and queries write two each, and so do the landmarks.
            partial = function in BACKWARD[5:8] and index == len(pairs) - 1
            assert written.sum() == got.size // 3 if partial else written.all(), function
    assert all(x.isfinite().all() for x in want.values())


@pytest.mark.parametrize('sizes', [(35_000, 2, 3136, 49, 32, 32), (1, 1, 1_065_024, 49, 32, 32),
                                   (1, 1, 33_554_560, 64, 4, 4), (2, 2, 520, 128, 64, 64)],
                         ids=str)
def test_b16_launch_plans_of_sizes_that_cannot_be_allocated_here(sizes):
    plan = Tiling(*sizes)
    assert plan.backward_unsupported_reason(LARGEST_SHARED_MEMORY) is None
    for function in BACKWARD:
        blocks, threads, shared_bytes = getattr(
            plan, function.removeprefix('nystrom_attention_'))()
        assert blocks >= 1 and 32 <= threads <= 256
        assert shared_bytes <= LARGEST_SHARED_MEMORY
    assert plan.landmark_partials == 2 * plan.n_chunks + 2
    assert plan.rows_per_chunk % TILE == 0


def test_paper_sizes_fit_every_device():
    """64 kB of sm_75; 82 kB are half of an A100's."""
    assert Tiling(1, 1, 3136, 49, 32, 32).backward_unsupported_reason(64 * 1024) is None
    assert Tiling(1, 1, 3136, 49, 64, 64).backward_unsupported_reason(81 * 1024) is None


# ---- from the op -------------------------------------------------------------------------------


def test_launches_of_the_op(launches):
    """At most twelve, whose gradients are those of the torch form."""
    inputs = make_inputs(100, 49, 32, 32, batch=2, heads=2)
    grads = []
    for backend in ('cupy', 'torch'):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with use_backend(backend):
            out = nystrom_attention(*leaves)
            launches.clear()
            out.square().sum().backward()
        if backend == 'cupy':
            assert launches == {name: 1 for name in BACKWARD} and launches.total() <= 12
        grads.append([x.grad for x in leaves])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * want.abs().max().item())


def test_what_does_not_fit_runs_unfused_and_says_why_once(launches):
    cupy_impl._say_once.cache_clear()
    inputs = [x.requires_grad_() for x in make_inputs(10, 64, 8, 96)]
    with pytest.warns(UserWarning, match='the backward of nystrom_attention runs unfused.*64 '
                      'landmarks, head dim 8 and value dim 96 need .* bytes of shared memory a '
                      'block, and this device has 101376') as caught:
        for _ in range(2):
            grads = torch.autograd.grad(nystrom_attention(*inputs).square().sum(), inputs)
    assert len([x for x in caught if 'unfused' in str(x.message)]) == 1
    assert launches['nystrom_attention_output'] == launches['laplacian_kernel_reduce_k'] / 3 == 2
    with use_backend('torch'):
        want = torch.autograd.grad(nystrom_attention(*inputs).square().sum(), inputs)
    for got, expected in zip(grads, want, strict=True):
        assert error(got, expected) < 1e-3
