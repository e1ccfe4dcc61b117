// GQA: grouped-query causal attention; query head j uses key/value head j / (h / kv_heads).
//   p = softmax over s <= t of (q[t, j] · k[s] * scale);  o[t, j] = sum over s, ascending, of p_s v[s]
// On CUDA q, o and the gradients are f32 or bf16, all of a call alike; keys and values are stored in either.
// Ainslie et al. 2023, arXiv:2305.13245.
#pragma once

#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct Gqa {
  Tensor q;             // in   [T, h, d] f32
  PagedRows k;          // in   rows of kv_heads * d; the rows of this batch are already written
  PagedRows v;          // in   rows of kv_heads * d
  Sequences sequences;  // T rows
  int64_t kv_heads;     // divides h
  float scale;
  Tensor o;             // out  [T, h, d] f32
  Tensor lse;           // out  [T, h] f32; may be absent
};

// For whole sequences (every cached == 0).
struct GqaBackward {
  Tensor q;             // in   [T, h, d] f32
  PagedRows k, v;       // in
  Sequences sequences;
  int64_t kv_heads;
  float scale;
  Tensor o;             // in   [T, h, d] f32
  Tensor lse;           // in   [T, h] f32
  Tensor d_o;           // in   [T, h, d] f32
  Tensor dq;            // out  [T, h, d] f32
  Tensor dk, dv;        // out  [T, kv_heads, d] f32
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const Gqa& args);
absl::Status validate(const GqaBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const Gqa& args);
void reference(const GqaBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Gqa& args, Stream& stream);
void launch(const GqaBackward& args, Stream& stream);

}  // namespace slipstream::kernels
