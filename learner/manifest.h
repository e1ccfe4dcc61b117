// manifest.json: what a directory's files must be, so that damage is found before anything is computed from
// it.
#pragma once

#include <string>

#include "common/status.h"

namespace slipstream::learner {

inline constexpr char kManifestFile[] = "manifest.json";

// Reads every file in `dir` and below and writes, durably, DIR/manifest.json with the size and CRC-32C of
// each.
absl::Status write_manifest(const std::string& dir);

// Reads every file that the manifest lists. DataLoss: one is not what was written, or the manifest itself is
// damaged; "DIR/model.safetensors: CRC-32C 00c0ffee, expected 1badcafe". NotFound: a file, or the manifest,
// is missing. Files that are not listed do not matter.
absl::Status verify_manifest(const std::string& dir);

}  // namespace slipstream::learner
