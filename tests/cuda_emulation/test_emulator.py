"""The emulator itself: what it computes, and what it refuses."""

import numpy as np
import pytest
from emulator import EmulationError, Offset, Sparse

KERNELS = r'''
extern "C" __global__ void reverse(const float *x, float *y, float factor, long long n) {
  __shared__ float tile[64];
  const long long first = (long long)blockIdx.x * 64;
  if (first + threadIdx.x < n) tile[threadIdx.x] = x[first + threadIdx.x];
#ifndef NO_BARRIER
  __syncthreads();
#endif
  const long long count = min(n - first, 64ll);
  if (threadIdx.x < count) y[first + threadIdx.x] = factor * tile[count - 1 - threadIdx.x];
}

extern "C" __global__ void warp_sum(const int *x, int *y) {
  int value = x[threadIdx.x];
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  y[threadIdx.x] = value + 1000 * __shfl_down_sync(0xffffffffu, (int)threadIdx.x, 1);
}

extern "C" __global__ void dynamic_sum(const float *x, float *y) {
  DYNAMIC_SHARED(float, values);
  values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < blockDim.x; ++i) sum += values[i];
  y[threadIdx.x] = sum;
}

extern "C" __global__ void fault(float *y, int which) {
  __shared__ float tile[4][8];
  if (which == 0 && threadIdx.x < 3) __syncthreads();
  if (which == 1) {
    if (threadIdx.x < 3) __syncthreads();
    else __syncthreads();
  }
  if (which == 2) y[threadIdx.x] = 1;
  if (which == 3) tile[threadIdx.x % 4][threadIdx.x] = 1;
  if (which == 4) y[0] = reinterpret_cast<float4 *>(y + 1)->x;
  if (which == 5) y[0] = (float)(2147483647 + (int)threadIdx.x);
  if (which == 6) y[threadIdx.x % 4] = tile[0][0];
  if (which == 7) *(&tile[0][0] + threadIdx.x * 5) = 1;
}

extern "C" __global__ void write_through_const(const float *x) { *(float *)x = 1; }

extern "C" __global__ void convert(const unsigned short *halves, const float *floats,
                                   float *to_float, unsigned short *to_half, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    to_float[i] = half_bits_to_float(halves[i]);
    to_half[i] = float_to_half_bits(floats[i]);
  }
}

extern "C" __global__ void far(float *y, long long index) { y[index] = y[index - 1] + 1; }
'''


@pytest.fixture
def launch(emulator):
    def run(kernel, grid, block, args, macros=None, **options):
        emulator.launch([KERNELS], macros or {}, kernel, grid, block, args, **options)
    return run


def reversed_blocks(x, factor):
    return np.concatenate([factor * x[i:i + 64][::-1] for i in range(0, len(x), 64)])


def arguments(n=150):
    return np.arange(n, dtype=np.float32), np.full(n, np.nan, np.float32)


@pytest.mark.parametrize('seed', range(3))
def test_result(launch, seed):
    x, y = arguments()
    launch('reverse', 3, 64, [x, y, np.float32(2), np.int64(150)], seed=seed)
    np.testing.assert_array_equal(y, reversed_blocks(x, 2))


def test_a_missing_barrier_shows(launch):
    x, y = arguments()
    launch('reverse', 3, 64, [x, y, np.float32(2), np.int64(150)], {'NO_BARRIER': 1})
    assert np.isnan(y).any()


def test_chosen_blocks_only(launch):
    x, y = arguments()
    launch('reverse', 3, 64, [x, y, np.float32(1), np.int64(150)], blocks=[1])
    assert np.isnan(y[:64]).all() and np.isnan(y[128:]).all()
    np.testing.assert_array_equal(y[64:128], x[64:128][::-1])


def test_shuffles(launch):
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    launch('warp_sum', 1, 64, [x, y])
    lanes = np.arange(64)
    below = np.where(lanes % 32 == 31, lanes, lanes + 1)
    np.testing.assert_array_equal(y, x.reshape(2, 32).sum(1).repeat(32) + 1000 * below)


def test_dynamic_shared_memory(launch):
    x, y = np.arange(48, dtype=np.float32), np.zeros(48, np.float32)
    launch('dynamic_sum', 1, 48, [x, y], shared_bytes=48 * 4)
    np.testing.assert_array_equal(y, np.full(48, x.sum()))
    with pytest.raises(EmulationError, match='heap-buffer-overflow'):
        launch('dynamic_sum', 1, 48, [x, y], shared_bytes=32 * 4)


@pytest.mark.parametrize('which, message', [
    (0, 'barrier divergence: 3 of 8 threads'), (1, 'barrier divergence: thread . waits at line'),
    (2, 'heap-buffer-overflow'), (3, r'index \d+ out of bounds'),
    (4, 'misaligned address'), (5, 'signed integer overflow'), (7, 'insufficient space|overflow')])
def test_faults_are_reported(launch, which, message):
    block = 16 if which == 3 else 8
    with pytest.raises(EmulationError, match=message):
        launch('fault', 1, block, [np.zeros(5, np.float32), np.int32(which)])


def test_shared_memory_is_poisoned(launch):
    y = np.zeros(4, np.float32)
    launch('fault', 2, 8, [y, np.int32(6)])
    assert np.isnan(y).all()


def test_offset_moves_the_address(launch):
    y = np.zeros(8, np.float32)
    launch('fault', 1, 1, [Offset(y, 12), np.int32(4)])  # y + 1 is aligned now
    with pytest.raises(EmulationError, match='misaligned'):
        launch('fault', 1, 1, [Offset(y, 4), np.int32(4)])


def test_sparse_buffer_larger_than_memory(launch):
    index = 3 << 32
    y = Sparse(4 * (index + 1), {4 * (index - 1): np.array([41, 0], np.float32)})
    launch('far', 1, 1, [y, np.int64(index)])
    np.testing.assert_array_equal(y.pieces[4 * (index - 1)], [41, 42])


def test_a_write_through_const_is_an_error(launch):
    with pytest.raises(EmulationError, match='takes as const'):
        launch('write_through_const', 1, 1, [np.zeros(1, np.float32)])


@pytest.mark.parametrize('factor', [np.float64(2), np.int32(2)])
def test_b18_arguments_have_the_exact_type(launch, factor):
    x, y = arguments()
    with pytest.raises(EmulationError, match='reverse: argument 2 is'):
        launch('reverse', 3, 64, [x, y, factor, np.int64(150)])


def test_b18_python_numbers_are_refused(launch, emulator):
    x, y = arguments()
    with pytest.raises(TypeError, match='float 2.0'):
        launch('reverse', 3, 64, [x, y, 2.0, np.int64(150)])
    with pytest.raises(TypeError, match='float 2.0'):
        emulator.library([KERNELS], {}).launch('reverse', 3, 64, [0, 0, 2.0, np.int64(150)])


@pytest.mark.parametrize('grid, block', [(0, 64), (1, 1025), ((1, 65536), 64)])
def test_invalid_launches(launch, grid, block):
    x, y = arguments()
    with pytest.raises(EmulationError, match='invalid launch'):
        launch('reverse', grid, block, [x, y, np.float32(2), np.int64(150)])


def test_in_process_library(emulator):
    x, y = arguments()
    library = emulator.library([KERNELS], {})
    library.launch('reverse', 3, 64, [x.ctypes.data, y.ctypes.data, np.float32(2), np.int64(150)])
    np.testing.assert_array_equal(y, reversed_blocks(x, 2))
    with pytest.raises(EmulationError, match='the kernel takes 4'):
        library.launch('reverse', 3, 64, [x.ctypes.data])


def test_half_conversions_against_numpy(launch):
    halves = np.arange(65536).astype(np.uint16)
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 1 << 32, 65536, np.uint32).view(np.float32)
    # Half of them where float16 lives, with its ties and its largest value.
    near = np.nan_to_num(halves.view(np.float16)[::2].astype(np.float32))
    with np.errstate(over='ignore'):
        floats[::2] = near * (1 + rng.choice([0, 2.0**-12, 2.0**-11, 2.0**-10], near.size))
    floats[:6] = [65504, 65519.996, 65520, 65536, np.inf, np.nan]
    to_float = np.full(65536, np.nan, np.float32)
    to_half = np.zeros(65536, np.uint16)
    launch('convert', 1, 32, [halves, floats, to_float, to_half, np.int32(65536)])
    np.testing.assert_array_equal(to_float, halves.view(np.float16).astype(np.float32))
    with np.errstate(over='ignore'):
        expected = floats.astype(np.float16)
    np.testing.assert_array_equal(to_half.view(np.float16), expected)


def test_text_that_does_not_compile(emulator):
    with pytest.raises(EmulationError, match='bad.*line 1|unknown_type'):
        emulator.build(['extern "C" __global__ void bad(unknown_type *x) {}'], {})
