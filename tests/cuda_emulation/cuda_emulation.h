// Runs CUDA kernel text on the host, so that its arithmetic, its bounds and its barriers are
// tested where there is no GPU. `emulator.py` puts this header before the unmodified text,
// compiles both with g++ and launches the kernels (read its docstring for the Python side).
//
// What a kernel may use
//   __global__ __device__ __host__ __forceinline__ __noinline__ __constant__ __launch_bounds__
//   threadIdx blockIdx blockDim gridDim warpSize, up to three dimensions
//   __shared__                   static arrays, poisoned with NaN (bytes 0xff) before each block
//   DYNAMIC_SHARED(type, name)   dynamic shared memory of the launch's size; on the GPU this is
//                                `extern __shared__ type name[]` (defined in common.cuh)
//   __syncthreads() __syncwarp(mask) __shfl_sync __shfl_xor_sync __shfl_up_sync __shfl_down_sync
//   float2 float4 int2 int4 uint2 uint4 double2 and make_*, __ldg, __fadd_rn and friends,
//   __float_as_uint and friends, min, max, the C mathematics functions
//   half_bits_to_float, float_to_half_bits, fma_saturate: on the GPU PTX in common.cuh
//   CUDA_EMULATION is defined. Not there: atomics, textures, inline PTX.
//
// How it runs
//   Blocks run one after the other in a seeded random order. Each thread of a block is a fiber;
//   the fibers run in a seeded random order, each from one barrier to its next one. A read that a
//   barrier should have protected therefore meets poison or the last tile's data.
//   Threads that wait at different barriers, or a barrier that only some threads reach, end the
//   run with an error. Denormals are flushed, as CuPy compiles with -ftz=true.
//   Buffers of `const` pointers are compared after the launch: a write to one is an error.
#pragma once
#define CUDA_EMULATION 1

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Shared arrays are poisoned before each block. The program is told where they lie (emulator.py
// reads its symbols), so that the sanitizer can guard them as plain statics; in the library, which
// has no sanitizer, one section holds them.
#ifdef CUDA_EMULATION_EXECUTABLE
#define __shared__ static
#else
#define __shared__ static __attribute__((section("cuda_shared")))
#endif
#define DYNAMIC_SHARED(type, name) type *const name = (type *)cuda_emulation::dynamic_shared
#define __syncthreads() cuda_emulation::block_barrier(__LINE__)

// ---- types -------------------------------------------------------------------------------------
#define CUDA_EMULATION_VECTORS(T, name)                                                           \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                              \
  struct name##3 { T x, y, z; };                                                                  \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };              \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                      \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                              \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_EMULATION_VECTORS(float, float)
CUDA_EMULATION_VECTORS(double, double)
CUDA_EMULATION_VECTORS(int, int)
CUDA_EMULATION_VECTORS(unsigned int, uint)
CUDA_EMULATION_VECTORS(unsigned short, ushort)
CUDA_EMULATION_VECTORS(long long, longlong)

static uint3 threadIdx, blockIdx, blockDim, gridDim;
static const int warpSize = 32;

// ---- bits and arithmetic -----------------------------------------------------------------------
template <class To, class From>
inline To cuda_emulation_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}
inline unsigned int __float_as_uint(float x) { return cuda_emulation_bits<unsigned int>(x); }
inline int __float_as_int(float x) { return cuda_emulation_bits<int>(x); }
inline float __uint_as_float(unsigned int x) { return cuda_emulation_bits<float>(x); }
inline float __int_as_float(int x) { return cuda_emulation_bits<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }  // NaN: 0
inline float fma_saturate(float a, float b, float c) { return __saturatef(fmaf(a, b, c)); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T>
inline T __ldg(const T *pointer) { return *pointer; }
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }

inline float half_bits_to_float(unsigned short bits) {
  const unsigned int sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude < 0x0400u)  // zero and subnormal: a multiple of 2^-24
    return __uint_as_float(sign | __float_as_uint(magnitude * 5.9604644775390625e-8f));
  const unsigned int rebias = magnitude < 0x7c00u ? 0x38000000u : 0x70000000u;
  return __uint_as_float(sign | ((magnitude << 13) + rebias));
}
inline unsigned short float_to_half_bits(float value) {
  const unsigned int bits = __float_as_uint(value), sign = (bits >> 16) & 0x8000u;
  const unsigned int magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;          // not a number
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (magnitude < 0x38800000u)  // the float addition rounds to a multiple of 2^-24
    return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
  return sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

// ---- the machine -------------------------------------------------------------------------------
#ifndef CUDA_EMULATION_EXECUTABLE
extern "C" char __start_cuda_shared[] __attribute__((weak));
extern "C" char __stop_cuda_shared[] __attribute__((weak));
#endif

namespace cuda_emulation {

enum Wait { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };
struct Fiber {
  ucontext_t context;
  uint3 thread;
  Wait wait;
  int line;            // of the block barrier that it waits at
  unsigned int mask;   // of the warp barrier that it waits at
};
struct Launch {
  const char *kernel;
  uint3 grid, block;
  unsigned long long shared_bytes, seed;
  void **arguments;
};
using Entry = void (*)(void **arguments);

static const unsigned int MAX_THREADS = 1024;
static const size_t STACK_BYTES = 128 * 1024;
static Fiber fibers[MAX_THREADS];
static unsigned int order[MAX_THREADS];
static char *stacks;
static ucontext_t scheduler;
static Fiber *current;
static Entry entry;
static void **entry_arguments;
static void *dynamic_shared;
static unsigned long long exchange[MAX_THREADS];  // what a shuffle hands over
static char error[512];
static uint64_t random_state;

struct Span {
  uint64_t address, size;
};
static Span *shared_spans;  // the static shared arrays
static uint64_t shared_span_count;

inline uint64_t random_bits() {  // splitmix64
  uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
template <class T>
inline void shuffle(T *items, uint64_t count) {
  for (uint64_t i = count; i > 1; --i) {
    const uint64_t j = random_bits() % i;
    const T item = items[i - 1];
    items[i - 1] = items[j];
    items[j] = item;
  }
}

__attribute__((noinline)) inline void yield(Wait wait) {
  Fiber *self = current;
  self->wait = wait;
  swapcontext(&self->context, &scheduler);
}
inline void block_barrier(int line) {
  current->line = line;
  yield(AT_BLOCK_BARRIER);
}
inline void warp_barrier(unsigned int mask) {
  current->mask = mask;
  yield(AT_WARP_BARRIER);
}
inline unsigned int linear_thread() { return (unsigned int)(current - fibers); }

template <class T>
inline T shuffle_from(unsigned int mask, T value, int lane) {
  static_assert(sizeof(T) <= sizeof(exchange[0]), "a shuffle hands over 8 bytes at most");
  const unsigned int self = linear_thread();
  memcpy(&exchange[self], &value, sizeof(T));
  warp_barrier(mask);
  T result;
  memcpy(&result, &exchange[self / 32 * 32 + lane], sizeof(T));
  warp_barrier(mask);
  return result;
}

inline void run_fiber() {
  entry(entry_arguments);
  yield(DONE);
}

// True while some thread can go on. False: all are done, or `error` says why none can.
inline bool release(unsigned int threads) {
  unsigned int waiting = 0, done = 0, first = 0;
  bool released = false;
  for (unsigned int i = 0; i < threads; ++i) {
    done += fibers[i].wait == DONE;
    if (fibers[i].wait == AT_BLOCK_BARRIER && waiting++ == 0) first = i;
  }
  if (done == threads) return false;
  if (waiting == threads) {
    for (unsigned int i = 0; i < threads; ++i) {
      if (fibers[i].line != fibers[first].line) {
        snprintf(error, sizeof error, "barrier divergence: thread %u waits at line %d, thread %u"
                 " at line %d", first, fibers[first].line, i, fibers[i].line);
        return false;
      }
      fibers[i].wait = READY;
    }
    return true;
  }
  for (unsigned int base = 0; base < threads; base += 32) {
    unsigned int arrived = 0, wanted = 0;
    for (unsigned int lane = 0; lane < 32 && base + lane < threads; ++lane) {
      if (fibers[base + lane].wait != AT_WARP_BARRIER) continue;
      arrived |= 1u << lane;
      wanted |= fibers[base + lane].mask;
    }
    if (threads - base < 32) wanted &= (1u << (threads - base)) - 1;
    if (arrived == 0 || arrived != wanted) continue;
    for (unsigned int lane = 0; lane < 32; ++lane)
      if (arrived >> lane & 1) fibers[base + lane].wait = READY;
    released = true;
  }
  if (!released)
    snprintf(error, sizeof error, "barrier divergence: %u of %u threads wait at a block barrier"
             " (line %d), %u have returned, none can go on", waiting, threads,
             waiting ? fibers[first].line : 0, done);
  return released;
}

inline bool run_block(const Launch &launch, uint64_t block) {
  blockIdx = {(unsigned int)(block % launch.grid.x),
              (unsigned int)(block / launch.grid.x % launch.grid.y),
              (unsigned int)(block / launch.grid.x / launch.grid.y)};
  const unsigned int threads = launch.block.x * launch.block.y * launch.block.z;
  for (uint64_t i = 0; i < shared_span_count; ++i)
    memset((void *)shared_spans[i].address, 0xff, shared_spans[i].size);
#ifndef CUDA_EMULATION_EXECUTABLE
  if (__start_cuda_shared)
    memset(__start_cuda_shared, 0xff, (size_t)(__stop_cuda_shared - __start_cuda_shared));
#endif
  if (dynamic_shared) memset(dynamic_shared, 0xff, launch.shared_bytes);
  for (unsigned int i = 0; i < threads; ++i) {
    Fiber &fiber = fibers[i];
    fiber.thread = {i % launch.block.x, i / launch.block.x % launch.block.y,
                    i / launch.block.x / launch.block.y};
    fiber.wait = READY;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + i * STACK_BYTES;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
    order[i] = i;
  }
  do {
    shuffle(order, threads);
    for (unsigned int i = 0; i < threads; ++i) {
      if (fibers[order[i]].wait != READY) continue;
      current = &fibers[order[i]];
      threadIdx = current->thread;
      swapcontext(&scheduler, &current->context);
    }
  } while (release(threads));
  return error[0] == 0;
}

// Runs the given blocks (linear indices), or all of the grid where `blocks` is null.
inline const char *run(const Launch &launch, Entry kernel, const uint64_t *blocks,
                       uint64_t block_count) {
  error[0] = 0;
  const uint64_t threads = (uint64_t)launch.block.x * launch.block.y * launch.block.z;
  if (threads == 0 || threads > MAX_THREADS || launch.block.z > 64)
    snprintf(error, sizeof error, "invalid launch: a block has %llu threads",
             (unsigned long long)threads);
  if (launch.grid.x == 0 || launch.grid.x > 2147483647u || launch.grid.y == 0 ||
      launch.grid.y > 65535 || launch.grid.z == 0 || launch.grid.z > 65535)
    snprintf(error, sizeof error, "invalid launch: grid (%u, %u, %u)", launch.grid.x,
             launch.grid.y, launch.grid.z);
  if (launch.shared_bytes > 227 * 1024)
    snprintf(error, sizeof error, "invalid launch: %llu bytes of dynamic shared memory",
             launch.shared_bytes);
  if (error[0]) return error;
#ifdef __SSE__
  const unsigned int control = _mm_getcsr();
  _mm_setcsr(control | 0x8040);  // flush denormal results and operands
#endif
  gridDim = launch.grid;
  blockDim = launch.block;
  entry = kernel;
  entry_arguments = launch.arguments;
  random_state = launch.seed;
  if (!stacks)
    stacks = (char *)mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  // malloc aligns to 16 and, unlike aligned_alloc, may end at the byte that was asked for.
  dynamic_shared = launch.shared_bytes ? malloc(launch.shared_bytes) : nullptr;
  const uint64_t total = (uint64_t)launch.grid.x * launch.grid.y * launch.grid.z;
  const uint64_t count = blocks ? block_count : total;
  uint64_t *queue = (uint64_t *)malloc((size_t)count * sizeof(uint64_t));
  for (uint64_t i = 0; i < count; ++i) queue[i] = blocks ? blocks[i] : i;
  shuffle(queue, count);
  for (uint64_t i = 0; i < count; ++i)
    if (queue[i] >= total || !run_block(launch, queue[i])) {
      if (!error[0]) snprintf(error, sizeof error, "no such block in the grid");
      break;
    }
  free(queue);
  free(dynamic_shared);
#ifdef __SSE__
  _mm_setcsr(control);
#endif
  return error[0] ? error : nullptr;
}

// ---- the table of kernels, filled by emulator.py -----------------------------------------------
struct Parameter {
  char kind;  // 'p' pointer, 'c' pointer to const, 'f' floating, 'i' signed, 'u' unsigned
  unsigned int size;
};
struct Kernel {
  const char *name;
  Entry entry;
  unsigned int parameter_count;
  const Parameter *parameters;
};
template <class T>
constexpr Parameter parameter() {
  return {std::is_pointer<T>::value
              ? (std::is_const<std::remove_pointer_t<T>>::value ? 'c' : 'p')
              : std::is_floating_point<T>::value ? 'f'
              : std::is_signed<T>::value         ? 'i'
                                                 : 'u',
          (unsigned int)sizeof(T)};
}
template <auto function, class Signature>
struct Signature_of;
template <auto function, class... T>
struct Signature_of<function, void (*)(T...)> {
  static constexpr Parameter parameters[] = {parameter<T>()...};
  template <size_t... i>
  static void call(void **arguments, std::index_sequence<i...>) {
    function(*(std::remove_cv_t<T> *)arguments[i]...);
  }
  static void entry(void **arguments) { call(arguments, std::index_sequence_for<T...>()); }
  static Kernel kernel(const char *name) { return {name, entry, sizeof...(T), parameters}; }
};
#define CUDA_EMULATION_KERNEL(f) cuda_emulation::Signature_of<&f, decltype(&f)>::kernel(#f)

}  // namespace cuda_emulation

inline void __syncwarp(unsigned int mask = 0xffffffffu) { cuda_emulation::warp_barrier(mask); }
template <class T>
inline T __shfl_sync(unsigned int mask, T value, int lane, int width = 32) {
  const int self = cuda_emulation::linear_thread() % 32;
  return cuda_emulation::shuffle_from(mask, value, self / width * width + lane % width);
}
template <class T>
inline T __shfl_xor_sync(unsigned int mask, T value, int lanes, int width = 32) {
  const int self = cuda_emulation::linear_thread() % 32, lane = self ^ lanes;
  return cuda_emulation::shuffle_from(mask, value, lane / width > self / width ? self : lane);
}
template <class T>
inline T __shfl_down_sync(unsigned int mask, T value, unsigned int lanes, int width = 32) {
  const int self = cuda_emulation::linear_thread() % 32, lane = self + (int)lanes;
  return cuda_emulation::shuffle_from(mask, value, lane / width != self / width ? self : lane);
}
template <class T>
inline T __shfl_up_sync(unsigned int mask, T value, unsigned int lanes, int width = 32) {
  const int self = cuda_emulation::linear_thread() % 32, lane = self - (int)lanes;
  return cuda_emulation::shuffle_from(mask, value, lane < self / width * width ? self : lane);
}
