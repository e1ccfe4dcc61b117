// CRC-32C (Castagnoli): guards records on disk and weights on the wire.
#pragma once

#include <cstdint>
#include <string_view>

namespace slipstream {

// The CRC of `data` appended to data whose CRC is `crc` (0: nothing before it).
uint32_t crc32c(std::string_view data, uint32_t crc = 0);

}  // namespace slipstream
