// LatentWrite: stores the new key rows [c ; k_rope] of a batch at their positions in a paged store of fp8 rows
// (latent_row.h). PagedWrite is the same for rows that are kept as they are.
#pragma once

#include "kernels/latent_rows/latent_row.h"
#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct LatentWrite {
  Tensor rows;          // in   [T, rank + rope] f32
  int64_t rank;         // >= 1
  Sequences sequences;  // T rows
  PagedRows store;      // in/out, rows of latent_row(rank, rope); gaps between their parts keep what they hold
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const LatentWrite& args);
// InvalidArgument unless the store has such rows, and a page for every row that `sequences` reaches.
absl::Status expect_latent_rows(const Operands& op, const char* name, const PagedRows& store, const Sequences& sequences,
                                const LatentRow& row);

// The definition: plain loops over CPU tensors.
void reference(const LatentWrite& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const LatentWrite& args, Stream& stream);

}  // namespace slipstream::kernels
