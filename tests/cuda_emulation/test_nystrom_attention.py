"""The text of nystrom_attention.cu, run over its real grid by its real launch plan, against the
float64 reference."""

import math

import numpy as np
import pytest
import torch
from attention_cases import BF16, F16, F32, OPTIONS, error, flat_inputs, make_inputs
from sanitized import LARGEST_SHARED_MEMORY

from mmlaplacian.ops import nystrom_attention, use_backend
from mmlaplacian.ops.laplacian_kernel.cupy_impl import SCALAR_TYPES
from mmlaplacian.ops.newton_schulz.reference import inverse
from mmlaplacian.ops.nystrom_attention import cupy_impl, reference, tiling, torch_impl
from mmlaplacian.ops.nystrom_attention.tiling import TILE, Tiling

KEPT = ('w', 'p', 'context', 'mean', 'covariance')
FORWARD = ('nystrom_attention_landmarks', 'newton_schulz_inverse', 'nystrom_attention_statistics',
           'nystrom_attention_merge_statistics', 'nystrom_attention_keys',
           'nystrom_attention_merge_keys', 'nystrom_attention_output')


def fused(inputs, kernel='laplacian') -> dict[str, torch.Tensor]:
    out, kept = cupy_impl.nystrom_attention(*inputs, *OPTIONS.values(), None, kernel, 'whiten')
    return dict(zip(('out', *KEPT), (out, *kept), strict=True))


def unfused(inputs, kernel='laplacian') -> dict[str, torch.Tensor]:
    """The same in torch's float32."""
    with use_backend('torch'):
        out, kept = torch_impl.nystrom_attention(*(x.float() for x in inputs), *OPTIONS.values(),
                                                 None, kernel, 'whiten')
    return dict(zip(('out', *KEPT), (out, *kept), strict=True))


def exact(inputs, kernel='laplacian') -> dict[str, torch.Tensor]:
    """The dense formula in float64, and what is kept by its definition."""
    q, k, v, landmarks = (x.double() for x in inputs)
    c_q, c_k, w = (reference.KERNELS[kernel](x, landmarks, OPTIONS['kernel_scale']).flatten(0, 1)
                   for x in (q, k, landmarks))
    p = inverse(w + OPTIONS['ridge'] * torch.eye(w.shape[-1], dtype=w.dtype))
    mean = c_q.mean(1, keepdim=True)
    covariance = (c_q - mean).mT @ (c_q - mean) / q.shape[2]
    x = c_k @ p
    variance = ((x @ covariance) * x).sum(-1, keepdim=True)
    context = x.mT @ (v.flatten(0, 1) / (variance + OPTIONS['whiten_eps']).sqrt())
    out = reference.nystrom_attention(*(t.double() for t in inputs), **OPTIONS, kernel=kernel,
                                      normalize='whiten')
    return dict(out=out, w=w, p=p, context=context, mean=mean, covariance=covariance)


def check(inputs, kernel='laplacian', factor=2.) -> None:
    """No further off than so many times torch's float32 form, and the rounding of the output."""
    got, single, want = (form(inputs, kernel) for form in (fused, unfused, exact))
    assert got['out'].dtype == inputs[0].dtype
    for name, expected in want.items():
        assert got[name].shape == expected.shape == single[name].shape, name
        eps = torch.finfo(got[name].dtype).eps
        bound = factor * error(single[name], expected) + 4 * eps
        if name == 'covariance':  # the rounding of C, which is about its mean
            bound += 4 * eps * want['mean'].square().mean().item() / (
                expected.abs().mean().item() + 1e-30)
        assert error(got[name], expected) <= bound, (
            name, error(got[name], expected), error(single[name], expected))


NS, MS, DS = (1, 63, 64, 65, 1000), (1, 16, 48, 49, 50, 64, 100), (8, 20, 32, 33, 64, 72)


# Every size, dtype and kernel; d_v on both sides of d; one and two tiles of landmarks, chunks of
# channels and pieces of the context.
@pytest.mark.parametrize('n, m, d, d_v, dtype, kernel, heads', [
    (200, 49, 32, 32, F32, 'laplacian', 2), (1, 1, 1, 1, F32, 'laplacian', 2),
    (63, 16, 20, 20, F16, 'laplacian', 1), (64, 48, 33, 33, F32, 'laplacian', 2),
    (65, 50, 72, 20, BF16, 'gaussian', 1), (65, 100, 64, 72, F32, 'laplacian', 1),
    (66, 64, 64, 32, F32, 'gaussian', 1), (70, 49, 8, 130, BF16, 'laplacian', 1),
    pytest.param(5, 128, 256, 33, F32, 'laplacian', 1, marks=pytest.mark.soak),
    pytest.param(66, 7, 1, 256, F16, 'gaussian', 1, marks=pytest.mark.soak)],
    ids=lambda value: str(value).removeprefix('torch.'))
def test_against_the_reference(sanitized, n, m, d, d_v, dtype, kernel, heads):
    check(make_inputs(n, m, d, d_v, dtype, heads=heads), kernel)
    assert tuple(x.kernel.function for x in sanitized.launches
                 if x.kernel.source != 'newton_schulz') == tuple(
                     name for name in FORWARD if name != 'newton_schulz_inverse')


@pytest.mark.soak
@pytest.mark.parametrize('kernel', reference.KERNELS)
@pytest.mark.parametrize('dtype', SCALAR_TYPES, ids=str)
@pytest.mark.parametrize('m', MS)
@pytest.mark.parametrize('d', DS)
def test_every_size(sanitized, d, m, dtype, kernel):
    for d_v in (d, 24):
        for n in NS:
            check(make_inputs(n, m, d, d_v, dtype, heads=2 if n < 100 else 1, seed=n), kernel)


# Distances of 0 and 0.005: C is nearly one, and P hundreds of times larger than W.
@pytest.mark.parametrize('spread', [0., .005])
@pytest.mark.parametrize('flat', ['all', 'queries', 'keys'])
def test_nearly_flat_maps(sanitized, spread, flat):
    inputs = flat_inputs(flat, spread)
    got, single, want = (form(inputs) for form in (fused, unfused, exact))
    assert error(got['out'], want['out']) <= 2 * error(single['out'], want['out']) + 1e-6
    # C is about 1: its rounding times its deviations.
    deviation = want['covariance'].diagonal(dim1=-2, dim2=-1).sqrt().max()
    assert (got['covariance'] - want['covariance']).abs().max() <= (
        8 * torch.finfo(F32).eps * deviation + 1e-13)


def same_bits(got: dict, want: dict) -> None:
    for name, x in got.items():
        assert torch.equal(x, want[name]), name


def test_same_bits_whatever_the_order_the_grid_and_the_alignment(sanitized):
    inputs = make_inputs(150, 49, 32, 32, heads=2)
    want = fused(inputs)
    for sanitized.seed, sanitized.grid, offset in ((5, None, 0), (6, 1, 1), (7, 200, 0)):
        moved = []
        for x in inputs:
            flat = torch.empty(x.numel() + offset)[offset:]
            moved.append(flat.copy_(x.flatten()).reshape(x.shape))
        same_bits(fused(moved), want)


@pytest.mark.parametrize('m, d, dtype', [(49, 32, F32), (16, 20, F16), (48, 33, F32)], ids=str)
def test_b06_same_bits_whatever_the_strides(sanitized, m, d, dtype):
    """Heads beside each other in a token's channels, as one linear layer gives q, k and v."""
    # As many images as heads would hide one taken for the other.
    dense = make_inputs(70, m, d, d, dtype, batch=2, heads=3)
    want = fused(dense)
    sizes = 2, 70, 3, 3, d
    tokens = torch.stack([x.transpose(1, 2) for x in dense[:3]], 2).reshape(sizes)
    strided = [tokens[:, :, i].transpose(1, 2) for i in range(3)]
    assert not any(x.is_contiguous() for x in strided)
    landmarks = dense[3].transpose(1, 2).contiguous().transpose(1, 2)
    sanitized.launches.clear()
    same_bits(fused([*strided, landmarks]), want)
    # Nothing is copied first.
    queries = sanitized.launches[2].arguments[0].array
    assert queries.__array_interface__['data'][0] == tokens.data_ptr()
    # An expanded tensor, and channels apart.
    inputs = [dense[0], dense[1][:, :, :1].expand_as(dense[1]), dense[2].mT.contiguous().mT,
              dense[3]]
    same_bits(fused(inputs), fused([x.contiguous() for x in inputs]))


def test_output_lies_as_a_layer_takes_it(sanitized):
    out = fused(make_inputs(30, 4, 8, 12, batch=2, heads=3))['out']
    assert out.transpose(1, 2).is_contiguous()


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
    first, second = (make_inputs(130, 16, 8, 8, heads=2, seed=seed) for seed in (0, 1))
    together = fused([torch.cat(pair) for pair in zip(first, second, strict=True)])
    for index, image in enumerate((first, second)):
        alone = fused(image)
        assert torch.equal(together['out'][index], alone['out'][0])
        for name in KEPT:
            assert torch.equal(together[name][2 * index:2 * index + 2], alone[name]), name


@pytest.mark.parametrize('which, bad', [
    *((which, math.nan) for which in ('q', 'k', 'v', 'landmarks')), ('k', math.inf)])
def test_what_is_not_finite_stays_in_its_group(sanitized, which, bad):
    inputs = make_inputs(70, 16, 8, 8, heads=2)
    want = fused(inputs)['out'][0, 1]
    changed = [x.clone() for x in inputs]
    changed['q k v landmarks'.split().index(which)][0, 0, 3, 2] = bad
    got = fused(changed)['out']
    # A key at infinity is like no landmark: its row of C is zero.
    assert got[0, 0].isfinite().all() == (bad == math.inf)
    assert torch.equal(got[0, 1], want)


def test_far_tokens_leave_the_mean_value(sanitized):
    q, k, v, landmarks = make_inputs(70, 16, 8, 8)
    out = fused([q + 1e4, k + 1e4, v, landmarks])['out']
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


def test_b16_more_groups_than_a_grid_has_rows(sanitized):
    groups, chosen = 70_000, (0, 65_535, 65_536, 69_999)
    inputs = make_inputs(1, 1, 1, 1, batch=groups)
    squares = 2  # 64 entries of one square of 8 x 8, 32 a block
    sanitized.chosen = {name: chosen for name in FORWARD}
    sanitized.chosen['nystrom_attention_merge_statistics'] = [
        squares * group + i for group in chosen for i in range(squares)]
    got = fused(inputs)
    assert got['out'].isfinite().sum() == len(chosen)
    want = exact([x[list(chosen)] for x in inputs])
    torch.testing.assert_close(got['out'][list(chosen)].double(), want['out'])


def test_b45_offsets_beyond_32_bits(sanitized):
    """The last group of many: all tensors of tokens and chunks have more than 2^32 elements."""
    groups, size = 2**21, (130, 49, 32, 32)
    want = fused(make_inputs(*size))
    outputs = {'landmarks': 2, 'statistics': 2, 'merge_statistics': 2, 'keys': 1,
               'merge_keys': 2, 'output': 1}
    for launched in [x for x in sanitized.launches if x.kernel.source == 'nystrom_attention']:
        name = launched.kernel.function.removeprefix('nystrom_attention_')
        for got, expected in sanitized.run_last_of(groups, launched, outputs[name]):
            np.testing.assert_array_equal(got, expected)
    assert want['out'].isfinite().all()


@pytest.mark.parametrize('sizes', [(35_000, 2, 3136, 49, 32, 32), (1, 1, 1_065_024, 49, 32, 32),
                                   (1, 1, 33_554_560, 64, 4, 4), (2, 2, 520, 128, 256, 128)],
                         ids=str)
def test_b16_launch_plans_of_sizes_that_cannot_be_allocated_here(sizes):
    plan = Tiling(*sizes)
    for function in FORWARD:
        if function != 'newton_schulz_inverse':
            blocks, threads, shared_bytes = getattr(
                plan, function.removeprefix('nystrom_attention_'))()
            assert blocks >= 1 and 32 <= threads <= 256
            assert shared_bytes <= LARGEST_SHARED_MEMORY
    assert plan.rows_per_chunk % TILE == 0
    assert (plan.n_chunks - 1) * plan.rows_per_chunk < plan.n <= (
        plan.n_chunks * plan.rows_per_chunk)
    assert plan.n_chunks * plan.heads <= 256


# ---- from the op -------------------------------------------------------------------------------


def test_launches_of_the_op(launches):
    """At most eight."""
    inputs = make_inputs(100, 49, 32, 32, batch=2, heads=2)
    out = nystrom_attention(*inputs)
    assert launches == {name: 1 for name in FORWARD} and launches.total() <= 8
    with use_backend('torch'):
        torch.testing.assert_close(out, nystrom_attention(*inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('m, d_v, reason', [
    (129, 8, 'landmarks from 1 to 128, got 129'), (4, 257, 'value dims from 1 to 256, got 257'),
    (91, 8, 'bytes of shared memory a block, and this device has 101376'),
    (80, 256, 'got 640 for 80 landmarks and 256 value channels'), (4, 0, 'got 0')])
def test_what_does_not_fit_runs_unfused_and_says_why_once(launches, m, d_v, reason):
    cupy_impl._say_once.cache_clear()
    inputs = make_inputs(10, m, 8, d_v)
    with pytest.warns(UserWarning, match=f'runs unfused.*{reason}') as caught:
        out = [nystrom_attention(*inputs) for _ in range(2)][1]
    assert len([x for x in caught if 'unfused' in str(x.message)]) == 1
    assert launches['laplacian_kernel_forward'] == 6
    assert not any(name.startswith('nystrom_attention') for name in launches)
    if d_v:
        assert error(out, exact(inputs)['out']) < 1e-5


@pytest.mark.parametrize('normalize', ['row', 'none'])
def test_other_maps_run_unfused_without_a_word(launches, normalize, recwarn):
    nystrom_attention(*make_inputs(10, 4, 8, 8), normalize=normalize)
    assert launches['laplacian_kernel_forward'] == 3 and not recwarn.list
