// configs/models/*.json, compiled in, so that the binary needs no files beside it.
#pragma once

namespace slipstream::cli {

struct EmbeddedPreset {
  const char* name;
  const char* json;
};
extern const EmbeddedPreset kEmbeddedPresets[];
extern const int kEmbeddedPresetCount;

}  // namespace slipstream::cli
