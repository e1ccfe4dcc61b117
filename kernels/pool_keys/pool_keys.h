// PoolKeys: the pooled indexer keys of GLM-5.3-Flash (model-spec section 4, kpool). Pool p covers tokens pP .. pP+P-1;
// per channel  pi_r = softmax over r of (gate[pP+r] + ape[r]),  pooled[p] = sum over r, ascending, of pi_r k[pP+r]
// (a chain of fused multiply-adds that starts at zero). However a sequence is cut into calls, the bits are the same.
#pragma once

#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct PoolKeys {
  Tensor k;             // in   [T, Di] f32
  Tensor gate;          // in   [T, Di] f32
  Tensor ape;           // in   [P, Di] f32
  Sequences sequences;  // T rows
  Tensor open;          // in/out [slots, P, 2, Di] f32: k and gate of the tokens of the incomplete pool, by token % P
  Tensor slots;         // in   [B] i32: where in `open`; each sequence has its own
  PagedRows pooled;     // out  rows of the pools that this batch completes, by pool index
};

// For whole sequences (every cached == 0). Pools of the sequences one after the other, floor(n / P) each.
struct PoolKeysBackward {
  Tensor k, gate;       // in   [T, Di] f32
  Tensor ape;           // in   [P, Di] f32
  Sequences sequences;
  Tensor dpooled;       // in   [pools, Di] f32
  Tensor dk, dgate;     // out  [T, Di] f32; zero for tokens of incomplete pools
  Tensor dape;          // in/out [P, Di] f32, added to
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const PoolKeys& args);
absl::Status validate(const PoolKeysBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const PoolKeys& args);
void reference(const PoolKeysBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const PoolKeys& args, Stream& stream);
void launch(const PoolKeysBackward& args, Stream& stream);

}  // namespace slipstream::kernels
