// What every kernel shares: the storage type of its tensors, 64-bit sizes, vector access.
// The runtime puts this text before a kernel's text and compiles both as one.
//
// SCALAR_TYPE  storage of the tensors: 0 float32, 1 float16, 2 bfloat16. Arithmetic is float32.

#ifndef SCALAR_TYPE
#define SCALAR_TYPE 0
#endif

// The host emulation of the tests brings its own form of these: dynamic arrays and PTX exist on
// the GPU only. float16 needs no header that way, so NVRTC need not find one.
#ifndef CUDA_EMULATION
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]

__device__ __forceinline__ float half_bits_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short float_to_half_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// a * b + c, limited to [0, 1], in one instruction; written with __saturatef it takes two.
__device__ __forceinline__ float fma_saturate(float a, float b, float c) {
  float value;
  asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(value) : "f"(a), "f"(b), "f"(c));
  return value;
}
#endif

#if SCALAR_TYPE == 0

typedef float Scalar;

__device__ __forceinline__ float to_float(Scalar value) { return value; }
__device__ __forceinline__ Scalar to_scalar(float value) { return value; }

#elif SCALAR_TYPE == 1

struct Scalar {
  unsigned short bits;
};

__device__ __forceinline__ float to_float(Scalar value) { return half_bits_to_float(value.bits); }
__device__ __forceinline__ Scalar to_scalar(float value) {
  return Scalar{float_to_half_bits(value)};
}

#elif SCALAR_TYPE == 2

struct Scalar {
  unsigned short bits;
};

// bfloat16 is the upper half of a float32; sm_75 has no instruction for it.
__device__ __forceinline__ float to_float(Scalar value) {
  return __uint_as_float((unsigned int)value.bits << 16);
}
__device__ __forceinline__ Scalar to_scalar(float value) {
  const unsigned int bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Scalar{0x7fff};  // not a number
  return Scalar{(unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};  // to even
}

#else
#error "SCALAR_TYPE must be 0 (float32), 1 (float16) or 2 (bfloat16)"
#endif

// Four neighbours in memory: 128 bits of float32, 64 bits of a half type.
struct __align__(4 * sizeof(Scalar)) ScalarQuad {
  Scalar x, y, z, w;
};

__device__ __forceinline__ bool aligned_to_quad(const void *pointer) {
  return (unsigned long long)pointer % sizeof(ScalarQuad) == 0;
}

__device__ __forceinline__ long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

// What is left for a tile, in 32 bits.
__device__ __forceinline__ int at_most(long long left, int tile) {
  return left < tile ? (int)left : tile;
}
