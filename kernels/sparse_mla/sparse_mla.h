// SparseMla: multi-head latent attention in absorbed form over selected positions, or over the whole causal prefix.
// All heads share one key row [c ; k_rope] a position, whose first "rank" values are also the value row.
//   score = (q[t, h] · key[s]) * scale;  p = softmax over the selected s;  o[t, h] = sum over s, ascending, of p_s key[s][:rank]
// On CUDA q, o and the gradients are f32 or bf16, all of a call alike; keys are stored in either. The forward also takes
// keys in fp8 (latent_rows/latent_row.h): its bits are those of a store that holds their values, rounded to the dtype of q.
// DeepSeek-V2 2024, arXiv:2405.04434; DeepSeek-V3.2 2025, arXiv:2512.02556. model-spec section 3.
#pragma once

#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct SparseMla {
  Tensor q;             // in   [T, h, W] f32 with W = rank + rope
  PagedRows keys;       // in   rows of W, or of latent_row(rank, rope); the rows of this batch are already written
  Sequences sequences;  // T rows
  Tensor indices;       // in   [T, S] i32 positions <= the query's, ascending, counts[t] of them; absent: every position <= t
  Tensor counts;        // in   [T] i32; 0 gives o = 0 and lse = -infinity; absent when indices is
  float scale;
  Tensor o;             // out  [T, h, rank] f32
  Tensor lse;           // out  [T, h] f32, log sum exp of the scores; may be absent
};

// For whole sequences (every cached == 0), so key rows and batch rows correspond one to one.
struct SparseMlaBackward {
  Tensor q;             // in   [T, h, W] f32
  PagedRows keys;       // in
  Sequences sequences;
  Tensor indices;       // in   as in the forward
  Tensor counts;        // in
  float scale;
  Tensor o;             // in   [T, h, rank] f32
  Tensor lse;           // in   [T, h] f32
  Tensor d_o;           // in   [T, h, rank] f32
  Tensor dq;            // out  [T, h, W] f32
  Tensor dkeys;         // out  [T, W] f32: both the key's and the value's share, queries added in ascending order
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const SparseMla& args);
absl::Status validate(const SparseMlaBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const SparseMla& args);
void reference(const SparseMlaBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const SparseMla& args, Stream& stream);
void launch(const SparseMlaBackward& args, Stream& stream);

}  // namespace slipstream::kernels
