#include "common/records.h"

#include "absl/strings/str_cat.h"
#include "common/crc32c.h"

namespace slipstream {
namespace {

void put_u32(std::string* out, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) out->push_back(static_cast<char>(value >> shift));
}
uint32_t get_u32(const char* p) {
  uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(p[i]);
  return value;
}
FramedRecord problem(std::string what) { return {.type = 0, .payload = {}, .problem = std::move(what)}; }

}  // namespace

void append_record(uint8_t type, std::string_view payload, std::string* out) {
  std::string length;
  put_u32(&length, static_cast<uint32_t>(payload.size() + 1));
  const char first = static_cast<char>(type);
  out->append(length);
  put_u32(out, crc32c(payload, crc32c({&first, 1}, crc32c(length))));
  out->push_back(first);
  out->append(payload);
}

int64_t record_length(std::string_view header) { return get_u32(header.data()); }

FramedRecord parse_record(std::string_view data, int64_t offset, uint8_t last_type) {
  const int64_t left = static_cast<int64_t>(data.size()) - offset;
  if (left < kRecordHeaderBytes) return problem("the record's header is cut short");
  const char* const header = data.data() + offset;
  const int64_t length = get_u32(header);
  if (length < 1 || length > kRecordBytesMax) return problem(absl::StrCat("length ", length));
  if (length > left - kRecordHeaderBytes) {
    return problem(absl::StrCat("length ", length, ", but the file has ", left - kRecordHeaderBytes, " bytes more"));
  }
  const std::string_view body(header + kRecordHeaderBytes, static_cast<size_t>(length));
  const auto type = static_cast<uint8_t>(body[0]);
  if (type < 1 || type > last_type) return problem(absl::StrCat("record type ", type));  // before the CRC, which takes time
  if (crc32c(body, crc32c({header, 4})) != get_u32(header + 4)) return problem("checksum differs");
  return {.type = type, .payload = body.substr(1), .problem = {}};
}

}  // namespace slipstream
