#include "learner/manifest.h"

#include <filesystem>
#include <map>

#include "absl/strings/str_format.h"
#include "common/crc32c.h"
#include "model/json_reader.h"
#include "model/mapped_file.h"
#include "model/output_file.h"
#include "nlohmann/json.hpp"

namespace slipstream::learner {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr int kFormat = 1;

std::string hex(uint32_t crc) { return absl::StrFormat("%08x", crc); }

absl::Status verify_file(const std::string& path, int64_t bytes, const std::string& crc) {
  ASSIGN_OR_RETURN(const model::MappedFile file, model::MappedFile::open(path));
  const std::string_view text = file.text();
  if (static_cast<int64_t>(text.size()) != bytes) {
    return absl::DataLossError(absl::StrCat(path, ": ", text.size(), " bytes, expected ", bytes));
  }
  if (const std::string found = hex(crc32c(text)); found != crc) {
    return absl::DataLossError(absl::StrCat(path, ": CRC-32C ", found, ", expected ", crc));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status write_manifest(const std::string& dir) {
  std::map<std::string, ordered_json> files;
  std::error_code error;
  for (fs::recursive_directory_iterator at(dir, error), end; !error && at != end; at.increment(error)) {
    if (!at->is_regular_file(error)) continue;
    ASSIGN_OR_RETURN(const model::MappedFile file, model::MappedFile::open(at->path()));
    const std::string_view text = file.text();
    files[fs::relative(at->path(), dir, error)] = {{"bytes", text.size()}, {"crc32c", hex(crc32c(text))}};
  }
  if (error) return absl::ErrnoToStatus(error.value(), dir);
  files.erase(kManifestFile);
  const std::string text = ordered_json{{"format", kFormat}, {"files", files}}.dump(1) + "\n";
  return model::write_file(absl::StrCat(dir, "/", kManifestFile), text);
}

absl::Status verify_manifest(const std::string& dir) {
  const std::string path = absl::StrCat(dir, "/", kManifestFile);
  ASSIGN_OR_RETURN(const model::MappedFile file, model::MappedFile::open(path));
  const ordered_json json = ordered_json::parse(file.text(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return absl::DataLossError(
        absl::StrCat(path, ": ", file.text().size(), " bytes, expected a whole JSON object"));
  }
  model::JsonReader reader(json, path);
  reader.require_int("format", kFormat, kFormat);
  if (reader.find("files") == nullptr || !reader.find("files")->is_object() ||
      reader.find("files")->empty()) {
    reader.fail("files", "an object of files");
  }
  RETURN_IF_ERROR(reader.status());
  for (const auto& [name, entry] : reader.find("files")->items()) {
    model::JsonReader fields(entry, absl::StrCat(path, ": ", name));
    const int64_t bytes = fields.require_int("bytes", 0, int64_t{1} << 50);
    const std::string crc = fields.require_string("crc32c");
    RETURN_IF_ERROR(fields.status());
    RETURN_IF_ERROR(verify_file(absl::StrCat(dir, "/", name), bytes, crc));
  }
  return absl::OkStatus();
}

}  // namespace slipstream::learner
