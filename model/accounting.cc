#include "model/accounting.h"

#include <algorithm>
#include <limits>

#include "absl/numeric/int128.h"
#include "kernels/kda/kda.h"
#include "model/json_reader.h"
#include "model/weights.h"

namespace slipstream::model {
namespace {

// A token meets k of E experts; the embedding is a look-up and multiplies nothing.
int64_t active_count(const Parameter& p, const ModelConfig& config) {
  if (p.group == ParameterGroup::kEmbedding || p.group == ParameterGroup::kMtp) return 0;
  return p.expert ? p.numel() / config.moe->experts * config.moe->per_token : p.numel();
}

std::string attention_name(const LayerConfig& layer) {
  switch (layer.attention) {
    case AttentionKind::kGqa: return "gqa";
    case AttentionKind::kKda: return "kda";
    case AttentionKind::kMla: break;
  }
  switch (layer.indexer) {
    case IndexerMode::kFull: return "dsa";
    case IndexerMode::kShared: return "dsa-shared";
    case IndexerMode::kNone: break;
  }
  return "mla";
}

void count_parameters(const ModelConfig& config, Accounting& out) {
  ParameterCounts& counts = out.parameters;
  for (const Parameter& p : list_parameters(config, config.mtp_layers > 0)) {
    const int64_t n = p.numel();
    switch (p.group) {
      case ParameterGroup::kBackbone: counts.backbone += n; break;
      case ParameterGroup::kEmbedding: counts.embedding += n; break;
      case ParameterGroup::kLmHead: counts.lm_head += n; break;
      case ParameterGroup::kMtp: counts.mtp += n; break;
    }
    counts.active += active_count(p, config);
    if (p.storage == Storage::kFp32) counts.fp32 += n;
    if (p.group == ParameterGroup::kBackbone && p.layer >= 0) {
      out.layers[static_cast<size_t>(p.layer)].parameters += n;
      out.layers[static_cast<size_t>(p.layer)].active += active_count(p, config);
    }
  }
}

// The vision tower (model-spec 11) as published; its tensors are carried along, not computed.
absl::StatusOr<int64_t> count_vision(const ModelConfig& config) {
  if (config.vision_prefix.empty()) return 0;
  JsonReader vision(config.source.at("vision_config"), "vision_config");
  const int64_t bound = 1 << 20;
  const int64_t depth = vision.require_int("depth", 0, 4096), h = vision.require_int("hidden_size", 1, bound);
  const int64_t heads = vision.require_int("num_heads", 1, bound), f = vision.require_int("intermediate_size", 1, bound);
  const int64_t patch = vision.require_int("patch_size", 1, 4096), frames = vision.get_int("temporal_patch_size", 2, 1, 64);
  const int64_t channels = vision.get_int("in_channels", 3, 1, 64), merge = vision.get_int("spatial_merge_size", 2, 1, 64);
  const int64_t out = vision.require_int("out_hidden_size", 1, bound);
  const int64_t inner = vision.require_int("projection_intermediate_size", 1, bound);
  const bool bias = vision.get_bool("attention_bias", true);
  RETURN_IF_ERROR(vision.status());
  const int64_t embed = h * channels * frames * patch * patch + h;
  const int64_t attention = 3 * h * h + h * h + (bias ? 4 * h : 0) + 2 * (h / heads);
  const int64_t mlp = 3 * h * f + (bias ? 2 * f + h : 0);
  const int64_t block = 2 * h + attention + mlp;
  const int64_t merger = out * out + 2 * out + 3 * out * inner;
  const int64_t downsample = out * h * merge * merge + out;
  return embed + depth * block + merger + downsample + h;
}

void count_memory(const ModelConfig& config, Accounting& out) {
  const int64_t width = kernels::size_of(config.dtype), fp32 = 4;
  for (const LayerConfig& layer : config.layers) {
    if (layer.attention == AttentionKind::kMla) out.latent_bytes_per_token += config.mla->key_width() * width;
    if (layer.attention == AttentionKind::kGqa) {
      out.latent_bytes_per_token += 2 * config.gqa->kv_heads * config.gqa->head_dim * width;
    }
    if (layer.indexer == IndexerMode::kFull) {
      const IndexerConfig& indexer = *config.mla->indexer;
      out.indexer_bytes_per_token += indexer.head_dim * width / indexer.pool;
      if (indexer.pool > 1) out.sequence_bytes += indexer.pool * 2 * indexer.head_dim * fp32;
    }
    if (layer.attention == AttentionKind::kKda) {
      const KdaConfig& kda = *config.kda;
      const int64_t channels = kda.heads * kda.head_dim;
      out.state_bytes += channels * kda.head_dim * fp32;
      out.sequence_bytes += ((kda.conv_width - 1) * 3 + 3 * kernels::kKdaChunk) * channels * fp32;
    }
  }
  out.sequence_bytes += out.state_bytes;
}

absl::Status count_flops(const ModelConfig& config, int64_t context, Accounting& out) {
  TokenFlops& flops = out.flops;
  flops.context = context;
  flops.weights = 2 * out.parameters.active;
  const bool selects = config.mla && config.mla->indexer;
  const int64_t topk = selects ? config.mla->indexer->topk : context;
  const int64_t seen = std::min(context, topk);
  absl::int128 attention = 0, indexing = 0;  // a config within its bounds can ask for more than 2^63
  for (const LayerConfig& layer : config.layers) {
    if (layer.attention == AttentionKind::kMla) {
      const int64_t widths = config.mla->key_width() + config.mla->kv_lora_rank;
      attention += absl::int128{2 * config.mla->heads * seen} * widths;
    }
    if (layer.attention == AttentionKind::kGqa) {
      attention += absl::int128{4 * config.gqa->heads * context} * config.gqa->head_dim;
    }
    if (layer.indexer == IndexerMode::kFull) {
      const IndexerConfig& indexer = *config.mla->indexer;
      indexing += absl::int128{2 * indexer.heads * indexer.head_dim} * (context / indexer.pool);
    }
    if (layer.attention == AttentionKind::kKda) {
      // Decay, Sᵀk, k uᵀ and Sᵀq: 1 + 2 + 2 + 2 operations a state value.
      flops.state += 7 * config.kda->heads * config.kda->head_dim * config.kda->head_dim;
    }
  }
  if (attention + indexing + flops.weights + flops.state > std::numeric_limits<int64_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("context: ", context, ", expected one whose operations a 64-bit count holds"));
  }
  flops.attention = static_cast<int64_t>(attention);
  flops.indexer = static_cast<int64_t>(indexing);
  out.decode_fraction = static_cast<double>(seen) / static_cast<double>(context);
  out.prefill_pairs_dense = context % 2 == 0 ? context / 2 * (context + 1) : (context + 1) / 2 * context;
  out.prefill_pairs_sparse = seen * (seen + 1) / 2 + (context - seen) * seen;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Accounting> account(const ModelConfig& config, int64_t context) {
  constexpr int64_t kContextMax = int64_t{1} << 30;  // pairs of it fit an int64
  if (context < 1 || context > kContextMax) {
    return absl::InvalidArgumentError(absl::StrCat("context: ", context, ", expected 1..", kContextMax));
  }
  Accounting out;
  for (const LayerConfig& layer : config.layers) {
    out.layers.push_back({attention_name(layer), layer.moe ? "moe" : "dense", 0, 0});
  }
  count_parameters(config, out);
  ASSIGN_OR_RETURN(out.parameters.vision, count_vision(config));
  ParameterCounts& p = out.parameters;
  p.total = p.backbone + p.embedding + p.lm_head + p.mtp + p.vision;
  count_memory(config, out);
  RETURN_IF_ERROR(count_flops(config, context, out));
  return out;
}

}  // namespace slipstream::model
