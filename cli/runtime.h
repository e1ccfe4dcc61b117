// What logprobs and generate share: a loaded model with the memory and threads to run it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "kernels/arena.h"
#include "kernels/stream.h"
#include "model/load.h"
#include "model/model.h"

namespace slipstream::cli {

struct RuntimeFlags {
  std::string model;
  std::string dtype = "fp32";
  bool fp8_weights = false;    // linear layers in e4m3, as rollout.fp8_weights
  bool fp8_latents = false;    // latent rows in e4m3, as rollout.fp8_latents
  std::string device = "cpu";  // kernels::parse_device
  int threads = 2;
};

struct Runtime {
  std::unique_ptr<kernels::Stream> stream;
  model::LoadedWeights loaded;
  std::unique_ptr<model::Model> model;
  kernels::Arena arena;

  static absl::StatusOr<Runtime> open(const RuntimeFlags& flags);
  // One pass over `prepared`.
  model::Step step(const model::PreparedBatch& prepared, model::WeightPanels* panels = nullptr) {
    return {*stream, arena, prepared, panels, model::activation_dtype(*stream, loaded.store.dtype()),
            &loaded.store.scales()};
  }
};

// InvalidArgument naming `flag`: ids outside the vocabulary, or more than the model has positions.
absl::Status check_ids(const std::string& flag, const std::vector<int32_t>& ids, const model::ModelConfig& config);

}  // namespace slipstream::cli
