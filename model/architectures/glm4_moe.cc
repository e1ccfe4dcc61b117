// GLM-4.5 .. 4.7: grouped-query attention with partial RoPE + MoE.
#include <algorithm>

#include "model/architectures/common.h"
#include "model/architectures/registry.h"

namespace slipstream::model {

void read_glm4_moe(JsonReader& reader, ModelConfig& config) {
  read_backbone(reader, config);
  read_rope_theta(reader, config);
  read_moe(reader, config);
  read_mlp_types(reader, config, reader.get_int("first_k_dense_replace", 1, 0));
  GqaConfig gqa;
  gqa.heads = reader.require_int("num_attention_heads", 1, 1 << 12);
  gqa.kv_heads = reader.get_int("num_key_value_heads", 8, 1, 1 << 12);
  gqa.head_dim = reader.get_int("head_dim", std::max<int64_t>(config.hidden / gqa.heads, 1), 1, 1 << 12);
  if (!reader.has("head_dim") && config.hidden % gqa.heads != 0) {
    reader.fail("head_dim", "a number: num_attention_heads does not divide hidden_size");
  }
  gqa.bias = reader.get_bool("attention_bias", false);
  gqa.qk_norm = reader.get_bool("use_qk_norm", false);
  if (gqa.heads % gqa.kv_heads != 0) reader.fail("num_key_value_heads", "a divisor of num_attention_heads");
  JsonReader rope = reader.object("rope_parameters");
  const double factor = rope.has("partial_rotary_factor") ? rope.require_number("partial_rotary_factor", 0.0, 1.0)
                                                          : reader.get_number("partial_rotary_factor", 0.5, 0.0, 1.0);
  gqa.rotary = static_cast<int64_t>(static_cast<double>(gqa.head_dim) * factor);
  if (gqa.rotary % 2 != 0) {
    (rope.has("partial_rotary_factor") ? rope : reader).fail("partial_rotary_factor", "an even number of rotated dimensions");
  }
  reader.adopt(rope.status());
  for (LayerConfig& layer : config.layers) layer.attention = AttentionKind::kGqa;
  config.mtp.attention = AttentionKind::kGqa;
  config.gqa = gqa;
  config.prefix = "model.";
}

}  // namespace slipstream::model
