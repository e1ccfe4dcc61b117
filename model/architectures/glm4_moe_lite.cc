// GLM-4.7-Flash: dense MLA + MoE.
#include "model/architectures/common.h"
#include "model/architectures/registry.h"

namespace slipstream::model {

void read_glm4_moe_lite(JsonReader& reader, ModelConfig& config) {
  read_backbone(reader, config);
  read_rope_theta(reader, config);
  read_moe(reader, config);
  read_mlp_types(reader, config, reader.get_int("first_k_dense_replace", 1, 0));
  MlaConfig mla = read_mla(reader);
  mla.latent_norm_eps = 1e-6f;
  mla.rope_layout = reader.get_bool("rope_interleave", true) ? kernels::RopeLayout::kInterleaved
                                                             : kernels::RopeLayout::kHalfSplit;
  config.mla = mla;
  config.prefix = "model.";
}

}  // namespace slipstream::model
