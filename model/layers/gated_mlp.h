// SwiGLU MLP: y = Wd (silu(min(Wg x, L)) * clamp(Wu x, -L, L)). Shazeer 2020, arXiv:2002.05202.
// Tensor parallel: each rank holds F/tp of the F inner units; y and dx are summed over the group.
#pragma once

#include "model/step.h"
#include "model/weights.h"
#include "parallel/group.h"

namespace slipstream::model {

class GatedMlp {
 public:
  using Weights = MlpWeights;
  struct Saved {
    Tensor x, gate, up;  // [T, H], [T, F/tp], [T, F/tp]; before the activation
  };

  GatedMlp(float limit, parallel::Group& tp) : limit_(limit), tp_(tp) {}

  // x [T, H] -> y [T, H]. saved may be null: nothing is kept.
  Tensor forward(const Weights& w, const Tensor& x, Saved* saved, Step& step) const;
  // dy [T, H] -> dx [T, H]; weight gradients are added to dw.
  Tensor backward(const Weights& w, const Saved& saved, const Tensor& dy, Weights& dw, Step& step) const;

 private:
  float limit_;
  parallel::Group& tp_;
};

}  // namespace slipstream::model
