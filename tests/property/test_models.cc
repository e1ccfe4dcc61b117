#include "tests/property/test_models.h"

#include <cmath>

#include "nlohmann/json.hpp"

namespace slipstream::model::testing {
namespace {

using nlohmann::ordered_json;

// Keys every family has.
ordered_json backbone(const char* model_type, int64_t layers) {
  return {{"model_type", model_type},
          {"vocab_size", 97},
          {"hidden_size", 40},
          {"intermediate_size", 56},
          {"moe_intermediate_size", 24},
          {"num_hidden_layers", layers},
          {"n_routed_experts", 6},
          {"num_experts_per_tok", 2},
          {"n_shared_experts", 1},
          {"first_k_dense_replace", 1},
          {"routed_scaling_factor", 1.5},
          {"max_position_embeddings", 4096},
          {"initializer_range", 0.25},
          {"rms_norm_eps", 1e-5},
          {"dtype", "float32"},
          {"eos_token_id", 1}};
}

void add_mla(ordered_json& json, int64_t heads, int64_t rope) {
  json.update({{"num_attention_heads", heads},
               {"q_lora_rank", 20},
               {"kv_lora_rank", 24},
               {"qk_nope_head_dim", 12},
               {"qk_rope_head_dim", rope},
               {"v_head_dim", 10}});
}

void add_indexer(ordered_json& json, int64_t heads, int64_t head_dim, int64_t topk) {
  json.update({{"index_n_heads", heads}, {"index_head_dim", head_dim}, {"index_topk", topk}});
}

ordered_json dsa(int64_t layers) {
  ordered_json json = backbone("glm_moe_dsa", layers);
  add_mla(json, 3, 6);
  add_indexer(json, 3, 14, 24);
  json["rope_parameters"] = {{"rope_theta", 10000.0}, {"rope_type", "default"}};
  return json;
}

ordered_json flash(int64_t layers, int64_t heads, int64_t head_dim, int64_t streams, int64_t pool, int64_t topk, bool tail) {
  ordered_json json = backbone("glm5_next", layers);
  add_mla(json, heads, 0);
  add_indexer(json, 3, 12, topk);
  json.update({{"index_kpool", pool},
               {"index_kpool_always_select_tail", tail},
               {"hc_mult", streams},
               {"swiglu_limit", 1000.0},
               {"linear_attn_config",
                {{"num_heads", heads}, {"head_dim", head_dim}, {"short_conv_kernel_size", 4}, {"gate_lower_bound", -5.0}}}});
  return json;
}

ordered_json test_json(const std::string& name) {
  if (name == "glm_moe_dsa") return dsa(3);
  if (name == "glm_moe_dsa indexshare groups") {
    ordered_json json = dsa(6);
    json.update({{"index_topk_freq", 3}, {"index_skip_topk_offset", 2}, {"n_routed_experts", 12}, {"n_group", 4},
                 {"topk_group", 2}, {"num_experts_per_tok", 3}, {"attention_bias", true}, {"n_shared_experts", 2}});
    return json;
  }
  if (name == "glm5_next") return flash(5, 3, 16, 4, 4, 24, true);
  if (name == "glm5_next clamped") {
    ordered_json json = flash(4, 3, 16, 2, 4, 24, true);
    json["swiglu_limit"] = 0.75;
    return json;
  }
  if (name == "glm5_next two streams, no tail") return flash(4, 2, 8, 2, 2, 12, false);
  if (name == "glm5_next pool of three") {
    ordered_json json = flash(4, 5, 24, 1, 3, 27, true);
    json["n_shared_experts"] = 0;
    json["linear_attn_config"]["short_conv_kernel_size"] = 1;
    return json;
  }
  if (name == "glm4_moe_lite") {
    ordered_json json = backbone("glm4_moe_lite", 3);
    add_mla(json, 5, 8);
    return json;
  }
  if (name == "glm4_moe_lite direct query") {
    ordered_json json = backbone("glm4_moe_lite", 2);
    add_mla(json, 2, 4);
    json["q_lora_rank"] = nullptr;
    json["rope_interleave"] = false;
    return json;
  }
  if (name == "glm4_moe") {
    ordered_json json = backbone("glm4_moe", 3);
    json.update({{"num_attention_heads", 6}, {"num_key_value_heads", 2}, {"head_dim", 12}, {"use_qk_norm", true},
                 {"attention_bias", true}, {"partial_rotary_factor", 0.5}});
    return json;
  }
  CHECK(name == "glm4_moe plain");
  ordered_json json = backbone("glm4_moe", 2);
  json.update({{"num_attention_heads", 5}, {"num_key_value_heads", 5}, {"head_dim", 8}, {"norm_topk_prob", false}});
  return json;
}

}  // namespace

std::vector<std::string> test_model_names() {
  return {"glm_moe_dsa",
          "glm_moe_dsa indexshare groups",
          "glm5_next",
          "glm5_next clamped",
          "glm5_next two streams, no tail",
          "glm5_next pool of three",
          "glm4_moe_lite",
          "glm4_moe_lite direct query",
          "glm4_moe",
          "glm4_moe plain"};
}

ModelConfig test_config(const std::string& name) {
  absl::StatusOr<ModelConfig> config = parse_model_config(test_json(name), name);
  CHECK_OK(config.status());
  return *std::move(config);
}

TestModel make_test_model(const std::string& name, kernels::DType dtype, uint64_t seed) {
  const std::unique_ptr<kernels::Stream> stream = *kernels::Stream::create_cpu(1);
  absl::StatusOr<LoadedWeights> loaded = random_weights(test_config(name), dtype, seed, *stream);
  CHECK_OK(loaded.status());
  // What random_weights leaves at 0 or 1 is moved, so that a gradient or a bias that is lost would show.
  for (const WeightStore::Entry& entry : loaded->store.entries()) {
    if (entry.tensor.dtype() != kernels::DType::kF32 || entry.parameter.init == Init::kNormal) continue;
    for (int64_t i = 0; i < entry.tensor.numel(); ++i) {
      entry.tensor.f32()[i] += 0.2f * std::sin(static_cast<float>(i * 7 + entry.parameter.layer * 3 + 1));
    }
  }
  absl::StatusOr<std::unique_ptr<Model>> model = Model::create(loaded->config);
  CHECK_OK(model.status());
  return {*std::move(loaded), *std::move(model), *kernels::Arena::create_cpu(int64_t{1} << 34)};
}

std::vector<int32_t> test_tokens(const ModelConfig& config, int64_t count, uint64_t seed) {
  std::vector<int32_t> tokens;
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    tokens.push_back(static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(config.vocab)));
  }
  return tokens;
}

}  // namespace slipstream::model::testing
