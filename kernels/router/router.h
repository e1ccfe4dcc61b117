// Router of the mixture of experts: sigmoid scores, a bias that only steers the choice, optional group
// limiting. DeepSeek-V3 2024, arXiv:2412.19437, section 2.1.2.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// s = sigmoid(logits); choice = s + bias. With groups > 1 only the groups_kept groups of E/groups experts
// with the largest (sum of the two best choices) stay eligible. The k eligible experts of largest choice are
// taken, in descending choice; every tie goes to the lower id, and a NaN or -inf choice (as any below -1e30)
// counts as -1e30, so that the k experts are always distinct. weight = s of the expert, divided by (sum over
// the k, ascending slots, + 1e-20) when normalize, times scale.
struct Router {
  Tensor logits;   // in   [T, E] f32
  Tensor bias;     // in   [E] f32 (e_score_correction_bias)
  Tensor experts;  // out  [T, k] i32, expert of each slot; in when replayed: each in 0..E-1, or launch dies
  Tensor weights;  // out  [T, k] f32
  int64_t groups = 1;       // divides E; with more than one, a group has at least two experts
  int64_t groups_kept = 1;  // k <= groups_kept * E / groups
  bool normalize = true;
  float scale = 1.0f;
  bool replayed = false;  // experts are given (routing replay): only the weights are computed
};

// The choice is a constant; the gradient flows through the weights to the logits of the chosen experts.
struct RouterBackward {
  Tensor logits;    // in   [T, E] f32
  Tensor experts;   // in   [T, k] i32
  Tensor dweights;  // in   [T, k] f32
  Tensor dlogits;   // out  [T, E] f32, zero outside the chosen experts
  bool normalize = true;
  float scale = 1.0f;
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const Router& args);
absl::Status validate(const RouterBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const Router& args);
void reference(const RouterBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Router& args, Stream& stream);
void launch(const RouterBackward& args, Stream& stream);

}  // namespace slipstream::kernels
