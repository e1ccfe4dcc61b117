// e4m3: the finite-only 8-bit float of Micikevicius et al. 2022, arXiv:2209.05433 (float8_e4m3fn): bias 7,
// largest value 448, no infinity, 0x7f and 0xff are NaN.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "kernels/tensor.h"

namespace slipstream::kernels {

struct e4m3 {
  uint8_t bits = 0;
  friend bool operator==(const e4m3&, const e4m3&) = default;
};
template <>
struct DTypeOf<e4m3> {
  static constexpr DType value = DType::kF8E4M3;
};

constexpr float kE4m3Largest = 448.0f;

constexpr std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> values{};
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t sign = (code & 0x80u) << 24, exponent = (code >> 3) & 0xfu, mantissa = code & 7u;
    const uint32_t magnitude = exponent == 15 && mantissa == 7 ? 0x7fc00000u
                               : exponent > 0
                                   ? ((exponent + 127 - 7) << 23) | (mantissa << 20)
                                   : std::bit_cast<uint32_t>(static_cast<float>(mantissa) / 512.0f);
    values[code] = std::bit_cast<float>(sign | magnitude);
  }
  return values;
}();
inline float to_f32(e4m3 value) { return kE4m3Values[value.bits]; }  // exact

// To nearest, ties to even; beyond 448 it is 448. NaN stays NaN.
inline e4m3 to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 24 & 0x80u,
                 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7f};
  if (magnitude >= std::bit_cast<uint32_t>(kE4m3Largest)) return {static_cast<uint8_t>(sign | 0x7eu)};
  if (magnitude >= std::bit_cast<uint32_t>(0x1p-6f)) {
    const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    return {static_cast<uint8_t>(sign | ((rounded >> 20) - ((127 - 7) << 3)))};
  }
  // Multiples of 2^-9: where an f32's last bit is 2^-9, adding rounds to them. Eight of them are the code of
  // 2^-6.
  const float rounded = std::bit_cast<float>(magnitude) + 0x1p14f;
  return {static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(rounded) & 0xfu))};
}

}  // namespace slipstream::kernels
