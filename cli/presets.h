// Configurations that come with the binary.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/config.h"

namespace slipstream::cli {

// "flash, flash-150m, flash-tiny, ...": tiny ones to create and train in seconds, one to measure with, and the published
// shapes.
std::string preset_names();

// `path` is a model directory, a config file, or, when no such file exists, a preset's name.
absl::StatusOr<model::ModelConfig> read_config_or_preset(const std::string& path);

}  // namespace slipstream::cli
