// Small models of every family for cross-folder tests: odd head counts, groups, pools; random weights that make choices
// (experts, selections) vary.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/arena.h"
#include "kernels/stream.h"
#include "model/load.h"
#include "model/model.h"

namespace slipstream::model::testing {

// "glm5_next", "glm5_next clamped", ...: a family, then what is unusual about this one.
std::vector<std::string> test_model_names();
ModelConfig test_config(const std::string& name);

// A model with its memory.
struct TestModel {
  LoadedWeights loaded;
  std::unique_ptr<Model> model;
  kernels::Arena arena;
  bool fp8_latents = false;  // how passes and caches are to keep latent rows

  const ModelWeights& weights() const { return loaded.store.tensors(); }
  const ModelConfig& config() const { return model->config(); }
};
TestModel make_test_model(const std::string& name, kernels::DType dtype, uint64_t seed = 1);

// Deterministic ids in the vocabulary.
std::vector<int32_t> test_tokens(const ModelConfig& config, int64_t count, uint64_t seed);

}  // namespace slipstream::model::testing
