// Step: what a forward or backward pass carries along, and the small verbs layers are written in.
#pragma once

#include <vector>

#include "absl/types/span.h"
#include "kernels/arena.h"
#include "kernels/stream.h"
#include "model/batch.h"
#include "model/weight_panels.h"

namespace slipstream::model {

using kernels::Tensor;

// Layers allocate their results and what they save from `arena`; the model gives it back layer by layer.
struct Step {
  kernels::Stream& stream;
  kernels::Arena& arena;
  const PreparedBatch& batch;
  WeightPanels* panels = nullptr;  // of the weights in use: makes products of few rows faster; on the CPU only
  kernels::DType dtype = kernels::DType::kF32;  // of activations; f32 on the CPU
  const WeightScales* scales = nullptr;         // of the weights in use that are e4m3

  Tensor alloc(std::initializer_list<int64_t> shape) { return arena.alloc(dtype, shape); }
  // What is fp32 whatever the activations are: model-spec's islands.
  Tensor island(std::initializer_list<int64_t> shape) { return arena.alloc(kernels::DType::kF32, shape); }
  Tensor ints(std::initializer_list<int64_t> shape) { return arena.alloc(kernels::DType::kI32, shape); }
  // Host values on the stream's device, [n].
  Tensor upload(const std::vector<int32_t>& values);
  Tensor upload(const std::vector<float>& values);
};

// What activations are on this stream when the weights' matrices are of `weights`: kernels on the CPU compute in f32.
inline kernels::DType activation_dtype(const kernels::Stream& stream, kernels::DType weights) {
  return stream.on_cuda() ? weights : kernels::DType::kF32;
}

// The rows of x [T, H] that `rows` names, in its order; -1: a row of zeros.
Tensor gather_rows(Step& step, const Tensor& x, const std::vector<int32_t>& rows);

// w's panels, for a product x wᵀ; absent when the step has none.
Tensor panels_of(Step& step, const Tensor& w);
// y = x wᵀ (+ bias). x [T, K], w [N x K], y [T, N].
Tensor linear(Step& step, const Tensor& x, const Tensor& w, const Tensor& bias = {});
Tensor linear_island(Step& step, const Tensor& x, const Tensor& w);  // y is f32
void linear_into(Step& step, const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& bias = {});
// Several, of which none needs another's result. w may be e4m3, without a bias: x then becomes e4m3 for the product, each row by
// itself.
struct Linear {
  Tensor x, w, y;
  Tensor bias = {};
  Tensor row_begin = {};  // [E + 1]: w is [E, N, K], the rows of x are sorted by expert
};
void linears_into(Step& step, absl::Span<const Linear> layers);
// dx = dy w, and dx += dy w.
Tensor input_grad(Step& step, const Tensor& dy, const Tensor& w);
void input_grad_into(Step& step, const Tensor& dy, const Tensor& w, const Tensor& dx);
void add_input_grad(Step& step, const Tensor& dy, const Tensor& w, const Tensor& dx);
// dw += dyᵀ x; nothing when dw is absent (frozen).
void add_weight_grad(Step& step, const Tensor& dy, const Tensor& x, const Tensor& dw);
// db += column sums of dy; nothing when db is absent.
void add_bias_grad(Step& step, const Tensor& dy, const Tensor& db);

// RMSNorm of the rows of x [T, H]; inv_rms (may be null) receives what the backward needs.
Tensor rms_norm(Step& step, const Tensor& x, const Tensor& w, float eps, Tensor* inv_rms);
// The same of a + b, which is stored in `sum`.
Tensor rms_norm_of_sum(Step& step, const Tensor& a, const Tensor& b, const Tensor& sum, const Tensor& w, float eps, Tensor* inv_rms);
Tensor rms_norm_backward(Step& step, const Tensor& x, const Tensor& w, const Tensor& inv_rms, const Tensor& dy,
                         const Tensor& dw);
// a + b, and into = into + b. Rank 2.
Tensor add(Step& step, const Tensor& a, const Tensor& b);
void add_into(Step& step, const Tensor& into, const Tensor& b);
void copy_into(Step& step, const Tensor& from, const Tensor& to);  // rank 3

}  // namespace slipstream::model
