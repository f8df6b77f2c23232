"""The wrong variants, and who must catch each of them.

`KINDS` are the mistakes of kernels and of their launches that are easily made and seldom seen: at
least one of each, and a barrier of each kernel, runs in ``make test``, the rest in ``make soak``.
"""

from mutation_runner import Mutation

KINDS = ('dropped barrier', 'missing tail check', 'off-by-one tile edge', '32-bit offset',
         'default stream', 'no device guard', 'stale cache key', 'Python float passed raw')

LAPLACIAN = 'cuda/laplacian_kernel.cu'
DISTANCE = 'cuda/distance.cuh'
FUSED_ATTENTION, FUSED_BACKWARD = (f'cuda/nystrom_attention{part}.cu'
                                   for part in ('', '_backward'))
ATTENTION_TILE, ATTENTION_KEYS, ATTENTION_SUMS = (f'cuda/attention_{part}.cuh'
                                                  for part in ('tile', 'keys', 'sums'))
FUSED_LAUNCH = 'mmlaplacian/ops/nystrom_attention/cupy_impl.py'
FUSED_TILING = 'mmlaplacian/ops/nystrom_attention/tiling.py'
SOLVER = 'cuda/newton_schulz.cu'
COMMON = 'cuda/common.cuh'
RUNTIME = 'mmlaplacian/ops/cupy_runtime.py'
BACKEND = 'mmlaplacian/ops/backend.py'
LAPLACIAN_LAUNCH = 'mmlaplacian/ops/laplacian_kernel/cupy_impl.py'
LAPLACIAN_TILING = 'mmlaplacian/ops/laplacian_kernel/tiling.py'
SOLVER_LAUNCH = 'mmlaplacian/ops/newton_schulz/cupy_impl.py'
ATTENTION = 'mmlaplacian/cpu_src/nystrom_attention.c'
CPU_COMMON, CPU_DISTANCE, CPU_PRODUCT, CPU_SOLVER = (
    f'mmlaplacian/cpu_src/{name}.h' for name in ('common', 'distance', 'product', 'newton_schulz'))
ATTENTION_LAUNCH = 'mmlaplacian/ops/nystrom_attention/cpu_impl.py'

# How a test fails: a result differs, or a sanitizer of the emulation stops the kernel.
WRONG = '^AssertionError: '
OUTSIDE = r'^EmulationError: [\s\S]*AddressSanitizer'
ELSEWHERE = '^(AssertionError|EmulationError): '
MISALIGNED = r'^EmulationError: [\s\S]*misaligned address'
SILENT = '^Failed: DID NOT WARN'
RAW_NUMBER = '^TypeError: a kernel argument must be a tensor or a ctypes scalar, got -?[0-9.]+ of'


def laplacian(test: str) -> str:
    return f'tests/cuda_emulation/test_laplacian_kernel.py::{test}'


def size(n: int, m: int, d: int, dtype: str = 'float32', groups: int = 1) -> str:
    return laplacian(f'test_against_the_reference[{n}-{m}-{d}-{dtype}-laplacian-{groups}]')


def solver(test: str) -> str:
    return f'tests/cuda_emulation/test_newton_schulz.py::{test}'


def dispatch(test: str) -> str:
    return f'tests/cuda_emulation/test_dispatch.py::{test}'


def runtime(test: str) -> str:
    return f'tests/ops/test_cupy_runtime.py::{test}'


def backend(test: str) -> str:
    return f'tests/ops/test_backend.py::{test}'


def attention(test: str) -> str:
    return f'tests/ops/test_cpu_attention.py::{test}'


def tokens(*sizes: int) -> str:
    return attention(f'test_values_and_gradients[{sizes}-laplacian]')


def fused(test: str) -> str:
    return f'tests/cuda_emulation/test_nystrom_attention.py::{test}'


def fused_backward(test: str) -> str:
    return f'tests/cuda_emulation/test_nystrom_attention_backward.py::{test}'


ONE = size(1, 1, 1, groups=3)
FUSED, FUSED_ONE, PIECES, SIXTEEN = (fused(f'test_against_the_reference[{size}]') for size in (
    '200-49-32-32-float32-laplacian-2', '1-1-1-1-float32-laplacian-2',
    '70-49-8-130-bfloat16-laplacian-1', '63-16-20-20-float16-laplacian-1'))
FUSED_BITS = 'test_same_bits_whatever_the_order_the_grid_and_the_alignment'
FUSED_FAR, FUSED_GROUPS = map(fused, ('test_b45_offsets_beyond_32_bits',
                                      'test_b16_more_groups_than_a_grid_has_rows'))
BACK, BACK_ONE, BACK_HALF, BACK_CHUNKS = (
    fused_backward(f'test_against_the_reference[{size}]') for size in (
        '200-49-32-32-float32-laplacian-2', '1-1-1-1-float32-laplacian-2',
        '63-16-20-20-float16-laplacian-1', '65-50-72-20-bfloat16-gaussian-1'))
BACK_OP, BACK_FAR, BACK_BITS = map(fused_backward, (
    'test_launches_of_the_op', 'test_b45_offsets_beyond_32_bits', FUSED_BITS))
FULL = size(64, 48, 32, groups=3)
SAME_BITS = 'test_same_bits_whatever_the_order_the_grid_and_the_alignment'
CHUNKS = laplacian('test_chunks_of_the_key_gradient')
FLAT = laplacian('test_flat_image_has_exactly_no_gradient')
# More than 2^31 elements in K; more than 2^32 in q and 2^31 in the partial sums.
FAR_K, FAR_Q = (laplacian(f'test_b45_offsets_beyond_32_bits[{size}]')
                for size in ('33554560-64-4', '16777344-64-256'))
FAR_MATRICES = solver('test_b45_offsets_beyond_32_bits')
ASYMMETRIC = dispatch('test_solver_through_the_kernels[two-norm-91-forward1]')
START = solver('test_start[1-two-norm]')
PRODUCT = solver('test_product[(False, False)-0-31]')
FORCED_PRODUCTS = dispatch('test_solver_through_the_kernels[spd-91-forward1]')
LAUNCH = runtime('test_b04_b22_launch_on_torchs_stream_and_device')
LAUNCHES = runtime('test_b04_b16_b22_b45_launches_for_sizes_that_cannot_be_allocated_here'
                   '[1-1065024-49-32]')
COMPILED_ONCE = runtime('test_compiled_once_for_each_device_and_macro_set')

INSIDE = attention('test_reads_and_writes_stay_inside_the_tensors')
HELD = attention('test_variance_that_rounds_below_zero')
UNEQUAL_CHUNKS = attention('test_covariance_of_tokens_that_drift[1000]')
FEW_TOKENS, TWO_GROUPS, CHUNKS_OF_TOKENS = (
    tokens(*sizes) for sizes in ((47, 4, 20, 16, 1, 3), (191, 49, 32, 33, 1, 2),
                                 (1537, 256, 20, 8, 1, 1)))

BARRIER = '__syncthreads();'
# Every barrier of a file in the order of the text: its kernel and place, the test that misses it,
# and soak. No test can miss one that is not needed.
BARRIERS = {
    LAPLACIAN: (
        ('forward', 'before a chunk is loaded', size(64, 200, 33), True),
        ('forward', 'after it', FULL, False),
        ('backward_q', 'before landmarks are loaded', size(65, 50, 31, 'bfloat16', 2), True),
        ('backward_q', 'after it', FULL, False),
        ('backward_k', 'before queries are loaded', CHUNKS, True),
        ('backward_k', 'after it', ONE, False),
        ('backward_k', 'before a slice is handed over', FULL, True),
        ('backward_k', 'after a slice is handed over', FULL, True),
        ('reduce_k', 'before the sums are stored', laplacian(SAME_BITS), True),
        ('reduce_k', 'after it', ONE, False)),
    SOLVER: (
        ('inverse', 'after a matrix is loaded', START, True),
        ('inverse', 'after the norms are stored', START, True),
        ('inverse', 'before their memory is used again', START, True),
        ('inverse', 'after the start', START, True),
        ('inverse', 'after the residual', solver(SAME_BITS), False),
        ('inverse', 'before X is written', solver('test_start[1-spd]'), True),
        ('inverse', 'after X is written', solver('test_inverse[5-two-norm]'), True),
        ('start', 'before the maxima are stored', START, True),
        ('start', 'after it', solver('test_start[1-spd]'), False),
        ('product', 'before tiles are loaded', solver('test_product[(False, False)-0-68]'), True),
        ('product', 'after it', PRODUCT, False)),
    ATTENTION_TILE: (
        ('landmarks', 'before tiles are loaded', fused(FUSED_BITS), True),
        ('landmarks', 'after it', FUSED, False),
        ('keys', 'before slices are handed over', FUSED, True),
        ('keys', 'after slices are handed over', FUSED, True)),
    ATTENTION_SUMS: (
        ('keys', 'before the sums of values are stored', PIECES, True),
        ('keys', 'after it', FUSED, True),
        ('merge_statistics', 'before the sums are stored', FUSED, False),
        ('merge_keys, merge_grad_covariance, merge_landmarks', 'after it', BACK_OP, False)),
    FUSED_ATTENTION: (
        ('statistics', "before a chunk's shift", FUSED, True),
        ('statistics', 'after it', FUSED, True),
        ('statistics', 'before the scatter', FUSED, False),
        ('statistics', 'before the sums of rows are stored', FUSED, True),
        ('statistics', 'after the sums of rows are stored', FUSED, True),
        ('statistics', "after a chunk's mean", FUSED, True),
        ('keys', 'after C', FUSED, False),
        ('keys', 'after C P', FUSED, True),
        ('keys', 'after the parts of the variances', FUSED, True),
        ('keys', 'after the scales', FUSED, True),
        ('keys', 'after the values', FUSED, True),
        ('output', "before a chunk's context is loaded", fused(FUSED_BITS), True),
        ('output', 'after C', FUSED, False)),
    FUSED_BACKWARD: (
        ('grad_context', 'after C', BACK_OP, False),
        ('grad_factors', 'before P is loaded', BACK_BITS, True),
        ('grad_factors', 'after it', BACK_OP, False),
        ('grad_factors', 'after P Cov', BACK_OP, True),
        ('grad_factors', 'after the transpose of P', BACK_OP, True),
        ('grad_factors', 'after P Cov P', BACK_OP, True),
        ('grad_factors', 'after E', BACK_OP, True),
        ('grad_values', 'after C', BACK_OP, False),
        ('grad_values', 'after C P', BACK_OP, True),
        ('grad_values', 'after the parts of the variances', BACK_OP, True),
        ('grad_values', 'after the scales', BACK_OP, True),
        ('grad_values', "after the parts of the scales' gradients", BACK_OP, True),
        ('grad_values', 'after the factors', BACK_OP, True),
        ('grad_keys, grad_queries, grad_landmarks', 'after C', BACK_OP, False),
        ('grad_keys, grad_queries, grad_landmarks', 'after x and u', BACK_OP, True),
        ('grad_keys, grad_queries, grad_landmarks', 'after the weights', BACK_OP, True),
        ('grad_keys, grad_queries, grad_landmarks', 'after the tokens', BACK_OP, True)),
}

MUTATIONS = [
    *(Mutation('dropped barrier', f'{kernel}, {place}', file, BARRIER, '', test, WRONG, index,
               soak=soak)
      for file, barriers in BARRIERS.items()
      for index, (kernel, place, test, soak) in enumerate(barriers)),

    Mutation('missing tail check', 'forward, queries', LAPLACIAN,
             'if (query < queries && landmark < landmarks)', 'if (landmark < landmarks)',
             ONE, OUTSIDE, soak=False),
    Mutation('missing tail check', 'forward, landmarks', LAPLACIAN,
             'if (query < queries && landmark < landmarks)', 'if (query < queries)',
             ONE, OUTSIDE),
    Mutation('missing tail check', 'backward_q, queries', LAPLACIAN,
             'if (row + i < queries)', 'if (true)', ONE, OUTSIDE),
    Mutation('missing tail check', 'weights, landmarks', LAPLACIAN,
             'landmark < landmark_count && query < query_count', 'query < query_count',
             ONE, OUTSIDE),
    Mutation('missing tail check', 'weights, queries', LAPLACIAN,
             'landmark < landmark_count && query < query_count', 'landmark < landmark_count',
             ONE, OUTSIDE),
    Mutation('missing tail check', 'backward_k, landmarks', LAPLACIAN,
             'if (landmark >= landmarks) continue;', '', ONE, OUTSIDE),
    Mutation('missing tail check', 'backward_k, channels', LAPLACIAN,
             'if (first_channel + channel + c < HEAD_DIM)', 'if (true)', ONE, OUTSIDE),
    Mutation('missing tail check', 'reduce_k, elements', LAPLACIAN,
             'if (row == 0 && element < elements)', 'if (row == 0)', ONE, OUTSIDE),
    Mutation('missing tail check', 'rows of a tile', LAPLACIAN,
             'if (!present) return result;', '', ONE, OUTSIDE),
    Mutation('missing tail check', 'channels that are read', LAPLACIAN,
             'if (channel + 3 < HEAD_DIM) result.w', 'result.w', ONE, OUTSIDE),
    Mutation('missing tail check', 'channels that are written', LAPLACIAN,
             'if (channel + 3 < HEAD_DIM) row', 'row', ONE, OUTSIDE),
    Mutation('missing tail check', 'inverse, rows and columns', SOLVER,
             'w_tile[i] = r < SIZE && c < SIZE ? w_in[r * SIZE + c] : 0.f;',
             'w_tile[i] = w_in[r * SIZE + c];', solver('test_inverse[5-spd]'), OUTSIDE),
    Mutation('missing tail check', 'product, rows', SOLVER, 'if (r >= m) continue;', '',
             PRODUCT, OUTSIDE, soak=False),
    Mutation('missing tail check', 'product, columns', SOLVER, 'if (s >= m) continue;', '',
             PRODUCT, OUTSIDE),

    Mutation('off-by-one tile edge', 'a row too many', LAPLACIAN,
             'channel, row < row_count,', 'channel, row <= row_count,', ONE, OUTSIDE, soak=False),
    Mutation('off-by-one tile edge', 'forward, a query too many', LAPLACIAN,
             'if (query < queries &&', 'if (query <= queries &&', ONE, OUTSIDE),
    Mutation('off-by-one tile edge', 'forward, a landmark too few', LAPLACIAN,
             '&& landmark < landmarks)', '&& landmark < landmarks - 1)', ONE, WRONG),
    Mutation('off-by-one tile edge', 'backward_q, a landmark too few', LAPLACIAN,
             'j < landmarks; ++j', 'j < landmarks - 1; ++j', ONE, WRONG),
    Mutation('off-by-one tile edge', 'backward_k, a query too few', LAPLACIAN,
             'at_most(n_end - n_first, LANDMARK_N_TILE)',
             'at_most(n_end - n_first, LANDMARK_N_TILE - 1)', FULL, WRONG),
    Mutation('off-by-one tile edge', 'a tile too few', COMMON,
             'return (a + b - 1) / b;', 'return a / b;', ONE, WRONG),
    Mutation('off-by-one tile edge', 'inverse, a row too few', SOLVER,
             'w_tile[i] = r < SIZE &&', 'w_tile[i] = r < SIZE - 1 &&',
             solver('test_inverse[5-spd]'), WRONG, soak=False),
    Mutation('off-by-one tile edge', 'product, an element past the line', SOLVER,
             'if (left > 3) quad.w', 'if (left > 2) quad.w', PRODUCT, OUTSIDE),

    Mutation('32-bit offset', 'forward, q', LAPLACIAN,
             'q + (group * n + n_first) * HEAD_DIM',
             'q + (unsigned)((group * n + n_first) * HEAD_DIM)', FAR_Q, WRONG, soak=False),
    Mutation('32-bit offset', 'forward, K', LAPLACIAN,
             'kernel + (group * n + n_first + query) * m + m_first',
             'kernel + (int)((group * n + n_first + query) * m) + m_first', FAR_K, OUTSIDE),
    Mutation('32-bit offset', 'backward_q, its result', LAPLACIAN,
             'grad_q + (first_row + row + i) * HEAD_DIM',
             'grad_q + (unsigned)((first_row + row + i) * HEAD_DIM)', FAR_Q, WRONG),
    Mutation('32-bit offset', 'backward_k, partial sums', LAPLACIAN,
             'partial + ((group * n_chunks + n_chunk) * m + m_first + landmark) * HEAD_DIM',
             'partial + (int)(((group * n_chunks + n_chunk) * m + m_first + landmark) * HEAD_DIM)',
             FAR_Q, OUTSIDE),
    Mutation('32-bit offset', 'inverse, W', SOLVER, 'w + matrix * (SIZE * SIZE)',
             'w + (unsigned)(matrix * (SIZE * SIZE))', FAR_MATRICES, WRONG),
    Mutation('32-bit offset', 'start, X', SOLVER, 'x + matrix * m * m',
             'x + (unsigned)(matrix * m * m)', FAR_MATRICES, WRONG),
    Mutation('32-bit offset', 'product, all matrices', SOLVER, 'const long long offset =',
             'const unsigned offset =', FAR_MATRICES, WRONG, soak=False),
    Mutation('32-bit offset', 'sizes of a launch', LAPLACIAN_LAUNCH,
             'from ctypes import c_float, c_longlong',
             'from ctypes import c_float, c_int as c_longlong', LAUNCHES, WRONG),

    Mutation('default stream', 'of a launch', RUNTIME,
             '_Stream(torch.cuda.current_stream(device).cuda_stream)', '_Stream(0)',
             LAUNCH, WRONG, soak=False),
    Mutation('default stream', "another device's", RUNTIME, 'torch.cuda.current_stream(device)',
             "torch.cuda.current_stream(torch.device('cuda', 0))", LAUNCH, WRONG),

    Mutation('no device guard', 'around a launch', RUNTIME, 'with torch.cuda.device(device):',
             'if True:', LAUNCH, WRONG, soak=False),
    Mutation('no device guard', 'after an error', RUNTIME, 'with torch.cuda.device(device):',
             'guard = torch.cuda.device(device)\n    guard.__enter__()\n    if True:',
             runtime('test_b22_device_is_restored_after_a_failed_launch'), WRONG),

    Mutation('stale cache key', 'without the device', RUNTIME,
             '_compiled(kernel, torch.cuda.current_device())', '_compiled(kernel, 0)',
             COMPILED_ONCE, WRONG, soak=False),
    Mutation('stale cache key', 'without the macros', RUNTIME,
             'tuple[tuple[str, int], ...]\n',
             "tuple[tuple[str, int], ...] = __import__('dataclasses').field(compare=False)\n",
             COMPILED_ONCE, WRONG, soak=False),
    Mutation('stale cache key', 'without the function', RUNTIME, 'function: str',
             "function: str = __import__('dataclasses').field(compare=False)", LAUNCHES, WRONG),
    Mutation('stale cache key', 'nothing is kept', RUNTIME, '@cache\ndef _compiled',
             "@__import__('functools').lru_cache(maxsize=0)\ndef _compiled", COMPILED_ONCE, WRONG),
    Mutation('stale cache key', 'no error is kept', RUNTIME, '@cache\ndef _compiled',
             "@__import__('functools').lru_cache(maxsize=0)\ndef _compiled",
             runtime('test_b25_failed_compilation_names_the_fix_and_is_not_tried_again'), WRONG),

    Mutation('Python float passed raw', 'by the op', LAPLACIAN_LAUNCH,
             'c_float(max(scale, -torch.finfo(torch.float32).max))',
             'max(scale, -torch.finfo(torch.float32).max)', LAUNCHES, RAW_NUMBER, soak=False),
    Mutation('Python float passed raw', 'by the runtime', RUNTIME,
             "else:\n            raise TypeError('a kernel argument",
             "else:\n            values.append(argument)\n"
             "        if False:\n            raise TypeError('a kernel argument",
             runtime('test_b18_raw_numbers_are_refused[4.0]'), '^Failed: DID NOT RAISE',
             soak=False),
    Mutation('Python float passed raw', 'as a double', LAPLACIAN_LAUNCH,
             'from ctypes import c_float,', 'from ctypes import c_double as c_float,',
             LAUNCHES, WRONG),
    Mutation('Python float passed raw', 'by the solver', SOLVER_LAUNCH, 'c_float(scale)', 'scale',
             runtime('test_b16_b22_b45_solver_launches_for_sizes_that_cannot_be_allocated_here'
                     '[70000-49]'), RAW_NUMBER),

    # A stride so large that a block takes its first tile alone.
    *(Mutation('grid not stepped over', kernel, LAPLACIAN, 'tile += gridDim.x)',
               'tile += 1ll << 40)', laplacian(SAME_BITS), WRONG, index)
      for index, kernel in enumerate(('forward', 'backward_q', 'backward_k', 'reduce_k'))),
    Mutation('grid not stepped over', 'inverse', SOLVER, 'matrix += gridDim.x)',
             'matrix += 1ll << 40)', solver(SAME_BITS), WRONG, 0),
    Mutation('grid not stepped over', 'start', SOLVER, 'matrix += gridDim.x)',
             'matrix += 1ll << 40)', solver(SAME_BITS), WRONG, 1),
    Mutation('grid not stepped over', 'product', SOLVER, 'tile += gridDim.x)',
             'tile += 1ll << 40)', solver(SAME_BITS), WRONG),

    Mutation('grid', 'above the limit', RUNTIME, 'min(max(blocks, 1), _MAX_BLOCKS)',
             'max(blocks, 1)', runtime('test_b16_grid_keeps_its_limits[1099511627776-2147483647]'),
             WRONG),
    Mutation('grid', 'empty', RUNTIME, 'min(max(blocks, 1), _MAX_BLOCKS)',
             'min(blocks, _MAX_BLOCKS)', runtime('test_b16_grid_keeps_its_limits[0-1]'), WRONG),
    Mutation('grid', 'without the last chunk of queries', LAPLACIAN_TILING,
             'ceil_div(self.n, self.rows_per_chunk)', 'self.n // self.rows_per_chunk',
             dispatch('test_b16_launch_plans_of_sizes_that_cannot_be_allocated_here'
                      '[(1, 1065024, 49, 32)]'), WRONG),

    Mutation('alignment not checked', 'loads', LAPLACIAN, 'if (HEAD_DIM % 4 == 0 && vectors) {',
             'if (HEAD_DIM % 4 == 0) {', laplacian(SAME_BITS), MISALIGNED, 0),
    Mutation('alignment not checked', 'stores', LAPLACIAN, 'if (HEAD_DIM % 4 == 0 && vectors) {',
             'if (HEAD_DIM % 4 == 0) {', laplacian(SAME_BITS), MISALIGNED, 1),
    Mutation('alignment not checked', 'of matrices', SOLVER, 'vectors = m % 4 == 0 &&',
             'vectors = m % 4 == 0 ||', solver(SAME_BITS), MISALIGNED),
    Mutation('alignment not checked', 'of the lines of a matrix', SOLVER,
             'vectors = m % 4 == 0 &&', 'vectors =', PRODUCT, MISALIGNED),

    Mutation('left out', 'last chunk of channels', LAPLACIAN, 'chunk < CHUNKS; ++chunk',
             'chunk < CHUNKS - (CHUNKS > 1); ++chunk', size(64, 200, 33), WRONG),
    Mutation('left out', 'last landmarks of a tile', LAPLACIAN,
             '(M_TILE + LANDMARK_OUTPUTS - 1) / LANDMARK_OUTPUTS', 'M_TILE / LANDMARK_OUTPUTS',
             FLAT, WRONG),
    Mutation('left out', 'last slice of queries', LAPLACIAN, 'source < SLICES;',
             'source < SLICES - 1;', FULL, WRONG),
    Mutation('left out', 'last row of partial sums', LAPLACIAN, 'i < REDUCE_ROWS; ++i',
             'i < REDUCE_ROWS - 1; ++i', CHUNKS, WRONG),
    Mutation('left out', 'last quad of a product', SOLVER, 'k < inner; k += 4',
             'k < inner - 4; k += 4', solver('test_product[(False, False)-0-64]'), WRONG),
    Mutation('left out', 'zeros of the padding', SOLVER, 'residual[i] = 0.f;', '',
             solver(SAME_BITS), WRONG),
    Mutation('left out', "the device's shared memory", SOLVER_LAUNCH,
             'self.tiling.shared_bytes <= cupy_runtime.shared_memory_limit(self.device)', 'True',
             FORCED_PRODUCTS, WRONG),
    Mutation('left out', 'opting into shared memory', RUNTIME,
             'compiled.max_dynamic_shared_size_bytes = shared_bytes', 'pass',
             runtime('test_large_shared_memory_is_opted_into_once'), WRONG),
    Mutation('left out', 'a step', SOLVER_LAUNCH, 'in range(solver_iters)',
             'in range(solver_iters - 1)', FORCED_PRODUCTS, WRONG),
    Mutation('left out', 'the bound of the start', SOLVER, 'norm_inf + spd_lower_bound',
             'norm_inf', solver('test_inverse[5-spd]'), WRONG),

    Mutation('ties', 'small differences', DISTANCE, 'STEEP = 1.7014118346046923e38f',
             'STEEP = 1e30f', laplacian('test_b20_the_smallest_difference_is_no_tie'), WRONG),
    Mutation('ties', 'with a sign', DISTANCE, 'fma_saturate(difference, STEEP, 0.5f)',
             'fma_saturate(difference, STEEP, 1.f)', laplacian('test_b20_gradient_at_ties'),
             WRONG),
    Mutation('ties', 'sums that differ in their last bit', LAPLACIAN,
             'gradient[j][c] -= weight_sum[j];',
             'gradient[j][c] = gradient[j][c] * 1.000001f - weight_sum[j];', FLAT, WRONG),
    Mutation('ties', 'times infinity', LAPLACIAN_LAUNCH,
             'max(scale, -torch.finfo(torch.float32).max)', 'scale',
             dispatch('test_smallest_scale_keeps_ties'), WRONG),

    Mutation('formula', "the Gaussian's factor of two", LAPLACIAN_LAUNCH,
             "(2 if kernel == 'gaussian' else 1)", '1',
             dispatch('test_op_through_the_kernels[(1, 1, 1, 1, 32)-torch.float32-gaussian]'),
             WRONG),
    Mutation('formula', 'sign of the key gradient', LAPLACIAN, '-WEIGHT_FACTOR * gradient_scale',
             'WEIGHT_FACTOR * gradient_scale', ONE, WRONG),
    Mutation('formula', 'bfloat16 cut off, not rounded', COMMON,
             '((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)', '(bits >> 16)',
             size(200, 49, 32, 'bfloat16'), WRONG),
    Mutation('formula', 'start not transposed', SOLVER, 'w[column * stride + row]',
             'w[row * stride + column]', START, WRONG),
    Mutation('formula', 'one norm for both', SOLVER, 'make_float2(1.f / norm_1,',
             'make_float2(1.f / norm_inf,', START, WRONG),

    Mutation('formula', 'start without the bound', SOLVER, '2.f / (norm_inf + spd_lower_bound)',
             '2.f / norm_inf', solver('test_start[1-spd]'), WRONG),
    Mutation('formula', 'product of the norms', SOLVER, '* factors.x * factors.y',
             '* (factors.x * factors.y)', solver('test_start[1e+25-two-norm]'), WRONG),
    Mutation('formula', 'X W for W X', SOLVER_LAUNCH, 'product(w, x, residual',
             'product(x, w, residual', ASYMMETRIC, WRONG),
    Mutation('formula', 'residual times X', SOLVER_LAUNCH, 'product(x, residual, other',
             'product(residual, x, other', ASYMMETRIC, WRONG),
    Mutation('formula', 'product written into its factor', SOLVER_LAUNCH,
             'product(x, residual, other', 'product(x, residual, x', ASYMMETRIC, WRONG),
    Mutation('formula', 'gradient, left factor not transposed', SOLVER_LAUNCH,
             'transpose_a=True', 'transpose_a=False', ASYMMETRIC, WRONG),
    Mutation('formula', 'gradient, right factor not transposed', SOLVER_LAUNCH,
             'transpose_b=True', 'transpose_b=False', ASYMMETRIC, WRONG),

    Mutation('choice', 'a forced backend gives way', BACKEND, "if backend != 'auto':", 'if False:',
             backend('test_forced_backends_insist'), '^Failed: DID NOT RAISE'),
    Mutation('choice', 'the reason at every call', BACKEND, '_warned.add((op, str(error)))',
             'pass', backend('test_auto_says_once_why_a_cuda_tensor_did_not_take_them'),
             '^UserWarning: op runs in plain torch'),
    Mutation('choice', 'no reason', BACKEND, 'if tensor.is_cuda and', 'if False and',
             backend('test_auto_says_once_why_a_cuda_tensor_did_not_take_them'),
             '^Failed: DID NOT WARN'),
    Mutation('choice', "CuPy's own error lost", RUNTIME, 'from cupy\n', 'from None\n',
             runtime('test_b23_cupy_that_does_not_import_shows_its_own_error[missing]'), WRONG),

    Mutation('missing tail check', 'attention, lanes past the last token', ATTENTION,
             'memset(x + r * TILE + rows, 0, sizeof(float) * (size_t)(stop - rows));', '(void)x;',
             FEW_TOKENS, WRONG, soak=False),
    Mutation('missing tail check', 'attention, tokens of the last tile', ATTENTION,
             'return least(TILE, p->n - tile * TILE);', 'return TILE;', INSIDE, WRONG),
    Mutation('missing tail check', 'attention, tokens that are transposed', CPU_DISTANCE,
             'least(first + i, rows - 1) * q_row', '(first + i) * q_row', INSIDE, WRONG),
    Mutation('missing tail check', 'attention, tokens whose gradient is written', CPU_DISTANCE,
             'if (needs_q && t < rows)', 'if (needs_q)', INSIDE, WRONG),
    *(Mutation('left out', f'attention, last tile of a chunk, {name}', ATTENTION,
               'tile < chunk.stop;', 'tile + 1 < chunk.stop;', CHUNKS_OF_TOKENS, WRONG, index)
      for index, name in enumerate(('statistics', 'context', 'output', 'gradient of the context',
                                    'gradient of the keys', 'gradient of the queries'))),
    Mutation('left out', 'attention, last chunk of the sums', ATTENTION,
             'chunk < chunks;', 'chunk < chunks - 1;', CHUNKS_OF_TOKENS, WRONG),
    *(Mutation('left out', f'attention, last chunk of the gradient of {name}', ATTENTION,
               'chunk < p->chunks;', 'chunk < p->chunks - 1;', CHUNKS_OF_TOKENS, WRONG, index)
      for index, name in enumerate(('the covariance', 'the landmarks'))),
    Mutation('left out', 'attention, last vector of a row sum', ATTENTION,
             'add_row_sums(centered, m, vectors, row_sums)',
             'add_row_sums(centered, m, rows / LANES, row_sums)', UNEQUAL_CHUNKS, WRONG),
    Mutation('left out', 'attention, distances of the channels before', ATTENTION,
             'channel == 0, c +', '1, c +', tokens(767, 49, 72, 32, 2, 3), WRONG),
    Mutation('left out', 'attention, the scratch of the first pass', ATTENTION,
             'if (!first_pass) return c;', 'return c;', FEW_TOKENS, WRONG),
    Mutation('left out', 'attention, the largest number of landmarks', ATTENTION_LAUNCH,
             'landmarks.shape[2] <= cpu', 'landmarks.shape[2] < cpu',
             attention('test_what_is_left_to_the_torch_form[cpu-256-whiten-True]'), WRONG),
    Mutation('left out', 'attention, channels that are not dense', ATTENTION_LAUNCH,
             'x if x.stride(-1) == 1 else x.contiguous()', 'x',
             attention('test_any_strides[transposed_channels-32]'), WRONG),
    Mutation('left out', 'attention, padding to whole vectors', ATTENTION_LAUNCH,
             'if missing:', 'if missing > 12:', FEW_TOKENS, WRONG),

    Mutation('covariance', 'centred with the wrong mean', ATTENTION, 'v * LANES) - mean[r]);',
             'v * LANES) - mean[0]);', FEW_TOKENS, WRONG),
    Mutation('covariance', 'plain sums of squares', ATTENTION, 'shift[r] /= (float)rows;',
             'shift[r] = 0;',
             attention('test_covariance_of_nearly_equal_queries_does_not_cancel'), WRONG),
    Mutation('covariance', 'chunks merged without their shift', ATTENTION,
             '+ count * share * (other[a] - mean[a]) * (other[b] - mean[b]);', ';',
             UNEQUAL_CHUNKS, WRONG),
    Mutation('covariance', 'chunks of equal weight', ATTENTION,
             'share = length / (count + length);', 'share = 1 / (double)(i + 1);',
             UNEQUAL_CHUNKS, WRONG),
    Mutation('covariance', 'about the mean of the first tile', ATTENTION,
             'scatter[i * m + j] -= (double)count * mean[i] * mean[j];', ';', UNEQUAL_CHUNKS,
             WRONG),
    Mutation('covariance', 'factored to half of its digits', CPU_PRODUCT, 'pivot * 0x1p-23',
             'pivot * 0x1p-12', attention('test_accuracy_on_nearly_flat_maps[400-0.1]'), WRONG),
    Mutation('covariance', 'factored without pivots', CPU_PRODUCT,
             'if (s[i * row + i] > s[at * row + at]) at = i;', 'at = j;',
             attention('test_accuracy_on_nearly_flat_maps[49-0.1]'), WRONG),

    Mutation('formula', "attention, factor of the covariance's gradient", ATTENTION,
             'narrow(first, m, m, 2 / (double)p->n', 'narrow(first, m, m, 1 / (double)p->n',
             TWO_GROUPS, WRONG),
    Mutation('formula', "attention, factor of the variance's gradient", ATTENTION,
             'twice[t] = 2 * grad_variance[t];', 'twice[t] = grad_variance[t];', TWO_GROUPS,
             WRONG),
    Mutation('formula', 'attention, gradient of a variance that is held', ATTENTION,
             'used * -0.5f', '-0.5f', HELD, WRONG),
    Mutation('formula', 'attention, variance below zero', ATTENTION,
             'const float variance = scale[t] < 0 ? 0 : scale[t];',
             'const float variance = scale[t];', HELD, WRONG),
    Mutation('formula', "attention, other half of W's gradient", ATTENTION,
             '- second[j * row + i] ', '', TWO_GROUPS, WRONG, soak=False),
    Mutation('formula', "attention, context's part of W's gradient", ATTENTION,
             ' - fourth[i * row + j]', '', TWO_GROUPS, WRONG),
    Mutation('formula', 'attention, mean of the gradient', ATTENTION,
             'b->mean_grad + chunk.local * d_v, grads);', '0, grads);', TWO_GROUPS, WRONG),
    Mutation('formula', 'attention, start without the bound', CPU_SOLVER,
             '(norm_inf(negative, row, m) + ridge)', 'norm_inf(negative, row, m)',
             attention('test_steps_of_the_solver[1]'), WRONG),
    Mutation('formula', 'attention, a step too many', CPU_SOLVER, 'iter < iters', 'iter <= iters',
             attention('test_steps_of_the_solver[1]'), WRONG),

    Mutation('wrong memory', "attention, v by k's strides", ATTENTION,
             '.v = tokens(v, strides + 6), .out', '.v = tokens(v, strides + 3), .out',
             attention('test_any_strides[beside-32]'), WRONG, soak=False),
    Mutation('wrong memory', "attention, incoming gradient by v's strides", ATTENTION,
             '.grad_out = tokens(grad_out, strides + 9)',
             '.grad_out = tokens(grad_out, strides + 6)',
             attention('test_any_strides[beside-32]'), WRONG),
    Mutation('wrong memory', 'attention, images for heads', ATTENTION,
             'group / heads * x.image + group % heads * x.head',
             'group % heads * x.image + group / heads * x.head', tokens(49, 8, 33, 32, 2, 2),
             WRONG),
    Mutation('wrong memory', 'attention, kept tiles of the first group', ATTENTION,
             '(chunk.local * p->tiles + tile) * p->m * TILE',
             'tile * p->m * TILE', TWO_GROUPS, WRONG),
    Mutation('wrong memory', 'attention, groups of the first batch', ATTENTION,
             '(Chunk){local, p->first + local,', '(Chunk){local, local,',
             attention('test_kept_tiles_or_computed_again[laplacian-no tiles]'), WRONG),
    Mutation('wrong memory', 'attention, one worker for all threads', CPU_COMMON,
             'const int worker = __atomic_fetch_add(&entered, 1, __ATOMIC_RELAXED);',
             'const int worker = 0;', attention(
                 'test_same_bits_twice_and_for_any_number_of_threads[(3136, 49, 32, 32, 1, 2)]'),
             WRONG),
    Mutation('wrong memory', 'attention, tiles kept of any number of groups', ATTENTION,
             'least(groups, KEPT / one.used)', 'groups',
             attention('test_memory_does_not_grow_with_the_tokens[16-forward]'), WRONG, 0),
    Mutation('wrong memory', 'attention, chunks of any number of tokens', ATTENTION,
             'CHUNKS = 64', 'CHUNKS = 1 << 20',
             attention('test_memory_does_not_grow_with_the_tokens[1-backward]'), WRONG),

    Mutation('missing tail check', 'fused, tokens of a tile', ATTENTION_TILE,
             'present && token < count ? c[i][j] - less : 0.f', 'present ? c[i][j] - less : 0.f',
             FUSED, WRONG),
    Mutation('missing tail check', 'fused, rows that are read', ATTENTION_TILE,
             'if (!present) return result;', '', FUSED_ONE, OUTSIDE),
    Mutation('missing tail check', 'fused, rows that are written', FUSED_ATTENTION,
             'if (row < count)', '', FUSED_ONE, OUTSIDE),
    Mutation('missing tail check', 'fused, channels that are written', ATTENTION_TILE,
             'if (channel + 3 < CHANNELS) to[', 'to[', FUSED_ONE, OUTSIDE),
    Mutation('missing tail check', 'fused, landmarks that are written', FUSED_ATTENTION,
             'token >= count || landmark >= LANDMARKS', 'token >= count', FUSED_ONE, OUTSIDE),
    Mutation('off-by-one tile edge', 'fused, a landmark too few', FUSED_ATTENTION,
             'const bool present = a < LANDMARKS && b <= a;',
             'const bool present = a < LANDMARKS - 1 && b <= a;', FUSED, WRONG),
    Mutation('off-by-one tile edge', 'fused, a token too few', ATTENTION_SUMS,
             'token < count; token += PIECE_SLICES', 'token < count - 1; token += PIECE_SLICES',
             FUSED, WRONG),
    Mutation('32-bit offset', 'fused, of a group', ATTENTION_TILE,
             'return group / heads * image_stride',
             'return (int)(group / heads * image_stride)', FUSED_FAR, ELSEWHERE),
    Mutation('32-bit offset', 'fused, scatter of a chunk', FUSED_ATTENTION,
             'chunk_scatter + item * (64 * PAIRS) + pair',
             'chunk_scatter + (int)item * (64 * PAIRS) + pair', FUSED_FAR, ELSEWHERE),
    Mutation('32-bit offset', 'fused, context of a chunk', FUSED_ATTENTION,
             'chunk_context + item * ((LANDMARKS + 1) * VALUE_DIM)',
             'chunk_context + (int)item * ((LANDMARKS + 1) * VALUE_DIM)', FUSED_FAR, ELSEWHERE),
    Mutation('covariance', 'fused, about zero', FUSED_ATTENTION,
             'shift[landmark] = sum / count;', 'shift[landmark] = 0.f;',
             fused('test_nearly_flat_maps[all-0.005]'), WRONG),
    Mutation('covariance', "fused, chunks' means left out", FUSED_ATTENTION,
             '(64 * PAIRS)] + count', '(64 * PAIRS)] + 0', FUSED, WRONG),
    Mutation('formula', 'fused, off the diagonal once', ATTENTION_KEYS,
             '(row < column ? 2.f : 1.f)', '1.f', FUSED, WRONG),
    Mutation('wrong memory', "fused, v by k's strides", FUSED_LAUNCH, '*_strides(k, v, landmarks)',
             '*_strides(k, k, landmarks)', PIECES, ELSEWHERE),
    Mutation('wrong memory', 'fused, images for heads', ATTENTION_TILE,
             'group / heads * image_stride + group % heads * head_stride',
             'group % heads * image_stride + group / heads * head_stride',
             fused('test_b06_same_bits_whatever_the_strides[16-20-torch.float16]'),
             ELSEWHERE),
    Mutation('left out', 'fused, alignment of the strides', ATTENTION_TILE,
             'aligned_to_quad(x) && ', '', fused(FUSED_BITS), MISALIGNED, 0),
    Mutation('left out', "fused, the device's shared memory", FUSED_TILING,
             'if needed > shared_memory:', 'if False:', fused(
                 'test_what_does_not_fit_runs_unfused_and_says_why_once[91-8-bytes of shared '
                 'memory a block, and this device has 101376]'), SILENT),
    Mutation('wrong memory', 'fused, shared memory too small', FUSED_TILING,
             'floats = TILE + 2 * self', 'floats = 2 * self', FUSED, OUTSIDE),

    Mutation('missing tail check', 'fused backward, tokens whose gradient is written',
             FUSED_BACKWARD, 'if (token + i * TOKEN_STEP < count)', '', BACK_ONE, OUTSIDE),
    Mutation('missing tail check', 'fused backward, values whose gradient is written',
             FUSED_BACKWARD, 'if (row < count)', '', BACK_ONE, OUTSIDE),
    Mutation('missing tail check', 'fused backward, factors of tokens', FUSED_BACKWARD,
             'token < count; token += THREADS', 'token < TILE; token += THREADS', BACK_ONE,
             OUTSIDE),
    Mutation('missing tail check', 'fused backward, landmarks of a partial sum', FUSED_BACKWARD,
             'landmark + e / 4 < LANDMARKS && own < HEAD_DIM', 'own < HEAD_DIM', BACK_ONE,
             OUTSIDE),
    Mutation('missing tail check', 'fused backward, channels of a partial sum', FUSED_BACKWARD,
             'landmark + e / 4 < LANDMARKS && own < HEAD_DIM', 'landmark + e / 4 < LANDMARKS',
             BACK_ONE, OUTSIDE),
    Mutation('missing tail check', "fused backward, products' columns", FUSED_BACKWARD,
             'row < count && column + c < COLUMNS', 'row < count', BACK_ONE, OUTSIDE),
    Mutation('off-by-one tile edge', 'fused backward, a token too few for the landmarks',
             FUSED_BACKWARD, 'token < count; token += GRADIENT_SLICES',
             'token < count - 1; token += GRADIENT_SLICES', BACK_OP, WRONG),
    Mutation('off-by-one tile edge', 'fused backward, a token too few for the covariance',
             FUSED_BACKWARD, 'token < count; token += PAIR_SLICES',
             'token < count - 1; token += PAIR_SLICES', BACK_OP, WRONG),
    Mutation('off-by-one tile edge', 'fused backward, a partial sum too few', FUSED_BACKWARD,
             '2 * n_chunks + 2, MARK_ENTRIES', '2 * n_chunks + 1, MARK_ENTRIES', BACK_OP, WRONG),
    Mutation('32-bit offset', 'fused backward, partial sum', FUSED_BACKWARD,
             'return (group * (2 * n_chunks + 2) + index) * MARK_ENTRIES;',
             'return (int)(group * (2 * n_chunks + 2) + index) * MARK_ENTRIES;', BACK_FAR,
             ELSEWHERE),
    Mutation('32-bit offset', 'fused backward, square of a chunk', FUSED_BACKWARD,
             'chunk_square + item * (64 * PAIRS)', 'chunk_square + (int)item * (64 * PAIRS)',
             BACK_FAR, ELSEWHERE),
    Mutation('32-bit offset', 'fused backward, context of a chunk', FUSED_BACKWARD,
             'chunk_context + item * (CONTEXT', 'chunk_context + (int)item * (CONTEXT', BACK_FAR,
             ELSEWHERE),
    Mutation('left out', 'fused backward, landmarks of other channels', FUSED_BACKWARD,
             'if (CHUNKS * M_TILES > 1 || at == first)', 'if (at == first)', BACK_CHUNKS, WRONG),
    Mutation('left out', "fused backward, the device's shared memory", FUSED_LAUNCH,
             'if reason:', 'if False:',
             fused_backward('test_what_does_not_fit_runs_unfused_and_says_why_once'), SILENT, 1),
    Mutation('formula', "fused backward, the queries' mean", FUSED_BACKWARD,
             'return minus(c, mean + landmark);', 'return c;', BACK_OP, WRONG),
    Mutation('formula', "fused backward, the gradient's mean", FUSED_BACKWARD,
             'start[i] = i < VALUE_DIM ? mean_grad[group * VALUE_DIM + i] : 0.f;',
             'start[i] = 0.f;', BACK_OP, WRONG),
    Mutation('formula', "fused backward, factor of the covariance's gradient", FUSED_BACKWARD,
             '2.f / n', '1.f / n', BACK_OP, WRONG),
    Mutation('formula', "fused backward, factor of the variance's gradient", FUSED_BACKWARD,
             'make_float2(2.f * a, ', 'make_float2(a, ', BACK_OP, WRONG),
    Mutation('formula', 'fused backward, power of the scale', FUSED_BACKWARD,
             '-0.5f * r * r * r', '-0.5f * r * r', BACK_OP, WRONG),
    Mutation('formula', 'fused backward, gradient of a variance that is held', FUSED_BACKWARD,
             'variance < 0.f ? 0.f : -0.5f', '-0.5f',
             fused_backward('test_variance_that_rounds_below_zero_has_no_gradient'), WRONG),
    *(Mutation('formula', f"fused backward, {name}'s part of w's gradient", FUSED_BACKWARD,
               f'-{factor})', f'{factor})', BACK_OP, WRONG)
      for name, factor in (('the covariance', '2.f'), ('the context', '1.f'))),
    Mutation('formula', 'fused backward, P on the wrong side', FUSED_BACKWARD,
             'load_transposed<4 * LANDMARK_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(\n'
             '        tiles.square, key_square', 'load_matrix<4 * LANDMARK_QUADS, '
             'LANDMARK_QUADS, SQUARE_STRIDE>(tiles.square, key_square',
             fused_backward('test_nearly_flat_maps[keys]'), WRONG),
    Mutation('ties', 'fused backward, sums that differ in their last bit', FUSED_BACKWARD,
             'gradient[chunk][e] -= weight_sum[e / 4];',
             'gradient[chunk][e] = gradient[chunk][e] * 1.000001f - weight_sum[e / 4];',
             fused_backward('test_flat_maps_have_exactly_no_gradient[all]'), WRONG),
    Mutation('wrong memory', "fused backward, v by k's strides", FUSED_LAUNCH,
             '*_strides(k, v, landmarks, grad_v)', '*_strides(k, k, landmarks, grad_v)',
             BACK_CHUNKS, ELSEWHERE),
    Mutation('wrong memory', "fused backward, incoming gradient by q's strides", FUSED_LAUNCH,
             '*_strides(q, grad_out, landmarks, grad_q)', '*_strides(q, q, landmarks, grad_q)',
             BACK_CHUNKS, ELSEWHERE),
    Mutation('wrong memory', 'fused backward, shared memory too small', FUSED_TILING,
             'floats = (2 * TILE + 4 * self', 'floats = (4 * self', BACK, OUTSIDE),
    Mutation('wrong memory', 'fused backward, tiles beside each other', FUSED_TILING,
             'thin = 4 * self._value_quads', 'thin = 3 * self._value_quads', BACK, OUTSIDE),
]
