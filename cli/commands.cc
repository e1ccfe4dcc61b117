#include "cli/commands.h"

#include <cmath>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "model/model_section.h"

namespace slipstream::cli {
namespace {

// `fits(text)` or "... , expected `what`".
template <class Fits>
CLI::Validator validator(const std::string& what, Fits&& fits) {
  return CLI::Validator(
      [what, fits](std::string& text) {
        return fits(text) ? std::string() : absl::StrCat("\"", text, "\", expected ", what);
      },
      what);
}

}  // namespace

CLI::Validator integer_in(int64_t low, int64_t high) {
  const bool open = high == std::numeric_limits<int64_t>::max();
  return validator(open ? absl::StrCat("an integer >= ", low) : absl::StrCat("an integer in ", low, "..", high),
                   [low, high](const std::string& text) {
                     int64_t value = 0;
                     return absl::SimpleAtoi(text, &value) && low <= value && value <= high;
                   });
}

CLI::Validator seed_number() {
  return validator("an integer in 0..2^64-1", [](const std::string& text) {
    uint64_t value = 0;
    return absl::SimpleAtoi(text, &value);
  });
}

CLI::Validator finite_number() {
  return validator("a number", [](const std::string& text) {
    double value = 0.0;
    return absl::SimpleAtod(text, &value) && std::isfinite(value);
  });
}

CLI::Validator thread_count() { return integer_in(1, 256); }

absl::Status check_replaces_nothing(const std::string& directory, bool force) {
  std::error_code error;
  if (force || !std::filesystem::exists(directory + "/config.json", error)) return absl::OkStatus();
  return absl::AlreadyExistsError(directory + ": holds a model already; --force replaces it");
}

absl::StatusOr<std::vector<int32_t>> parse_ids(const std::string& flag, const std::string& text) {
  std::vector<int32_t> ids;
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(item, &id)) {
      const std::string shown = text.size() > 60 ? text.substr(0, 57) + "..." : text;
      return absl::InvalidArgumentError(absl::StrCat(flag, ": \"", shown, "\", expected token ids such as 5,9,17"));
    }
    ids.push_back(id);
  }
  return ids;
}

absl::StatusOr<kernels::DType> parse_dtype(const std::string& text) {
  const absl::StatusOr<kernels::DType> dtype = model::parse_weight_dtype(text);
  if (!dtype.ok()) return absl::InvalidArgumentError(absl::StrCat("--dtype: ", dtype.status().message()));
  return dtype;
}

}  // namespace slipstream::cli
