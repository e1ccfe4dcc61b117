// Model: the whole network over one Batch. Prefill, decode, verification, log-probs and training are the same forward.
#pragma once

#include <memory>
#include <vector>

#include "common/status.h"
#include "model/batch.h"
#include "model/layers/decoder_layer.h"
#include "model/step.h"
#include "model/weights.h"
#include "parallel/group.h"

namespace slipstream::model {

// The discrete choices of a pass, one entry a layer: which experts, which positions. Captured by one pass, given to another.
using Choices = std::vector<LayerReplay>;

struct ForwardOptions {
  const Choices* replay = nullptr;  // use these (whole sequences only: the indexer does not run, so it stores no keys)
  Choices* capture = nullptr;       // receives what was used; tensors live in the step's arena
  bool fp8_latents = false;         // of a batch without a cache: latent rows in fp8, as a cache with fp8_latents has them
};

// What a backward pass needs. With recompute, each layer keeps its input and choices alone and is run again.
struct SavedForward {
  bool recompute = false;
  std::vector<Tensor> states;               // [T, n*H] the input of each layer, then the last output
  std::vector<DecoderLayer::Saved> layers;  // without recompute
  Choices choices;
  Tensor merged, merged_inv;                // [T, H] before the final norm, [T]
};

// Stateless after creation: weights, caches, saved values and memory come in by name. Threads: as the stream's.
class Model {
 public:
  // Unimplemented: a group of more than one rank.
  static absl::StatusOr<std::unique_ptr<Model>> create(ModelConfig config, parallel::Groups groups = {});

  // The backbone's output after the final norm, [T, H] (here and below of the step's dtype; log-probs and their gradients
  // are f32). New rows are stored in the cache when the batch has one (and
  // its sequences advance). saved: keep what backward() needs; the batch must then have no cache. Everything returned
  // and saved lives in step.arena.
  Tensor forward(const ModelWeights& w, Step& step, SavedForward* saved, const ForwardOptions& options = {}) const;

  // dhidden [T, H], the gradient of forward()'s result; gradients are added to dw.
  void backward(const ModelWeights& w, const SavedForward& saved, const Tensor& dhidden, ModelWeights& dw,
                Step& step) const;

  // lm_head of chosen rows of hidden [R, H]: [R, V] f32.
  Tensor logits(const ModelWeights& w, const Tensor& hidden, Step& step) const;

  // Log-probs (and, unless absent, entropies) of targets [R] i32 (-1: none) under softmax(logits / temperature), without
  // holding [R, V]. lse [R] is what the backward needs.
  struct LogProbs {
    Tensor logprob, lse, entropy;  // [R]
  };
  LogProbs log_probs(const ModelWeights& w, const Tensor& hidden, const Tensor& targets, float temperature,
                     bool entropy, Step& step) const;
  // Gradients of those (dentropy may be absent): returns dhidden [R, H] and adds to dw.lm_head.
  Tensor log_probs_backward(const ModelWeights& w, const Tensor& hidden, const Tensor& targets, float temperature,
                            const LogProbs& forward, const Tensor& dlogprob, const Tensor& dentropy, ModelWeights& dw,
                            Step& step) const;

  const ModelConfig& config() const { return config_; }

 private:
  Model(ModelConfig config, parallel::Groups groups);
  LayerCache layer_cache(size_t layer, const RowFormat& format, Step& step) const;
  Tensor embed(const ModelWeights& w, Step& step) const;
  Tensor final_norm(const ModelWeights& w, const Tensor& state, SavedForward* saved, Step& step) const;

  ModelConfig config_;
  int64_t streams_;
  std::vector<DecoderLayer> layers_;
  std::vector<size_t> selecting_layer_;  // whose selection layer l uses: the closest full-indexer layer up to l, if any
};

}  // namespace slipstream::model
