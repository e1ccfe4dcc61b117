#include "model/step.h"

#include "kernels/add/add.h"
#include "kernels/copy/copy.h"
#include "kernels/gemm/gemm.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/moe_dispatch/moe_dispatch.h"
#include "kernels/quantize/quantize.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/scaled_gemm/scaled_gemm.h"

namespace slipstream::model {

Tensor Step::upload(const std::vector<int32_t>& values) {
  const Tensor t = ints({static_cast<int64_t>(values.size())});
  stream.upload(values.data(), t);
  return t;
}

Tensor Step::upload(const std::vector<float>& values) {
  const Tensor t = island({static_cast<int64_t>(values.size())});
  stream.upload(values.data(), t);
  return t;
}

Tensor gather_rows(Step& step, const Tensor& x, const std::vector<int32_t>& rows) {
  const Tensor out = step.alloc({static_cast<int64_t>(rows.size()), x.size(1)});
  kernels::launch(kernels::MoeGather{.x = x, .row_token = step.upload(rows), .rows = out}, step.stream);
  return out;
}

Tensor panels_of(Step& step, const Tensor& w) {
  return step.panels != nullptr ? step.panels->of(w, step.stream) : Tensor();
}

void linears_into(Step& step, absl::Span<const Linear> layers) {
  const kernels::ArenaScope scope(step.arena);
  std::vector<kernels::Gemm> products;
  Tensor quantized, codes, scales;  // an x and what it became, for the layers that follow
  for (const Linear& layer : layers) {
    if (layer.w.dtype() == kernels::DType::kF8E4M3) {
      CHECK(layer.bias.empty() && step.scales != nullptr);
      const int64_t rows = layer.x.size(0), columns = layer.x.size(1);
      if (quantized.raw() != layer.x.raw() || !quantized.same_shape(layer.x)) {
        quantized = layer.x;
        codes = step.arena.alloc(kernels::DType::kF8E4M3, {rows, columns});
        scales = step.island({rows, (columns + kernels::kScaleColumns - 1) / kernels::kScaleColumns});
        kernels::launch(kernels::Quantize{.x = layer.x, .codes = codes, .scales = scales}, step.stream);
      }
      kernels::launch(kernels::ScaledGemm{.a = codes, .a_scales = scales, .b = layer.w, .b_scales = step.scales->at(layer.w.raw()),
                                          .row_begin = layer.row_begin, .c = layer.y},
                      step.stream);
    } else if (!layer.row_begin.empty()) {
      kernels::launch(kernels::GroupedGemm{.x = layer.x, .w = layer.w, .row_begin = layer.row_begin, .y = layer.y,
                                           .w_panels = panels_of(step, layer.w)},
                      step.stream);
    } else {
      products.push_back({.a = layer.x, .b = layer.w, .c = layer.y, .bias = layer.bias, .transpose_b = true,
                          .b_panels = panels_of(step, layer.w)});
    }
  }
  kernels::launch(kernels::Gemms{products}, step.stream);
}

void linear_into(Step& step, const Tensor& x, const Tensor& w, const Tensor& y, const Tensor& bias) {
  linears_into(step, {{.x = x, .w = w, .y = y, .bias = bias}});
}

Tensor linear(Step& step, const Tensor& x, const Tensor& w, const Tensor& bias) {
  const Tensor y = step.alloc({x.size(0), w.size(0)});
  linear_into(step, x, w, y, bias);
  return y;
}

Tensor linear_island(Step& step, const Tensor& x, const Tensor& w) {
  const Tensor y = step.island({x.size(0), w.size(0)});
  linear_into(step, x, w, y);
  return y;
}

void input_grad_into(Step& step, const Tensor& dy, const Tensor& w, const Tensor& dx) {
  kernels::launch(kernels::Gemm{.a = dy, .b = w, .c = dx, .bias = {}}, step.stream);
}

Tensor input_grad(Step& step, const Tensor& dy, const Tensor& w) {
  const Tensor dx = step.alloc({dy.size(0), w.size(1)});
  input_grad_into(step, dy, w, dx);
  return dx;
}

void add_input_grad(Step& step, const Tensor& dy, const Tensor& w, const Tensor& dx) {
  kernels::launch(kernels::Gemm{.a = dy, .b = w, .c = dx, .bias = {}, .accumulate = true}, step.stream);
}

void add_weight_grad(Step& step, const Tensor& dy, const Tensor& x, const Tensor& dw) {
  if (dw.empty()) return;
  kernels::launch(
      kernels::Gemm{.a = dy, .b = x, .c = dw, .bias = {}, .transpose_a = true, .accumulate = true}, step.stream);
}

void add_bias_grad(Step& step, const Tensor& dy, const Tensor& db) {
  if (!db.empty()) kernels::launch(kernels::ColumnSum{.x = dy, .y = db}, step.stream);
}

Tensor rms_norm(Step& step, const Tensor& x, const Tensor& w, float eps, Tensor* inv_rms) {
  const Tensor y = step.alloc({x.size(0), x.size(1)});
  if (inv_rms != nullptr) *inv_rms = step.island({x.size(0)});
  kernels::launch(
      kernels::RmsNorm{.x = x, .w = w, .y = y, .inv_rms = inv_rms != nullptr ? *inv_rms : Tensor(), .eps = eps},
      step.stream);
  return y;
}

Tensor rms_norm_of_sum(Step& step, const Tensor& a, const Tensor& b, const Tensor& sum, const Tensor& w, float eps, Tensor* inv_rms) {
  const Tensor y = step.alloc({a.size(0), a.size(1)});
  if (inv_rms != nullptr) *inv_rms = step.island({a.size(0)});
  kernels::launch(kernels::RmsNorm{.x = a, .w = w, .y = y, .inv_rms = inv_rms != nullptr ? *inv_rms : Tensor(), .eps = eps,
                                   .b = b, .sum = sum},
                  step.stream);
  return y;
}

Tensor rms_norm_backward(Step& step, const Tensor& x, const Tensor& w, const Tensor& inv_rms, const Tensor& dy,
                         const Tensor& dw) {
  const Tensor dx = step.alloc({x.size(0), x.size(1)});
  kernels::launch(kernels::RmsNormBackward{.x = x, .w = w, .inv_rms = inv_rms, .dy = dy, .dx = dx, .dw = dw},
                  step.stream);
  return dx;
}

Tensor add(Step& step, const Tensor& a, const Tensor& b) {
  const Tensor y = step.alloc({a.size(0), a.size(1)});
  kernels::launch(kernels::Add{.a = a, .b = b, .y = y}, step.stream);
  return y;
}

void add_into(Step& step, const Tensor& into, const Tensor& b) {
  kernels::launch(kernels::Add{.a = into, .b = b, .y = into}, step.stream);
}

void copy_into(Step& step, const Tensor& from, const Tensor& to) {
  kernels::launch(kernels::Copy{.from = from, .to = to}, step.stream);
}

}  // namespace slipstream::model
