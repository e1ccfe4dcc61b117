// Mixture of experts: y = shared(x) + sum over the k chosen experts of g_i E_i(x), each expert a SwiGLU MLP.
// DeepSeek-V3 2024, arXiv:2412.19437, section 2.1.2; model-spec section 5.
#pragma once

#include "model/layers/gated_mlp.h"

namespace slipstream::model {

class Moe {
 public:
  using Weights = MoeWeights;
  struct Saved {
    Tensor x;          // [T, H]
    Tensor logits;     // [T, E] before the sigmoid
    Tensor experts;    // [T, k] i32
    Tensor weights;    // [T, k]
    Tensor row_begin;  // [E+1] i32
    Tensor slot_row;   // [T, k] i32
    Tensor row_token;  // [T*k] i32
    Tensor gate, up;   // [T*k, F] before the activation
    Tensor rows;       // [T*k, H] what the experts returned
    GatedMlp::Saved shared;
  };

  Moe(const MoeConfig& config, float limit, parallel::Group& tp) : config_(config), limit_(limit), shared_(limit, tp) {}

  // x [T, H] -> y [T, H]. replayed: experts [T, k] to use instead of the router's choice, or absent. chosen [T, k] i32
  // receives the router's choice; it may be absent.
  Tensor forward(const Weights& w, const Tensor& x, const Tensor& replayed, const Tensor& chosen, Saved* saved,
                 Step& step) const;
  Tensor backward(const Weights& w, const Saved& saved, const Tensor& dy, Weights& dw, Step& step) const;

 private:
  MoeConfig config_;
  float limit_;
  GatedMlp shared_;
};

}  // namespace slipstream::model
