// From a checkpoint directory to a model's weights, and back.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "common/status.h"
#include "kernels/stream.h"
#include "model/config.h"
#include "model/weights.h"

namespace slipstream::model {

struct LoadedWeights {
  ModelConfig config;
  WeightStore store;
};

struct LoadOptions {
  // Where the weights will be multiplied, if linear layers may be e4m3 there. Those that may_be_fp8(), and of which every
  // tensor in the file is F8_E4M3 with scales of 128 x 128 blocks, keep their codes and scales. Absent: none do.
  std::optional<kernels::DeviceKind> keep_fp8_for;
};

// Reads DIR/config.json and its tensors into `dtype` (f32 or bf16; FP8 weights are dequantised, but for LoadOptions). The MTP
// block is loaded when the checkpoint has it. Strict: a missing, misshapen or unused tensor is an error that names file,
// tensor and expectation. Not errors: the vision tower, rotary_emb.inv_freq, and the copies of embedding and head that some
// published MTP blocks carry.
absl::StatusOr<LoadedWeights> load_weights(const std::string& dir, kernels::DType dtype, kernels::Stream& stream,
                                           const LoadOptions& options = {});

struct SaveOptions {
  int64_t shard_bytes_max = 5'000'000'000;
  // A checkpoint whose other content (vision tower, generation_config.json, tokenizer files) goes along; empty: none.
  std::string carry_from;
};

// Writes DIR in the published names: matrices and islands in the config's dtype, the router bias in fp32; no weight is e4m3.
// config.json is the source config without its quantization_config. A crash leaves the old model, the new one or one that does
// not load.
absl::Status save_weights(const LoadedWeights& weights, const std::string& dir, const SaveOptions& options);

// Fresh weights: matrices normal(0, initializer_range), norms 1, biases 0, KDA decays as published initialisation has them.
absl::StatusOr<LoadedWeights> random_weights(const ModelConfig& config, kernels::DType dtype, uint64_t seed,
                                             kernels::Stream& stream);

}  // namespace slipstream::model
