// Moving token rows to the experts that were chosen for them, and back. R = T * k rows, sorted by expert and,
// within an expert, by (token, slot). Everything is a gather in a fixed order: no atomics, no dependence on
// the batch.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

struct MoePlan {
  Tensor experts;    // in   [T, k] i32, each in 0..E-1, or launch dies
  Tensor row_begin;  // out  [E+1] i32, rows row_begin[e] .. row_begin[e+1] are expert e's
  Tensor slot_row;   // out  [T, k] i32, the row of (token, slot)
  Tensor row_token;  // out  [R] i32, the token of each row
};

struct MoeGather {
  Tensor x;          // in   [T, H] f32
  Tensor row_token;  // in   [R] i32; -1: a row of zeros
  Tensor rows;       // out  [R, H] f32
};

// y[t] += sum over slots, ascending, of weights[t, slot] * rows[slot_row[t, slot]].
struct MoeCombine {
  Tensor rows;      // in   [R, H] f32
  Tensor weights;   // in   [T, k] f32
  Tensor slot_row;  // in   [T, k] i32
  Tensor y;         // in/out [T, H] f32
};

struct MoeCombineBackward {
  Tensor rows;      // in   [R, H] f32
  Tensor weights;   // in   [T, k] f32
  Tensor slot_row;  // in   [T, k] i32
  Tensor dy;        // in   [T, H] f32
  Tensor drows;     // out  [R, H] f32; may be rows itself
  Tensor dweights;  // out  [T, k] f32
};

// dx[t] += sum over slots, ascending, of drows[slot_row[t, slot]].
struct MoeGatherBackward {
  Tensor drows;     // in   [R, H] f32
  Tensor slot_row;  // in   [T, k] i32
  Tensor dx;        // in/out [T, H] f32
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const MoePlan& args);
absl::Status validate(const MoeGather& args);
absl::Status validate(const MoeCombine& args);
absl::Status validate(const MoeCombineBackward& args);
absl::Status validate(const MoeGatherBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const MoePlan& args);
void reference(const MoeGather& args);
void reference(const MoeCombine& args);
void reference(const MoeCombineBackward& args);
void reference(const MoeGatherBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const MoePlan& args, Stream& stream);
void launch(const MoeGather& args, Stream& stream);
void launch(const MoeCombine& args, Stream& stream);
void launch(const MoeCombineBackward& args, Stream& stream);
void launch(const MoeGatherBackward& args, Stream& stream);

}  // namespace slipstream::kernels
