// Configurations that come with the binary.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/config.h"

namespace slipstream::cli {

// "glm5-tiny, glm52-tiny, flash-tiny, glm5, glm52, flash": tiny ones to create and train in seconds, and the published
// shapes.
std::string preset_names();

// `path` is a model directory, a config file, or, when no such file exists, a preset's name.
absl::StatusOr<model::ModelConfig> read_config_or_preset(const std::string& path);

}  // namespace slipstream::cli
