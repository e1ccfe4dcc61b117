// GLM-5, 5.1 (an indexer in every layer), 5.2 and 5.3 (IndexShare): MLA + DSA + MoE.
#include "model/architectures/common.h"
#include "model/architectures/registry.h"

namespace slipstream::model {

void read_glm_moe_dsa(JsonReader& reader, ModelConfig& config) {
  read_backbone(reader, config);
  read_rope_theta(reader, config);
  read_moe(reader, config);
  read_mlp_types(reader, config, reader.get_int("first_k_dense_replace", 3, 0));
  MlaConfig mla = read_mla(reader);
  mla.latent_norm_eps = 1e-6f;  // the published code builds these two norms without rms_norm_eps
  if (!reader.get_bool("rope_interleave", true)) reader.fail("rope_interleave", "true");
  if (!reader.get_bool("indexer_rope_interleave", true)) reader.fail("indexer_rope_interleave", "true");
  if (reader.get_bool("mlp_bias", false)) reader.fail("mlp_bias", "false");
  read_indexer(reader, config, mla);
  config.mla = mla;
  config.prefix = "model.";
}

}  // namespace slipstream::model
