// Embedding: rows of a table by token id.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct Embedding {
  Tensor ids;    // in   [T] i32, each in 0..V-1 (checked: InvalidArgument names the first bad id)
  Tensor table;  // in   [V, H] f32 or bf16
  Tensor y;      // out  [T, H] f32
};

// dtable[ids[t]] += dy[t], tokens in ascending order.
struct EmbeddingBackward {
  Tensor ids;     // in   [T] i32
  Tensor dy;      // in   [T, H] f32
  Tensor dtable;  // in/out [V, H] f32
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const Embedding& args);
absl::Status validate(const EmbeddingBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const Embedding& args);
void reference(const EmbeddingBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Embedding& args, Stream& stream);
void launch(const EmbeddingBackward& args, Stream& stream);

}  // namespace slipstream::kernels
