// What config.json says, resolved: every default, alias and pattern is settled here, and nothing after this point asks
// which family a model belongs to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "kernels/rope/rope.h"
#include "kernels/tensor.h"
#include "nlohmann/json.hpp"

namespace slipstream::model {

enum class AttentionKind { kMla, kGqa, kKda };
enum class IndexerMode { kNone, kFull, kShared };  // kShared: the selection of the closest earlier kFull layer

// Lightning indexer (model-spec 4). head_dim values a key; topk positions selected; pool > 1: keys stand for pools.
struct IndexerConfig {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t topk = 0;
  int64_t pool = 1;
  bool tail = false;
};

// Multi-head latent attention (model-spec 3).
struct MlaConfig {
  int64_t heads = 0;
  int64_t q_lora_rank = 0;   // 0: one q_proj instead of the low-rank pair
  int64_t kv_lora_rank = 0;
  int64_t nope = 0;          // qk_nope_head_dim
  int64_t rope = 0;          // qk_rope_head_dim; 0: no positions at all
  int64_t v = 0;             // v_head_dim
  bool bias = false;         // attention_bias: on q_a_proj, kv_a_proj_with_mqa and o_proj
  float latent_norm_eps = 0.0f;  // of q_a_layernorm and kv_a_layernorm
  kernels::RopeLayout rope_layout = kernels::RopeLayout::kInterleaved;
  std::optional<IndexerConfig> indexer;

  int64_t qk() const { return nope + rope; }
  int64_t key_width() const { return kv_lora_rank + rope; }  // values cached per token
};

// Grouped-query attention with partial half-split RoPE.
struct GqaConfig {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rotary = 0;  // the first dims of a head that are rotated
  bool bias = false;   // on q, k and v
  bool qk_norm = false;
};

// Kimi Delta Attention (model-spec 6).
struct KdaConfig {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t conv_width = 0;
  float lower_bound = 0.0f;  // 0: none
};

struct MoeConfig {
  int64_t experts = 0;
  int64_t per_token = 0;
  int64_t intermediate = 0;  // of one expert
  int64_t shared = 0;        // n_shared_experts: one MLP of this many times `intermediate`
  int64_t groups = 1;
  int64_t groups_kept = 1;
  bool normalize = true;
  float scale = 1.0f;
};

// Residual streams (model-spec 7).
struct HyperConfig {
  int64_t streams = 0;
  float eps = 0.0f;
  int64_t iterations = 0;
  int64_t mixes() const { return (2 + streams) * streams; }
};

struct LayerConfig {
  AttentionKind attention = AttentionKind::kMla;
  IndexerMode indexer = IndexerMode::kNone;
  bool moe = false;
};

// Block-scaled FP8 weights of a published checkpoint (model-spec 10).
struct Fp8Config {
  int64_t block_rows = 128;
  int64_t block_columns = 128;
};

struct ModelConfig {
  std::string model_type;  // the registry's key: glm_moe_dsa, glm5_next, glm4_moe_lite, glm4_moe
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t max_positions = 0;
  float norm_eps = 0.0f;
  float swiglu_limit = 0.0f;  // infinity: no clamp
  double rope_theta = 0.0;
  float init_std = 0.02f;
  std::vector<LayerConfig> layers;
  int64_t mtp_layers = 0;     // num_nextn_predict_layers
  LayerConfig mtp;            // the shape of that layer; no residual streams
  std::optional<MlaConfig> mla;
  std::optional<GqaConfig> gqa;
  std::optional<KdaConfig> kda;
  std::optional<MoeConfig> moe;
  std::optional<HyperConfig> hyper;
  std::optional<Fp8Config> fp8;
  std::vector<int32_t> eos;
  kernels::DType dtype = kernels::DType::kBf16;  // of the checkpoint's matrices
  std::string prefix;         // of backbone tensor names, as saved: "model." or "model.language_model."
  std::string vision_prefix;  // tensors under it are carried along unread; empty: none
  nlohmann::ordered_json source;  // config.json as it was read, for saving

  // Tokens that share one indexer key row; 1 without an indexer.
  int64_t index_pool() const { return mla && mla->indexer ? mla->indexer->pool : 1; }
  int64_t rotary() const { return mla ? mla->rope : gqa ? gqa->rotary : 0; }
};

// Reads and checks config.json (or `path` itself when it is a file). Errors name the file, the key and the expectation:
//   DIR/config.json: index_topk: 30, expected a multiple of index_kpool 4
absl::StatusOr<ModelConfig> read_model_config(const std::string& path);
// The same from parsed JSON; `label` stands for the file in messages.
absl::StatusOr<ModelConfig> parse_model_config(const nlohmann::ordered_json& json, const std::string& label);

}  // namespace slipstream::model
