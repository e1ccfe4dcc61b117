// One decoder layer: attention and MLP, each behind its norm, joined to the residual by a sum or, with residual streams, by
// mHC (model-spec 7).
#pragma once

#include <optional>

#include "model/layers/gqa.h"
#include "model/layers/kda.h"
#include "model/layers/mla.h"
#include "model/layers/moe.h"

namespace slipstream::model {

// What may be given to a layer instead of its own choice, and what it may be asked to show. Tensors absent: not given.
struct LayerReplay {
  Tensor experts;       // [T, k] i32
  Selection selection;  // of a full-indexer layer
};

class DecoderLayer {
 public:
  // One sublayer's share of what the backward needs.
  struct SublayerSaved {
    Tensor streams;            // [T, n*H] the layer's state before it; [T, H] without streams
    Tensor zr, inv_rms;        // mHC: [T, (2+n)n], [T]
    Tensor post, comb;         // mHC: [T, n], [T, n, n]
    Tensor u, u_inv;           // [T, H] the norm's input, [T]
    Tensor y;                  // [T, H] the sublayer's output, with streams only
  };
  struct Saved {
    SublayerSaved attention, mlp;
    Mla::Saved mla;
    GqaAttention::Saved gqa;
    KdaAttention::Saved kda;
    GatedMlp::Saved dense;
    Moe::Saved moe;
  };

  DecoderLayer(const ModelConfig& config, const LayerConfig& layer, parallel::Groups groups);

  // state [T, n*H] (n = 1 without streams) -> out, the same shape; out may not be state. `selection` as in
  // Mla::forward: where `replay` has one, that one. chosen_experts [T, k] i32 receives the router's choice; it
  // may be absent.
  void forward(const LayerWeights& w, const Tensor& state, const Tensor& out, const LayerCache& cache,
               const Selection& selection, const LayerReplay& replay, const Tensor& chosen_experts, Saved* saved,
               Step& step) const;
  // dout [T, n*H] -> dstate, the same shape; dstate may be dout.
  void backward(const LayerWeights& w, const Saved& saved, const Tensor& dout, const Tensor& dstate, LayerWeights& dw,
                Step& step) const;

  bool runs_indexer() const { return layer_.indexer == IndexerMode::kFull; }
  Selection allocate_selection(Step& step) const { return mla_->allocate_selection(step); }

 private:
  Tensor enter(const HyperWeights& hyper, const Tensor& norm, const Tensor& state, SublayerSaved& s, bool keep,
               Step& step) const;
  void leave(const SublayerSaved& s, const Tensor& y, const Tensor& out, Step& step) const;
  // leave() the one and enter() the other, without streams in one pass; `between` receives the state.
  Tensor pass(const SublayerSaved& from, const Tensor& y, const Tensor& between, const HyperWeights& hyper, const Tensor& norm,
              SublayerSaved& to, bool keep, Step& step) const;
  Tensor leave_backward(const SublayerSaved& s, const Tensor& dout, const Tensor& dstate, Tensor* dpost, Tensor* dcomb,
                        Step& step) const;
  void enter_backward(const HyperWeights& hyper, const Tensor& norm, const SublayerSaved& s, const Tensor& dh,
                      const Tensor& dpost, const Tensor& dcomb, const Tensor& dstate, HyperWeights& dhyper,
                      const Tensor& dnorm, Step& step) const;

  LayerConfig layer_;
  int64_t hidden_;
  float norm_eps_;
  std::optional<HyperConfig> hyper_;
  std::optional<Mla> mla_;
  std::optional<GqaAttention> gqa_;
  std::optional<KdaAttention> kda_;
  std::optional<GatedMlp> dense_;
  std::optional<Moe> moe_;
};

}  // namespace slipstream::model
