// e4m3 on the device, as e4m3.h has it on the host.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/mma.cuh"
#include "kernels/e4m3.h"

namespace slipstream::kernels {

// The codes of four values times `factor`, the first in the lowest byte.
__device__ __forceinline__ uint32_t e4m3_codes(float4 v, float factor) {
  const auto pair = [&](float x, float y) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2(make_float2(x * factor, y * factor), __NV_SATFINITE, __NV_E4M3);
  };
  return pair(v.x, v.y) | pair(v.z, v.w) << 16;
}
__device__ __forceinline__ float largest_magnitude(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// The values of two codes, the first in the lower byte: exact.
__device__ __forceinline__ float2 e4m3_values(uint16_t codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}
// Eight codes times their scale, as bf16. The scale is a bf16's value and no code is NaN: then a product has twelve bits, and
// one bf16 multiplication rounds as f32's does that is rounded afterwards, without conversions, which are slow.
__device__ __forceinline__ uint4 scaled_to_bf16(uint2 codes, float scale) {
  const uint32_t bits = __float_as_uint(scale), scales = __byte_perm(bits, 0, 0x3232);
  const auto multiply = [](uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  };
  // `bytes`: each code as a 16-bit integer with its sign. Exponent and mantissa, four bits higher, are those of a bf16 that is
  // 2^-120 times the code's value, and less than the least normal one where that of the code is.
  const auto pair = [&](uint32_t word, uint32_t bytes) {
    uint32_t extended;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(extended) : "r"(word), "r"(bytes));
    constexpr uint32_t kTwoTo120 = 0x7b807b80;
    return multiply(multiply(extended << 4 & 0x87f087f0u, kTwoTo120), scales);
  };
  constexpr uint32_t kFirst = 0x9180, kLast = 0xb3a2;
  return {pair(codes.x, kFirst), pair(codes.x, kLast), pair(codes.y, kFirst), pair(codes.y, kLast)};
}

}  // namespace slipstream::kernels
