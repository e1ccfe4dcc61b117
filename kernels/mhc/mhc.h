// mHC: n residual streams, mixed around each sublayer by matrices that are pushed towards doubly stochastic
// ones (Sinkhorn). Manifold-constrained hyper-connections 2025, arXiv:2512.24880; model-spec section 7.
// n is 1..8. On CUDA the streams and what has their width are f32 or bf16; the rest is f32.
#pragma once

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// With r = 1 / sqrt(mean(flatten(X)^2) + norm_eps) and z = zr r, split as pre n | post n | comb n^2 by rows:
//   pre  = sigmoid(z_pre scale0 + base_pre) + eps;   post = 2 sigmoid(z_post scale1 + base_post)
//   C    = softmax over each row of (z_comb scale2 + base_comb), + eps; columns divided by (their sum + eps);
//          then (iterations - 1) times: rows, then columns, divided by (their sum + eps)
//   u    = sum over i, ascending, of pre_i X_i
struct MhcMix {
  Tensor x;            // in   [T, n, H] f32: the streams
  Tensor zr;           // in   [T, (2+n)n] f32: fn · flatten(X); the norm, a row scalar, commutes with fn
  Tensor base;         // in   [(2+n)n] f32
  Tensor scale;        // in   [3] f32
  float norm_eps;      // rms_norm_eps; > 0
  float eps;           // hc_eps; > 0: it keeps the divisions of the iterations away from 0 / 0
  int64_t iterations;  // hc_sinkhorn_iters >= 1
  Tensor inv_rms;      // out  [T] f32, r
  Tensor post;         // out  [T, n] f32
  Tensor comb;         // out  [T, n, n] f32, C
  Tensor u;            // out  [T, H] f32, the sublayer's input before its norm
  // The norm, in the same pass: RmsNorm{x = u, w, y, inv_rms = u_inv, eps = norm_eps} (kernels/rmsnorm), bit for bit. Without y
  // there is none.
  Tensor w = {};      // in   [H] f32; absent: 1
  Tensor y = {};      // out  [T, H] f32
  Tensor u_inv = {};  // out  [T] f32; may be absent
};

// Of the backward: every iteration's result is kept on the chip.
constexpr int64_t kMhcIterationsCuda = 200;

// Gradients of u, post and comb back to the streams and to zr (the caller then adds dzr · fn to dx and
// dzrᵀ · X to dfn). dbase and dscale are summed over ascending tokens.
struct MhcMixBackward {
  Tensor x;      // in   [T, n, H] f32
  Tensor zr;     // in   [T, (2+n)n] f32
  Tensor base;   // in   [(2+n)n] f32
  Tensor scale;  // in   [3] f32
  float eps;
  int64_t iterations;
  Tensor inv_rms;  // in   [T] f32
  Tensor du;       // in   [T, H] f32
  Tensor dpost;    // in   [T, n] f32
  Tensor dcomb;    // in   [T, n, n] f32
  Tensor dx;       // in/out [T, n, H] f32, added to
  Tensor dzr;      // out  [T, (2+n)n] f32
  Tensor dbase;    // in/out [(2+n)n] f32, added to
  Tensor dscale;   // in/out [3] f32, added to
};

// out_j = post_j y + sum over i, ascending, of C_ij X_i
struct MhcMerge {
  Tensor x;     // in   [T, n, H] f32
  Tensor y;     // in   [T, H] f32, the sublayer's output
  Tensor post;  // in   [T, n] f32
  Tensor comb;  // in   [T, n, n] f32
  Tensor out;   // out  [T, n, H] f32; may be x
};

struct MhcMergeBackward {
  Tensor x;      // in   [T, n, H] f32
  Tensor y;      // in   [T, H] f32
  Tensor post;   // in   [T, n] f32
  Tensor comb;   // in   [T, n, n] f32
  Tensor dout;   // in   [T, n, H] f32
  Tensor dx;     // out  [T, n, H] f32; may be dout
  Tensor dy;     // out  [T, H] f32
  Tensor dpost;  // out  [T, n] f32
  Tensor dcomb;  // out  [T, n, n] f32
};

// The ends of the streams: expand copies [T, H] to all n streams; the mean over streams is the way out.
struct MhcExpand {
  Tensor x;    // in   [T, H] f32
  Tensor out;  // out  [T, n, H] f32
};
struct MhcMean {
  Tensor x;    // in   [T, n, H] f32
  Tensor out;  // out  [T, H] f32: (sum over streams, ascending) / n
};
// The backward of MhcExpand: dx = sum over streams. The backward of MhcMean: MhcExpand of dy / n.
struct MhcExpandBackward {
  Tensor dout;  // in   [T, n, H] f32
  Tensor dx;    // out  [T, H] f32
};
struct MhcMeanBackward {
  Tensor dout;  // in   [T, H] f32
  Tensor dx;    // out  [T, n, H] f32
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const MhcMix& args);
absl::Status validate(const MhcMixBackward& args);
absl::Status validate(const MhcMerge& args);
absl::Status validate(const MhcMergeBackward& args);
absl::Status validate(const MhcExpand& args);
absl::Status validate(const MhcMean& args);
absl::Status validate(const MhcExpandBackward& args);
absl::Status validate(const MhcMeanBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const MhcMix& args);
void reference(const MhcMixBackward& args);
void reference(const MhcMerge& args);
void reference(const MhcMergeBackward& args);
void reference(const MhcExpand& args);
void reference(const MhcMean& args);
void reference(const MhcExpandBackward& args);
void reference(const MhcMeanBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const MhcMix& args, Stream& stream);
void launch(const MhcMixBackward& args, Stream& stream);
void launch(const MhcMerge& args, Stream& stream);
void launch(const MhcMergeBackward& args, Stream& stream);
void launch(const MhcExpand& args, Stream& stream);
void launch(const MhcMean& args, Stream& stream);
void launch(const MhcExpandBackward& args, Stream& stream);
void launch(const MhcMeanBackward& args, Stream& stream);

}  // namespace slipstream::kernels
