// bfloat16: the upper half of an fp32. Conversion from fp32 rounds to nearest, ties to even; NaN stays NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace slipstream::kernels {

struct bf16 {
  uint16_t bits = 0;
  friend bool operator==(const bf16&, const bf16&) = default;
};

inline float to_f32(bf16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }
inline float to_f32(float value) { return value; }

inline bf16 to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace slipstream::kernels
