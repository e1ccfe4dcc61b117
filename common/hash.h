// Hashes whose values are the same in every process and build; absl::Hash changes from one to the next.
#pragma once

#include <cstdint>
#include <string_view>

namespace slipstream {

// FNV-1a, 64 bit, of `data` after what `state` has seen.
constexpr uint64_t fnv1a(std::string_view data, uint64_t state = 0xcbf29ce484222325u) {
  for (const char c : data) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return state;
}

// The finaliser of SplitMix64: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195. A bijection that spreads every bit.
constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// SplitMix64 at a counter.
constexpr uint64_t splitmix64(uint64_t counter) { return mix64(counter + 0x9e3779b97f4a7c15u); }

}  // namespace slipstream
