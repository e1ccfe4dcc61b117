#include "cli/commands.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

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
  if (text == "fp32") return kernels::DType::kF32;
  if (text == "bf16") return kernels::DType::kBf16;
  return absl::InvalidArgumentError(absl::StrCat("--dtype: \"", text, "\", expected fp32 or bf16"));
}

}  // namespace slipstream::cli
