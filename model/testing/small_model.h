// What tests of weights share: the shape of a model with every kind of tensor that an expert layer has, in little.
#pragma once

#include "common/check.h"
#include "model/config.h"
#include "nlohmann/json.hpp"

namespace slipstream::model::testing {

// Two layers, the second with experts; with mtp a third for drafts.
inline ModelConfig small_model(int64_t vocab, int64_t hidden, bool mtp = false) {
  const nlohmann::ordered_json json = {{"model_type", "glm4_moe_lite"},
                                       {"vocab_size", vocab},
                                       {"hidden_size", hidden},
                                       {"intermediate_size", 64},
                                       {"moe_intermediate_size", 24},
                                       {"num_hidden_layers", 2},
                                       {"n_routed_experts", 6},
                                       {"num_experts_per_tok", 2},
                                       {"n_shared_experts", 1},
                                       {"first_k_dense_replace", 1},
                                       {"routed_scaling_factor", 1.5},
                                       {"max_position_embeddings", 64},
                                       {"num_nextn_predict_layers", mtp ? 1 : 0},
                                       {"rms_norm_eps", 1e-5},
                                       {"dtype", "float32"},
                                       {"eos_token_id", 1},
                                       {"num_attention_heads", 2},
                                       {"q_lora_rank", 20},
                                       {"kv_lora_rank", 24},
                                       {"qk_nope_head_dim", 12},
                                       {"qk_rope_head_dim", 4},
                                       {"v_head_dim", 10}};
  absl::StatusOr<ModelConfig> config = parse_model_config(json, "small_model");
  CHECK_OK(config.status());
  return *std::move(config);
}

}  // namespace slipstream::model::testing
