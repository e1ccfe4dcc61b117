// Config keys that several families share, each read in one place.
#pragma once

#include "model/config.h"
#include "model/json_reader.h"

namespace slipstream::model {

// vocab_size, hidden_size, intermediate_size, num_hidden_layers (sizes config.layers), max_position_embeddings,
// rms_norm_eps, num_nextn_predict_layers, initializer_range; refuses tied embeddings and activations other than silu.
void read_backbone(JsonReader& reader, ModelConfig& config);

// rope_parameters.rope_theta, else rope_theta. Only the default rope type exists here.
void read_rope_theta(JsonReader& reader, ModelConfig& config);

// n_routed_experts and its companions.
void read_moe(JsonReader& reader, ModelConfig& config);
// layers[l].moe from mlp_layer_types, else the first `dense` layers are dense.
void read_mlp_types(JsonReader& reader, ModelConfig& config, int64_t dense);

// num_attention_heads, q/kv ranks, head dims, attention_bias.
MlaConfig read_mla(JsonReader& reader);
// index_* keys; layers[l].indexer from indexer_types, index_topk_pattern or freq and offset, for the layers that use MLA.
void read_indexer(JsonReader& reader, ModelConfig& config, MlaConfig& mla);

}  // namespace slipstream::model
