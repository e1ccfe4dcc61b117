#include "cli/commands.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "model/model_section.h"

namespace slipstream::cli {

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
