#include "model/architectures/common.h"

#include <algorithm>
#include <limits>

namespace slipstream::model {
namespace {

// Far beyond any published shape, and small enough that no count of parameters or bytes overflows an int64.
constexpr int64_t kLayersMax = 1024;
constexpr int64_t kHiddenMax = 1 << 17;
constexpr int64_t kWidthMax = 1 << 20;     // of an MLP
constexpr int64_t kRankMax = 1 << 16;
constexpr int64_t kHeadsMax = 1 << 12;
constexpr int64_t kHeadDimMax = 1 << 12;
constexpr int64_t kExpertsMax = 1 << 18;   // over all layers
constexpr int64_t kPositionsMax = 1 << 30; // batches hold positions as int32
constexpr double kThetaMax = 1e30;         // its powers are computed in fp32

// A per-layer list of words must name every layer; entries are matched by `accept`.
template <class Accept>
void read_layer_words(JsonReader& reader, const char* key, ModelConfig& config, const char* expectation, Accept accept) {
  const std::vector<std::string> words = reader.get_strings(key);
  bool ok = words.size() == config.layers.size();
  for (size_t l = 0; ok && l < words.size(); ++l) ok = accept(config.layers[l], words[l]);
  if (!ok) reader.fail(key, absl::StrCat(config.layers.size(), " entries, each ", expectation));
}

}  // namespace

void read_backbone(JsonReader& reader, ModelConfig& config) {
  config.vocab = reader.require_int("vocab_size", 1, int64_t{1} << 24);
  config.hidden = reader.require_int("hidden_size", 1, kHiddenMax);
  config.intermediate = reader.require_int("intermediate_size", 1, kWidthMax);
  config.layers.resize(static_cast<size_t>(reader.require_int("num_hidden_layers", 1, kLayersMax)));
  config.max_positions = reader.get_int("max_position_embeddings", kPositionsMax, 1, kPositionsMax);
  config.norm_eps = static_cast<float>(reader.get_number("rms_norm_eps", 1e-5, 1e-30, 1.0));
  config.mtp_layers = reader.get_int("num_nextn_predict_layers", 0, 0, 1);
  config.init_std = static_cast<float>(reader.get_number("initializer_range", 0.02, 0.0, 10.0));
  config.swiglu_limit = std::numeric_limits<float>::infinity();
  if (reader.get_bool("tie_word_embeddings", false)) reader.fail("tie_word_embeddings", "false");
  if (reader.get_string("hidden_act", "silu") != "silu") reader.fail("hidden_act", "\"silu\"");
}

void read_rope_theta(JsonReader& reader, ModelConfig& config) {
  JsonReader rope = reader.object("rope_parameters");
  const std::string type = rope.get_string("rope_type", "default");
  if (type != "default") rope.fail("rope_type", "\"default\"");
  if (reader.has("rope_scaling")) reader.fail("rope_scaling", "null: only the default rope type is implemented");
  config.rope_theta = rope.has("rope_theta") ? rope.require_number("rope_theta", 1e-3, kThetaMax)
                                             : reader.get_number("rope_theta", 10000.0, 1e-3, kThetaMax);
  reader.adopt(rope.status());
}

void read_moe(JsonReader& reader, ModelConfig& config) {
  MoeConfig moe;
  const char* experts_key = reader.has("n_routed_experts") ? "n_routed_experts" : "num_local_experts";
  moe.experts = reader.require_int(experts_key, 1, 1 << 16);
  moe.per_token = reader.require_int("num_experts_per_tok", 1, 64);
  moe.intermediate = reader.require_int("moe_intermediate_size", 1, kWidthMax);
  moe.shared = reader.get_int("n_shared_experts", 0, 0, 64);
  moe.groups = reader.get_int("n_group", 1, 1, 1 << 10);
  moe.groups_kept = reader.get_int("topk_group", 1, 1, 1 << 10);
  moe.normalize = reader.get_bool("norm_topk_prob", true);
  moe.scale = static_cast<float>(reader.get_number("routed_scaling_factor", 1.0, 0.0, 1e6));
  if (reader.get_string("scoring_func", "sigmoid") != "sigmoid") reader.fail("scoring_func", "\"sigmoid\"");
  if (reader.get_string("topk_method", "noaux_tc") != "noaux_tc") reader.fail("topk_method", "\"noaux_tc\"");
  if (moe.experts * static_cast<int64_t>(config.layers.size()) > kExpertsMax) {
    reader.fail(experts_key, absl::StrCat("at most ", kExpertsMax, " experts over all layers"));
  }
  if (moe.experts % moe.groups != 0) reader.fail("n_group", absl::StrCat("a divisor of ", moe.experts, " experts"));
  if (moe.groups_kept > moe.groups) reader.fail("topk_group", absl::StrCat("at most n_group ", moe.groups));
  if (moe.groups > 1 && moe.experts / moe.groups < 2) reader.fail("n_group", "groups of two experts or more");
  if (moe.per_token > moe.experts / moe.groups * moe.groups_kept) {
    reader.fail("num_experts_per_tok", "at most the number of experts eligible for a token");
  }
  config.moe = moe;
}

void read_mlp_types(JsonReader& reader, ModelConfig& config, int64_t dense) {
  if (reader.has("mlp_layer_types")) {
    read_layer_words(reader, "mlp_layer_types", config, "\"dense\" or \"sparse\"",
                     [](LayerConfig& layer, const std::string& word) {
                       layer.moe = word == "sparse";
                       return word == "sparse" || word == "dense";
                     });
  } else {
    for (size_t l = 0; l < config.layers.size(); ++l) config.layers[l].moe = static_cast<int64_t>(l) >= dense;
  }
  config.mtp.moe = config.layers.back().moe;
}

MlaConfig read_mla(JsonReader& reader) {
  MlaConfig mla;
  mla.heads = reader.require_int("num_attention_heads", 1, kHeadsMax);
  mla.q_lora_rank = reader.get_int("q_lora_rank", 0, 1, kRankMax);
  mla.kv_lora_rank = reader.require_int("kv_lora_rank", 1, kRankMax);
  mla.nope = reader.require_int("qk_nope_head_dim", 1, kHeadDimMax);
  mla.rope = reader.get_int("qk_rope_head_dim", 0, 0, kHeadDimMax);
  mla.v = reader.require_int("v_head_dim", 1, kHeadDimMax);
  mla.bias = reader.get_bool("attention_bias", false);
  if (mla.rope % 2 != 0) reader.fail("qk_rope_head_dim", "an even number");
  if (reader.get_int("num_key_value_heads", mla.heads, 1) != mla.heads) {
    reader.fail("num_key_value_heads", absl::StrCat("num_attention_heads, ", mla.heads));
  }
  return mla;
}

void read_indexer(JsonReader& reader, ModelConfig& config, MlaConfig& mla) {
  IndexerConfig indexer;
  indexer.heads = reader.require_int("index_n_heads", 1, 1 << 10);
  indexer.head_dim = reader.require_int("index_head_dim", 1, 1 << 12);
  indexer.topk = reader.require_int("index_topk", 1, 1 << 20);
  if (mla.q_lora_rank == 0) reader.fail("q_lora_rank", "a rank: the indexer reads the low-rank query");
  if (mla.rope > indexer.head_dim) reader.fail("index_head_dim", absl::StrCat("at least qk_rope_head_dim ", mla.rope));
  mla.indexer = indexer;

  const auto mode_of = [](const std::string& word) {
    return word == "full" || word == "F"     ? IndexerMode::kFull
           : word == "shared" || word == "S" ? IndexerMode::kShared
                                             : IndexerMode::kNone;
  };
  const auto accept = [&](LayerConfig& layer, const std::string& word) {
    layer.indexer = mode_of(word);
    return layer.indexer != IndexerMode::kNone;
  };
  const nlohmann::ordered_json* pattern = reader.find("index_topk_pattern");
  if (reader.has("indexer_types")) {
    read_layer_words(reader, "indexer_types", config, "\"full\" or \"shared\"", accept);
  } else if (pattern != nullptr && pattern->is_string()) {
    const std::string letters = pattern->get<std::string>();
    bool ok = letters.size() == config.layers.size();
    for (size_t l = 0; ok && l < letters.size(); ++l) ok = accept(config.layers[l], std::string(1, letters[l]));
    if (!ok) reader.fail("index_topk_pattern", absl::StrCat(config.layers.size(), " letters, each F or S"));
  } else if (pattern != nullptr) {
    read_layer_words(reader, "index_topk_pattern", config, "\"full\" or \"shared\"", accept);
  } else {
    const int64_t freq = std::max<int64_t>(reader.get_int("index_topk_freq", 1, 0, kLayersMax), 1);
    const int64_t offset = reader.get_int("index_skip_topk_offset", 2, 0, kLayersMax);
    for (size_t l = 0; l < config.layers.size(); ++l) {
      const int64_t phase = std::max<int64_t>(static_cast<int64_t>(l) - offset + 1, 0) % freq;
      config.layers[l].indexer = phase == 0 ? IndexerMode::kFull : IndexerMode::kShared;
    }
  }
  config.mtp.indexer = IndexerMode::kFull;
  bool selected = false;
  for (LayerConfig& layer : config.layers) {
    if (layer.attention != AttentionKind::kMla) layer.indexer = IndexerMode::kNone;
    selected = selected || layer.indexer == IndexerMode::kFull;
    if (layer.indexer == IndexerMode::kShared && !selected) {
      reader.fail("indexer_types", "a full layer before the first shared one");
      return;
    }
  }
}

}  // namespace slipstream::model
