#include "common/records.h"

#include "absl/strings/str_cat.h"
#include "common/crc32c.h"

namespace slipstream {
namespace {

constexpr char kChecksum[] = "checksum differs";

void put_u32(std::string* out, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) out->push_back(static_cast<char>(value >> shift));
}
uint32_t get_u32(const char* p) {
  uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(p[i]);
  return value;
}

}  // namespace

void append_record(std::initializer_list<std::string_view> body, std::string* out) {
  size_t bytes = 0;
  for (const std::string_view part : body) bytes += part.size();
  std::string length;
  put_u32(&length, static_cast<uint32_t>(bytes));
  uint32_t crc = crc32c(length);
  for (const std::string_view part : body) crc = crc32c(part, crc);
  out->append(length);
  put_u32(out, crc);
  for (const std::string_view part : body) out->append(part);
}

int64_t record_length(std::string_view header) { return get_u32(header.data()); }

FramedRecord parse_record(std::string_view data, int64_t offset) {
  const int64_t left = static_cast<int64_t>(data.size()) - offset;
  if (left < kRecordHeaderBytes) return {{}, "the record's header is cut short"};
  const int64_t length = get_u32(data.data() + offset);
  if (length < 1 || length > kRecordBytesMax) return {{}, absl::StrCat("length ", length)};
  if (length > left - kRecordHeaderBytes) {
    return {{}, absl::StrCat("length ", length, ", but the file has ", left - kRecordHeaderBytes, " bytes more")};
  }
  const std::string_view body = data.substr(static_cast<size_t>(offset + kRecordHeaderBytes), static_cast<size_t>(length));
  const uint32_t crc = crc32c(body, crc32c(data.substr(static_cast<size_t>(offset), 4)));
  if (crc != get_u32(data.data() + offset + 4)) return {{}, kChecksum};
  return {body, {}};
}

std::optional<bool> has_record_after(std::string_view data, int64_t offset) {
  int64_t budget = int64_t{8} << 30;
  for (; offset + kRecordHeaderBytes < static_cast<int64_t>(data.size()); ++offset) {
    const FramedRecord framed = parse_record(data, offset);
    if (framed.problem.empty()) return true;
    if (framed.problem == kChecksum) budget -= get_u32(data.data() + offset);
    if (budget < 0) return std::nullopt;
  }
  return false;
}

}  // namespace slipstream
