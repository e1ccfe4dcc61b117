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
// Eight codes times their scale, as bf16.
__device__ __forceinline__ uint4 scaled_to_bf16(uint2 codes, float scale) {
  const auto pair = [&](uint16_t two) {
    const float2 values = e4m3_values(two);
    return pack_bf16(values.x * scale, values.y * scale);
  };
  uint16_t twos[4];
  asm("mov.b32 {%0, %1}, %2;" : "=h"(twos[0]), "=h"(twos[1]) : "r"(codes.x));
  asm("mov.b32 {%0, %1}, %2;" : "=h"(twos[2]), "=h"(twos[3]) : "r"(codes.y));
  return {pair(twos[0]), pair(twos[1]), pair(twos[2]), pair(twos[3])};
}

}  // namespace slipstream::kernels
