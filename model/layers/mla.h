// Multi-head latent attention, absorbed: queries meet the cached latent itself, over the indexer's selection or the whole
// prefix. DeepSeek-V2 2024, arXiv:2405.04434; model-spec section 3.
// Tensor parallel: each rank holds h/tp heads; y and dx are summed over the group.
#pragma once

#include "model/layers/indexer.h"
#include "parallel/group.h"

namespace slipstream::model {

class Mla {
 public:
  using Weights = MlaWeights;
  struct Saved {
    Tensor x;                         // [T, H]
    Tensor q_a, q_a_inv, q_resid;     // [T, q_lora_rank], [T], [T, q_lora_rank]; q_resid is x without a low rank
    Tensor q;                         // [T, h, nope + rope], rope part not rotated
    Tensor q_absorbed;                // [T, h, rank + rope]
    Tensor c_raw, c_inv;              // [T, rank] before its norm, [T]
    kernels::PagedRows keys;          // [c ; k_rope] as stored
    Selection selection;              // empty: the whole prefix
    Tensor o_latent;                  // [T, h, rank]
    Tensor lse;                       // [T, h]
    Tensor o;                         // [T, h*v]
  };

  Mla(const MlaConfig& config, IndexerMode mode, parallel::Group& tp);

  // x [T, H] the normed hidden state -> y [T, H]. `cache` receives this batch's rows. A full layer fills `selection` (made
  // by allocate_selection), a shared one reads it, a dense one ignores it; replayed: it is given, and the indexer
  // does not run.
  Tensor forward(const Weights& w, const Tensor& x, const LayerCache& cache, const Selection& selection, bool replayed,
                 Saved* saved, Step& step) const;
  Tensor backward(const Weights& w, const Saved& saved, const Tensor& dy, Weights& dw, Step& step) const;

  bool runs_indexer() const { return mode_ == IndexerMode::kFull; }
  Selection allocate_selection(Step& step) const { return indexer_.allocate(step); }

 private:
  Tensor w_uk(const Tensor& kv_b) const { return kv_b.slice(1, 0, config_.nope); }                          // [h, nope, rank]
  Tensor w_uv(const Tensor& kv_b) const { return kv_b.slice(1, config_.nope, config_.nope + config_.v); }  // [h, v, rank]
  void rotate(const Tensor& heads, bool inverse, Step& step) const;

  MlaConfig config_;
  IndexerMode mode_;
  Indexer indexer_;
  float scale_;
  parallel::Group& tp_;
};

}  // namespace slipstream::model
