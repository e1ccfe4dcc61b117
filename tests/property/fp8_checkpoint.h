// For tests of weights in fp8: writes a model as a published FP8 checkpoint and remembers what the file holds.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "model/load.h"

namespace slipstream::model::testing {

// A weight of the file: value = code * scale of its block.
struct Fp8Stored {
  int64_t rows = 0, columns = 0;
  std::vector<uint8_t> codes;
  std::vector<int64_t> scales_shape;
  std::vector<float> scales;  // empty: the file has none
};

struct Fp8Writing {
  int64_t block = 128;
  // Every scale a power of two and the largest code of a block 448, as in a file whose values bf16 holds exactly; else scales are
  // anything, and the largest code often less.
  bool exact = false;
  // The names that become fp8; by default those of a published checkpoint: every projection, also such as are not `linear`.
  std::function<bool(const std::string& name)> in_fp8 = [](const std::string& name) {
    return name.find("_proj") != std::string::npos && name.ends_with(".weight");
  };
  std::function<void(const std::string& name, Fp8Stored& stored)> damage = nullptr;  // before it is written
};

// Writes `weights` (f32) to DIR. By name what is fp8 there.
std::map<std::string, Fp8Stored> save_fp8(const LoadedWeights& weights, const std::string& dir, const Fp8Writing& writing = {});

}  // namespace slipstream::model::testing
