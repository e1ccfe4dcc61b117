#include "learner/tensorboard.h"

#include <unistd.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "common/crc32c.h"

namespace slipstream::learner {
namespace {

static_assert(std::endian::native == std::endian::little,
              "fixed-width fields are copied as they lie in memory");

// Field numbers of tensorflow.Event, .Summary, .Summary.Value and .SessionLog.
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
constexpr uint32_t kSummaryValue = 1, kTag = 1, kSimpleValue = 2, kStatus = 1;
constexpr uint64_t kStatusStart = 1;

template <class T>
void append_raw(std::string* out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out->append(bytes, sizeof(T));
}

void append_varint(std::string* out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
void append_key(std::string* out, uint32_t field, WireType type) { append_varint(out, field << 3 | type); }

void append_bytes(std::string* out, uint32_t field, std::string_view bytes) {
  append_key(out, field, kBytes);
  append_varint(out, bytes.size());
  out->append(bytes);
}

// TFRecord rotates and offsets its CRCs, so that the CRC of data that holds CRCs stays meaningful.
uint32_t masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; }

std::string record(const std::string& data) {
  std::string out;
  append_raw(&out, uint64_t{data.size()});
  append_raw(&out, masked(crc32c(out)));
  out += data;
  append_raw(&out, masked(crc32c(data)));
  return out;
}

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0' ? name : "host";
}

}  // namespace

absl::StatusOr<TensorBoardWriter> TensorBoardWriter::open(const std::string& directory, int64_t first_step) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  // Readers go through the files in order of their names, which begin with the time in seconds: a start
  // within the second of another one counts on.
  const auto seconds = static_cast<int64_t>(wall_time());
  for (int attempt = 0; attempt < 1000; ++attempt) {
    char name[64];
    std::snprintf(name, sizeof(name), "/events.out.tfevents.%010lld.", static_cast<long long>(seconds));
    std::string path = absl::StrCat(directory, name, host_name(), ".", attempt);
    std::FILE* file = std::fopen(path.c_str(), "wbx");
    if (file == nullptr && errno == EEXIST) continue;
    if (file == nullptr) {
      return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be created: ", std::strerror(errno)));
    }
    TensorBoardWriter writer(std::move(path), file);
    writer.event(0, kFileVersion, "brain.Event:2");
    std::string start;
    append_key(&start, kStatus, kVarint);
    append_varint(&start, kStatusStart);
    writer.event(first_step, kSessionLog, start);
    RETURN_IF_ERROR(writer.flush());
    return writer;
  }
  return absl::AlreadyExistsError(
      absl::StrCat(directory, ": a thousand event files of this second, expected fewer"));
}

void TensorBoardWriter::event(int64_t step, uint32_t field, std::string_view content) {
  std::string data;
  append_key(&data, kWallTime, kFixed64);
  append_raw(&data, wall_time());
  append_key(&data, kStep, kVarint);
  append_varint(&data, static_cast<uint64_t>(step));
  append_bytes(&data, field, content);
  const std::string framed = record(data);
  std::fwrite(framed.data(), 1, framed.size(), file_.get());
}

void TensorBoardWriter::scalar(std::string_view name, int64_t step, double value) {
  std::string entry, summary;
  append_bytes(&entry, kTag, name);
  append_key(&entry, kSimpleValue, kFixed32);
  append_raw(&entry, static_cast<float>(value));
  append_bytes(&summary, kSummaryValue, entry);
  event(step, kSummary, summary);
}

absl::Status TensorBoardWriter::flush() {
  if (std::fflush(file_.get()) == 0 && std::ferror(file_.get()) == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(path_, ": cannot be written: ", std::strerror(errno)));
}

}  // namespace slipstream::learner
