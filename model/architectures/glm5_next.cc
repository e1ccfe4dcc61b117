// GLM-5.3-Flash: KDA and NoPE-MLA with a pooled indexer, residual streams, clamped SwiGLU, MoE; a vision tower beside it.
#include "model/architectures/common.h"
#include "model/architectures/registry.h"

namespace slipstream::model {
namespace {

void read_attention_kinds(JsonReader& text, ModelConfig& config) {
  const std::vector<std::string> words = text.get_strings("layer_types");
  if (words.empty()) {
    for (size_t l = 0; l < config.layers.size(); ++l) {
      config.layers[l].attention = l % 4 == 3 ? AttentionKind::kMla : AttentionKind::kKda;
    }
    return;
  }
  bool ok = words.size() == config.layers.size();
  for (size_t l = 0; ok && l < words.size(); ++l) {
    const bool linear = words[l] == "linear_attention";
    ok = linear || words[l] == "deepseek_sparse_attention" || words[l] == "full_attention" ||
         words[l] == "indexed_attention";
    config.layers[l].attention = linear ? AttentionKind::kKda : AttentionKind::kMla;
  }
  if (!ok) {
    text.fail("layer_types", absl::StrCat(config.layers.size(),
                                          " entries, each \"linear_attention\" or \"deepseek_sparse_attention\""));
  }
}

KdaConfig read_kda(JsonReader& text) {
  JsonReader nested = text.object("linear_attn_config");
  const auto get = [&](const char* nested_key, const char* flat_key, int64_t fallback, int64_t high) {
    return nested.has(nested_key) ? nested.require_int(nested_key, 1, high) : text.get_int(flat_key, fallback, 1, high);
  };
  KdaConfig kda;
  kda.heads = get("num_heads", "linear_num_heads", 64, 1 << 12);
  kda.head_dim = get("head_dim", "linear_head_dim", 128, 1 << 12);
  kda.conv_width = get("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 64);
  // An explicit null means no bound, unless the nested form asks for the safe gate (its default).
  const bool flat_null = !text.has("linear_lower_bound") && text.contains("linear_lower_bound");
  double bound = flat_null ? 0.0 : text.get_number("linear_lower_bound", -5.0, -1e4, -1e-6);
  if (nested.has("gate_lower_bound")) {
    bound = nested.require_number("gate_lower_bound", -1e4, -1e-6);
  } else if (nested.contains("gate_lower_bound")) {
    bound = 0.0;
  }
  if (text.has("linear_attn_config") && bound == 0.0 && nested.get_bool("safe_gate", true)) bound = -5.0;
  kda.lower_bound = static_cast<float>(bound);
  text.adopt(nested.status());
  return kda;
}

}  // namespace

void read_glm5_next(JsonReader& reader, ModelConfig& config) {
  const bool nested = reader.has("text_config");
  JsonReader inner = reader.object("text_config");
  JsonReader& text = nested ? inner : reader;
  read_backbone(text, config);
  config.swiglu_limit = static_cast<float>(text.get_number("swiglu_limit", 10.0, 1e-6, 1e30));
  read_attention_kinds(text, config);
  config.mtp.attention = AttentionKind::kMla;
  config.kda = read_kda(text);
  read_moe(text, config);
  read_mlp_types(text, config, text.get_int("first_k_dense_replace", 3, 0));
  MlaConfig mla = read_mla(text);
  mla.latent_norm_eps = config.norm_eps;
  if (mla.rope != 0) text.fail("qk_rope_head_dim", "0: this family has no rotary part");
  read_indexer(text, config, mla);
  IndexerConfig& indexer = *mla.indexer;
  indexer.pool = text.require_int("index_kpool", 1, 1 << 12);
  indexer.tail = text.get_bool("index_kpool_always_select_tail", true);
  if (indexer.topk % indexer.pool != 0) {
    text.fail("index_topk", absl::StrCat("a multiple of index_kpool ", indexer.pool));
  }
  config.mla = mla;
  HyperConfig hyper;
  hyper.streams = text.get_int("hc_mult", 4, 1, 8);
  hyper.eps = static_cast<float>(text.get_number("hc_eps", 1e-6, 1e-30, 1.0));
  hyper.iterations = text.get_int("hc_sinkhorn_iters", 20, 1, 1000);
  config.hyper = hyper;
  config.prefix = "model.language_model.";
  if (reader.has("vision_config")) config.vision_prefix = "model.visual.";
  if (nested) reader.adopt(text.status());
}

}  // namespace slipstream::model
