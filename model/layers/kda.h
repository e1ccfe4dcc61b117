// Kimi Delta Attention as a layer: projections, short convolutions, gates, the delta rule, gated output norm.
// Kimi Linear 2025, arXiv:2510.26692; model-spec section 6.
// Tensor parallel: each rank holds h/tp heads; y and dx are summed over the group.
#pragma once

#include "model/step.h"
#include "model/weights.h"
#include "parallel/group.h"

namespace slipstream::model {

class KdaAttention {
 public:
  using Weights = KdaWeights;
  struct Saved {
    Tensor x;                   // [T, H]
    Tensor qkv;                 // [T, 3*h*d] the projections
    Tensor mixed;               // [T, 3*h*d] after convolution and SiLU
    Tensor f_a, decay_logit;    // [T, d], [T, h, d]
    Tensor beta_logit;          // [T, h]
    Tensor q_hat, k_hat;        // [T, h, d]
    Tensor log_decay, beta;     // [T, h, d], [T, h]
    Tensor span_states, r;      // as KdaBackward wants them
    Tensor o;                   // [T*h, d]
    Tensor g_a, gate;           // [T, d], [T*h, d]
    Tensor o_inv;               // [T*h]
    Tensor gated;               // [T, h*d]
  };

  KdaAttention(const KdaConfig& config, float norm_eps, parallel::Group& tp)
      : config_(config), norm_eps_(norm_eps), tp_(tp) {}

  Tensor forward(const Weights& w, const Tensor& x, const LayerCache& cache, Saved* saved, Step& step) const;
  Tensor backward(const Weights& w, const Saved& saved, const Tensor& dy, Weights& dw, Step& step) const;

 private:
  KdaConfig config_;
  float norm_eps_;
  parallel::Group& tp_;
};

}  // namespace slipstream::model
