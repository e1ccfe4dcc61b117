#include "model/model.h"

#include <algorithm>

#include "kernels/embedding/embedding.h"
#include "kernels/gemm/gemm.h"
#include "kernels/logprob/logprob.h"
#include "kernels/mhc/mhc.h"
#include "kernels/rmsnorm/rmsnorm.h"

namespace slipstream::model {
namespace {

using kernels::DType;

// Rows of logits held at once by log_probs: 64 x 154,880 fp32 is 38 MiB. A GPU reads the head's weights as often as this
// cuts the rows, and has the memory.
int64_t logit_rows(const Step& step) { return step.stream.on_cuda() ? 512 : 64; }
// Rows of the gradient of logits held at once in bf16 (1.2 GiB): each run of rows reads and writes the head's whole f32
// gradient, 7.6 GB.
constexpr int64_t kGradientRows = 4096;

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Model::create(ModelConfig config, parallel::Groups groups) {
  if (groups.tensor->size() != 1 || groups.expert->size() != 1 || groups.pipeline->size() != 1) {
    return absl::UnimplementedError("model: parallel groups of more than one rank");
  }
  return std::unique_ptr<Model>(new Model(std::move(config), groups));
}

Model::Model(ModelConfig config, parallel::Groups groups)
    : config_(std::move(config)), streams_(config_.hyper ? config_.hyper->streams : 1) {
  for (const LayerConfig& layer : config_.layers) {
    layers_.emplace_back(config_, layer, groups);
    const size_t l = layers_.size() - 1;
    selecting_layer_.push_back(l == 0 || layers_[l].runs_indexer() ? l : selecting_layer_[l - 1]);
  }
}

// The cache's stores, or stores for this pass alone, which the layer's backward reads again.
LayerCache Model::layer_cache(size_t layer, const RowFormat& format, Step& step) const {
  const PreparedBatch& batch = step.batch;
  if (batch.cache != nullptr) return batch.cache->layers()[layer];
  if (config_.layers[layer].attention == AttentionKind::kKda) return {};  // whole sequences need no state before them
  return allocate_layer_cache(config_, config_.layers[layer], format, batch.token_page_count, batch.pool_page_count,
                              batch.sequences.count(), step.arena);
}

Tensor Model::forward(const ModelWeights& w, Step& step, SavedForward* saved, const ForwardOptions& options) const {
  const PreparedBatch& batch = step.batch;
  CHECK(batch.cache == nullptr || (saved == nullptr && options.replay == nullptr && !options.fp8_latents));
  CHECK(saved == nullptr || !options.fp8_latents);  // a backward reads rows of the activations' precision
  const int64_t rows = batch.rows(), width = streams_ * config_.hidden;
  const bool keep_layers = saved != nullptr && !saved->recompute;
  const DType cache_dtype = batch.cache != nullptr ? batch.cache->dtype() : w.embedding.dtype();
  CHECK(cache_dtype == w.embedding.dtype());
  Choices local;
  Choices& choices = saved != nullptr ? saved->choices : options.capture != nullptr ? *options.capture : local;
  choices.assign(layers_.size(), {});
  const bool keep_choices = &choices != &local;

  Tensor state = embed(w, step);
  // Two states take turns unless all of them are wanted.
  Tensor spare = saved != nullptr ? Tensor() : step.alloc({rows, width});
  if (saved != nullptr) {
    saved->states = {state};
    saved->layers.assign(keep_layers ? layers_.size() : 0, {});
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    const DecoderLayer& layer = layers_[l];
    LayerReplay& choice = choices[l];
    const LayerReplay replay = options.replay != nullptr ? (*options.replay)[l] : LayerReplay{};
    const Tensor out = saved != nullptr ? step.alloc({rows, width}) : spare;
    if (layer.runs_indexer()) {
      choice.selection = replay.selection.empty() ? layer.allocate_selection(step) : replay.selection;
    }
    if (keep_choices && config_.layers[l].moe) {
      choice.experts = replay.experts.empty() ? step.ints({rows, config_.moe->per_token}) : replay.experts;
    }
    const int64_t mark = step.arena.mark();
    layer.forward(w.layers[l], state, out, layer_cache(l, {.dtype = cache_dtype, .fp8_latents = options.fp8_latents}, step),
                  choices[selecting_layer_[l]].selection, replay, choice.experts,
                  keep_layers ? &saved->layers[l] : nullptr, step);
    if (!keep_layers) step.arena.release(mark);
    if (saved != nullptr) {
      saved->states.push_back(out);
    } else {
      spare = state;
    }
    state = out;
  }
  batch.advance();
  if (options.capture != nullptr && options.capture != &choices) *options.capture = choices;
  return final_norm(w, state, saved, step);
}

// The embedding, copied to every stream: [T, n*H].
Tensor Model::embed(const ModelWeights& w, Step& step) const {
  const int64_t rows = step.batch.rows();
  const Tensor state = step.alloc({rows, streams_ * config_.hidden});
  const kernels::ArenaScope scope(step.arena);
  const Tensor embedded = streams_ == 1 ? state : step.alloc({rows, config_.hidden});
  kernels::launch(kernels::Embedding{.ids = step.batch.ids, .table = w.embedding, .y = embedded}, step.stream);
  if (streams_ > 1) {
    kernels::launch(kernels::MhcExpand{.x = embedded, .out = state.view({rows, streams_, config_.hidden})},
                    step.stream);
  }
  return state;
}

Tensor Model::final_norm(const ModelWeights& w, const Tensor& state, SavedForward* saved, Step& step) const {
  const int64_t rows = state.size(0);
  Tensor merged = state;
  if (streams_ > 1) {
    merged = step.alloc({rows, config_.hidden});
    kernels::launch(kernels::MhcMean{.x = state.view({rows, streams_, config_.hidden}), .out = merged}, step.stream);
  }
  Tensor inv;
  const Tensor hidden = rms_norm(step, merged, w.norm, config_.norm_eps, saved != nullptr ? &inv : nullptr);
  if (saved != nullptr) {
    saved->merged = merged;
    saved->merged_inv = inv;
  }
  return hidden;
}

void Model::backward(const ModelWeights& w, const SavedForward& saved, const Tensor& dhidden, ModelWeights& dw,
                     Step& step) const {
  const PreparedBatch& batch = step.batch;
  const int64_t rows = batch.rows(), width = streams_ * config_.hidden;
  const kernels::ArenaScope scope(step.arena);
  const Tensor dstate = step.alloc({rows, width});
  {
    const kernels::ArenaScope norm_scope(step.arena);
    const Tensor dmerged = rms_norm_backward(step, saved.merged, w.norm, saved.merged_inv, dhidden, dw.norm);
    if (streams_ > 1) {
      kernels::launch(kernels::MhcMeanBackward{.dout = dmerged, .dx = dstate.view({rows, streams_, config_.hidden})},
                      step.stream);
    } else {
      copy_into(step, dmerged.split_last(1), dstate.split_last(1));
    }
  }
  for (size_t l = layers_.size(); l-- > 0;) {
    const kernels::ArenaScope layer_scope(step.arena);
    const DecoderLayer& layer = layers_[l];
    DecoderLayer::Saved again;
    if (saved.recompute) {
      // The first run's choices are given back: the indexer need not run again, nor could a choice flip.
      layer.forward(w.layers[l], saved.states[l], step.alloc({rows, width}), layer_cache(l, {.dtype = w.embedding.dtype()}, step),
                    saved.choices[selecting_layer_[l]].selection, saved.choices[l], /*chosen_experts=*/{}, &again, step);
    }
    layer.backward(w.layers[l], saved.recompute ? again : saved.layers[l], dstate, dstate, dw.layers[l], step);
  }
  Tensor dembedded = dstate;
  if (streams_ > 1) {
    dembedded = step.alloc({rows, config_.hidden});
    kernels::launch(
        kernels::MhcExpandBackward{.dout = dstate.view({rows, streams_, config_.hidden}), .dx = dembedded},
        step.stream);
  }
  if (!dw.embedding.empty()) {
    kernels::launch(kernels::EmbeddingBackward{.ids = batch.ids, .dy = dembedded, .dtable = dw.embedding}, step.stream);
  }
}

Tensor Model::logits(const ModelWeights& w, const Tensor& hidden, Step& step) const {
  return linear_island(step, hidden, w.lm_head);
}

Model::LogProbs Model::log_probs(const ModelWeights& w, const Tensor& hidden, const Tensor& targets, float temperature,
                                 bool entropy, Step& step) const {
  const int64_t rows = hidden.size(0);
  const int64_t held = logit_rows(step);
  LogProbs out{step.island({rows}), step.island({rows}), entropy ? step.island({rows}) : Tensor()};
  if (kernels::takes_head(hidden, w.lm_head)) {
    kernels::launch(kernels::HeadLogProb{.hidden = hidden, .weight = w.lm_head, .targets = targets,
                                         .logprob = out.logprob, .lse = out.lse, .entropy = out.entropy,
                                         .temperature = temperature},
                    step.stream);
    return out;
  }
  for (int64_t begin = 0; begin < rows; begin += held) {
    const kernels::ArenaScope scope(step.arena);
    const int64_t end = std::min(begin + held, rows);
    const Tensor logits = this->logits(w, hidden.slice(0, begin, end), step);
    kernels::launch(kernels::LogProb{.logits = logits, .targets = targets.slice(0, begin, end),
                                     .logprob = out.logprob.slice(0, begin, end), .lse = out.lse.slice(0, begin, end),
                                     .entropy = entropy ? out.entropy.slice(0, begin, end) : Tensor(),
                                     .temperature = temperature},
                    step.stream);
  }
  return out;
}

Tensor Model::log_probs_backward(const ModelWeights& w, const Tensor& hidden, const Tensor& targets, float temperature,
                                 const LogProbs& forward, const Tensor& dlogprob, const Tensor& dentropy,
                                 ModelWeights& dw, Step& step) const {
  const int64_t rows = hidden.size(0);
  const bool fused = kernels::takes_head(hidden, w.lm_head), with_entropy = !dentropy.empty();
  const int64_t held = fused ? kGradientRows : logit_rows(step);
  const Tensor dhidden = step.alloc({rows, config_.hidden});
  for (int64_t begin = 0; begin < rows; begin += held) {
    const kernels::ArenaScope scope(step.arena);
    const int64_t end = std::min(begin + held, rows);
    const auto part_of = [&](const Tensor& t) { return t.slice(0, begin, end); };
    const Tensor part = part_of(hidden);
    // The logits are computed again: cheaper than [R, V] in memory.
    Tensor dlogits;
    if (fused) {
      dlogits = step.alloc({end - begin, config_.vocab});
      kernels::launch(
          kernels::HeadLogProbBackward{.hidden = part, .weight = w.lm_head, .targets = part_of(targets),
                                       .lse = part_of(forward.lse), .dlogprob = part_of(dlogprob),
                                       .entropy = with_entropy ? part_of(forward.entropy) : Tensor(),
                                       .dentropy = with_entropy ? part_of(dentropy) : Tensor(), .dlogits = dlogits,
                                       .temperature = temperature},
          step.stream);
    } else {
      const Tensor logits = this->logits(w, part, step);
      // In place, unless the products that follow want another dtype.
      dlogits = step.dtype == DType::kF32 ? logits : step.alloc({end - begin, config_.vocab});
      kernels::launch(
          kernels::LogProbBackward{.logits = logits, .targets = part_of(targets), .lse = part_of(forward.lse),
                                   .dlogprob = part_of(dlogprob),
                                   .entropy = with_entropy ? part_of(forward.entropy) : Tensor(),
                                   .dentropy = with_entropy ? part_of(dentropy) : Tensor(), .dlogits = dlogits,
                                   .temperature = temperature},
          step.stream);
    }
    add_weight_grad(step, dlogits, part, dw.lm_head);
    input_grad_into(step, dlogits, w.lm_head, part_of(dhidden));
  }
  return dhidden;
}

}  // namespace slipstream::model
