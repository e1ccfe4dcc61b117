// What KDA needs from its projections: unit queries and keys, log-decays and write strengths. Kimi Linear 2025,
// arXiv:2510.26692; model-spec section 6, steps 2 and 3.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

constexpr int64_t kKdaInputsWidthCuda = 128;  // d at most, on CUDA

// Per head: q_hat = q / sqrt(sum q^2 + 1e-6) * d^-1/2,  k_hat = k / sqrt(sum k^2 + 1e-6),  beta = sigmoid(beta_logit).
// Per channel: log_decay = L sigmoid(exp(a_log) (f + dt_bias)) with the lower bound L < 0; when L is 0 there is no
// bound: log_decay = -exp(a_log) softplus(f + dt_bias). Always <= 0.
struct KdaInputs {
  Tensor q;            // in   [T, h, d] f32, outer dimensions strided
  Tensor k;            // in   [T, h, d] f32
  Tensor decay_logit;  // in   [T, h, d] f32, f
  Tensor beta_logit;   // in   [T, h] f32
  Tensor a_log;        // in   [h] f32
  Tensor dt_bias;      // in   [h, d] f32
  float lower_bound;   // L <= 0
  Tensor q_hat;        // out  [T, h, d] f32; may be q
  Tensor k_hat;        // out  [T, h, d] f32; may be k
  Tensor log_decay;    // out  [T, h, d] f32; may be decay_logit
  Tensor beta;         // out  [T, h] f32; may be beta_logit
};

struct KdaInputsBackward {
  Tensor q, k, decay_logit;              // in   [T, h, d] f32, the forward's inputs
  Tensor beta_logit;                     // in   [T, h] f32
  Tensor a_log;                          // in   [h] f32
  Tensor dt_bias;                        // in   [h, d] f32
  float lower_bound;
  Tensor dq_hat, dk_hat, dlog_decay;     // in   [T, h, d] f32
  Tensor dbeta;                          // in   [T, h] f32
  Tensor dq, dk, ddecay_logit;           // out  [T, h, d] f32; each may be its own input gradient
  Tensor dbeta_logit;                    // out  [T, h] f32
  Tensor da_log;                         // in/out [h] f32, added to
  Tensor ddt_bias;                       // in/out [h, d] f32, added to
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const KdaInputs& args);
absl::Status validate(const KdaInputsBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const KdaInputs& args);
void reference(const KdaInputsBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const KdaInputs& args, Stream& stream);
void launch(const KdaInputsBackward& args, Stream& stream);

}  // namespace slipstream::kernels
