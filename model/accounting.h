// What a configuration costs, from config.json alone: parameters, cache, state, compute (model-spec 12).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "model/config.h"

namespace slipstream::model {

struct ParameterCounts {
  int64_t total = 0;      // everything below
  int64_t backbone = 0;   // layers and the final norm
  int64_t embedding = 0;
  int64_t lm_head = 0;
  int64_t mtp = 0;
  int64_t vision = 0;
  int64_t active = 0;     // of backbone and lm_head, those one token is multiplied with
  int64_t fp32 = 0;       // of all, those stored in fp32 (router biases)
};

struct LayerCounts {
  std::string attention;  // "mla", "dsa", "dsa-shared", "gqa", "kda"
  std::string mlp;        // "dense", "moe"
  int64_t parameters = 0;
  int64_t active = 0;
};

// Floating-point operations for one token at a context length; a multiply-add counts as two.
struct TokenFlops {
  int64_t context = 0;
  int64_t weights = 0;    // 2 x active parameters
  int64_t attention = 0;  // scores and values over the positions attended to
  int64_t indexer = 0;    // scores over every key
  int64_t state = 0;      // KDA recurrence
  int64_t total() const { return weights + attention + indexer + state; }
};

struct Accounting {
  ParameterCounts parameters;
  std::vector<LayerCounts> layers;
  int64_t latent_bytes_per_token = 0;   // attention rows of all layers, in the config's dtype
  int64_t indexer_bytes_per_token = 0;  // indexer keys of all full layers; a pooled key is shared by its tokens
  int64_t state_bytes = 0;              // a sequence's KDA states, fp32
  int64_t sequence_bytes = 0;           // those, with convolution tails, open pools and the rows of the current chunk
  TokenFlops flops;
  double decode_fraction = 1.0;         // of the context's positions that a query attends to
  int64_t prefill_pairs_dense = 0;      // query-key pairs of a causal prefill of the context
  int64_t prefill_pairs_sparse = 0;     // those that remain after selection
};

// context: tokens a query sees; 1..2^30. InvalidArgument: context out of range, or so long for the config's
// sizes that its operations pass 2^63; a vision_config without its keys.
absl::StatusOr<Accounting> account(const ModelConfig& config, int64_t context);

}  // namespace slipstream::model
