// Records in an append-only file: [u32 length][u32 crc32c][body], little-endian. The CRC covers length and body.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace slipstream {

constexpr int64_t kRecordHeaderBytes = 8;
constexpr int64_t kRecordBytesMax = int64_t{1} << 30;  // of a body: protobuf's own limit is 2 GiB

// A body in parts: 1 to kRecordBytesMax bytes together.
void append_record(std::initializer_list<std::string_view> body, std::string* out);
// Of a header.
int64_t record_length(std::string_view header);

// The body of the record at `offset`, or what is wrong with it.
struct FramedRecord {
  std::string_view body;
  std::string problem;
};
FramedRecord parse_record(std::string_view data, int64_t offset);

// Whether an intact record starts anywhere from `offset` on: what lies before it is then damaged, not merely cut short. Gives up
// (nullopt) after reading 8 GiB for checksums: bytes that look like headers of long records are rare but cost a pass each.
std::optional<bool> has_record_after(std::string_view data, int64_t offset);

}  // namespace slipstream
