// Records in an append-only file: [u32 length][u32 crc32c][u8 type, payload], little-endian. length counts type and payload, the
// CRC covers length, type and payload.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace slipstream {

constexpr int64_t kRecordHeaderBytes = 8;
constexpr int64_t kRecordBytesMax = int64_t{1} << 30;  // of type and payload: protobuf's own limit is 2 GiB

void append_record(uint8_t type, std::string_view payload, std::string* out);
// Of the record that a header begins.
int64_t record_length(std::string_view header);

// The record at `offset`, or what is wrong with it.
struct FramedRecord {
  uint8_t type = 0;
  std::string_view payload;
  std::string problem;

  int64_t bytes() const { return kRecordHeaderBytes + 1 + static_cast<int64_t>(payload.size()); }
};
// Types are 1 to last_type.
FramedRecord parse_record(std::string_view data, int64_t offset, uint8_t last_type);

}  // namespace slipstream
