// Grouped-query attention with optional per-head norms of q and k and partial RoPE. Ainslie et al. 2023, arXiv:2305.13245.
// Tensor parallel: each rank holds h/tp query heads and their key/value heads; y and dx are summed over the group.
#pragma once

#include "model/step.h"
#include "model/weights.h"
#include "parallel/group.h"

namespace slipstream::model {

class GqaAttention {
 public:
  using Weights = GqaWeights;
  struct Saved {
    Tensor x;                 // [T, H]
    Tensor q_raw, k_raw;      // [T, h*d], [T, kv*d] before the norms; absent without them
    Tensor q_inv, k_inv;      // [T*h], [T*kv]
    Tensor q;                 // [T, h, d] normed and rotated
    kernels::PagedRows k, v;  // as stored
    Tensor o;                 // [T, h, d]
    Tensor lse;               // [T, h]
  };

  GqaAttention(const GqaConfig& config, float norm_eps, parallel::Group& tp);

  Tensor forward(const Weights& w, const Tensor& x, const LayerCache& cache, Saved* saved, Step& step) const;
  Tensor backward(const Weights& w, const Saved& saved, const Tensor& dy, Weights& dw, Step& step) const;

 private:
  void rotate(const Tensor& heads, bool inverse, Step& step) const;

  GqaConfig config_;
  float norm_eps_;
  float scale_;
  parallel::Group& tp_;
};

}  // namespace slipstream::model
