#include "cli/presets.h"

#include <filesystem>

#include "cli/embedded_presets.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace slipstream::cli {

std::string preset_names() {
  std::string names;
  for (int i = 0; i < kEmbeddedPresetCount; ++i) absl::StrAppend(&names, i == 0 ? "" : ", ", kEmbeddedPresets[i].name);
  return names;
}

absl::StatusOr<model::ModelConfig> read_config_or_preset(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    for (int i = 0; i < kEmbeddedPresetCount; ++i) {
      if (path != kEmbeddedPresets[i].name) continue;
      return model::parse_model_config(nlohmann::ordered_json::parse(kEmbeddedPresets[i].json), "preset " + path);
    }
    return absl::NotFoundError(absl::StrCat(path, ": no such file, nor one of the presets ", preset_names()));
  }
  return model::read_model_config(path);
}

}  // namespace slipstream::cli
