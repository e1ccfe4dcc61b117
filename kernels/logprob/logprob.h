// Log-probabilities of given tokens and the entropy of their distributions, from logits, without a [T, V] softmax in
// memory. All in fp32 with the row's maximum subtracted.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// With z = logits / temperature and lse = log sum exp z:  logprob = z[target] - lse,  entropy = lse - sum softmax(z) z.
// A row of non-finite logits gives a non-finite result for that row and leaves the others alone.
struct LogProb {
  Tensor logits;   // in   [T, V] f32
  Tensor targets;  // in   [T] i32, each in 0..V-1, or -1: logprob is then 0
  Tensor logprob;  // out  [T] f32
  Tensor lse;      // out  [T] f32, what the backward needs
  Tensor entropy;  // out  [T] f32 in nats; may be absent
  float temperature = 1.0f;  // > 0
};

// dlogits = (dlogprob (onehot - p) - dentropy p (log p + entropy)) / temperature. A row with dlogprob == 0 and
// dentropy == 0 or absent is written as zeros without being read: masking is selection, not multiplication.
struct LogProbBackward {
  Tensor logits;     // in   [T, V] f32
  Tensor targets;    // in   [T] i32
  Tensor lse;        // in   [T] f32
  Tensor dlogprob;   // in   [T] f32
  Tensor entropy;    // in   [T] f32; absent when dentropy is
  Tensor dentropy;   // in   [T] f32; may be absent
  Tensor dlogits;    // out  [T, V] f32; may be logits itself
  float temperature = 1.0f;
};

// LogProb of logits = hidden weightᵀ that are never stored: the product's epilogue reduces them while they are in registers.
// The same bits as a Gemm into f32 logits and LogProb. On CUDA, in bf16, where rows are whole 16-byte pieces: see
// takes_head().
struct HeadLogProb {
  Tensor hidden;   // in   [T, H] bf16
  Tensor weight;   // in   [V x H] bf16
  Tensor targets;  // in   [T] i32, each in 0..V-1, or -1: logprob is then 0
  Tensor logprob;  // out  [T] f32
  Tensor lse;      // out  [T] f32
  Tensor entropy;  // out  [T] f32 in nats; may be absent
  float temperature = 1.0f;  // > 0
};

// LogProbBackward of the same, with the product run again.
struct HeadLogProbBackward {
  Tensor hidden;    // in   [T, H] bf16
  Tensor weight;    // in   [V x H] bf16
  Tensor targets;   // in   [T] i32
  Tensor lse;       // in   [T] f32
  Tensor dlogprob;  // in   [T] f32
  Tensor entropy;   // in   [T] f32; absent when dentropy is
  Tensor dentropy;  // in   [T] f32; may be absent
  Tensor dlogits;   // out  [T, V] bf16
  float temperature = 1.0f;
};

// Whether validate() finds code for this head.
bool takes_head(const Tensor& hidden, const Tensor& weight);

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const LogProb& args);
absl::Status validate(const LogProbBackward& args);
absl::Status validate(const HeadLogProb& args);
absl::Status validate(const HeadLogProbBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const LogProb& args);
void reference(const LogProbBackward& args);
void reference(const HeadLogProb& args);  // factors and dlogits f32, on the CPU
void reference(const HeadLogProbBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const LogProb& args, Stream& stream);
void launch(const LogProbBackward& args, Stream& stream);
void launch(const HeadLogProb& args, Stream& stream);
void launch(const HeadLogProbBackward& args, Stream& stream);

}  // namespace slipstream::kernels
