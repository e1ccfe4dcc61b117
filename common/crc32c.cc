#include "common/crc32c.h"

#include <nmmintrin.h>

#include <cstring>

namespace slipstream {

uint32_t crc32c(std::string_view data, uint32_t crc) {
  uint64_t state = ~crc;
  const char* p = data.data();
  size_t left = data.size();
  for (; left >= 8; left -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    state = _mm_crc32_u64(state, word);
  }
  for (; left > 0; --left, ++p) state = _mm_crc32_u8(static_cast<uint32_t>(state), static_cast<uint8_t>(*p));
  return ~static_cast<uint32_t>(state);
}

}  // namespace slipstream
