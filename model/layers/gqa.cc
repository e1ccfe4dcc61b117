#include "model/layers/gqa.h"

#include <cmath>

#include "kernels/gqa/gqa.h"
#include "kernels/paged_rows/paged_rows.h"
#include "kernels/rope/rope.h"

namespace slipstream::model {

GqaAttention::GqaAttention(const GqaConfig& config, float norm_eps, parallel::Group& tp)
    : config_(config),
      norm_eps_(norm_eps),
      scale_(1.0f / std::sqrt(static_cast<float>(config.head_dim))),
      tp_(tp) {}

void GqaAttention::rotate(const Tensor& heads, bool inverse, Step& step) const {
  if (config_.rotary == 0) return;
  kernels::launch(kernels::Rope{.x = heads.slice(2, 0, config_.rotary), .cos = step.batch.cos, .sin = step.batch.sin,
                                .layout = kernels::RopeLayout::kHalfSplit, .inverse = inverse},
                  step.stream);
}

Tensor GqaAttention::forward(const Weights& w, const Tensor& x, const LayerCache& cache, Saved* saved,
                             Step& step) const {
  const int64_t tokens = x.size(0), d = config_.head_dim;
  Saved s;
  s.x = x;
  // [T, heads * d], normed per head when the model does that, then rotated.
  const auto project = [&](const Tensor& weight, const Tensor& bias, const Tensor& norm, int64_t heads, Tensor* raw,
                           Tensor* inv) {
    const Tensor projected = linear(step, x, weight, bias);
    Tensor out = projected;
    if (!norm.empty()) {
      *raw = projected;
      out = rms_norm(step, projected.view({tokens * heads, d}), norm, norm_eps_, inv).view({tokens, heads * d});
    }
    rotate(out.split_last(heads), /*inverse=*/false, step);
    return out;
  };
  s.q = project(w.q, w.q_bias, w.q_norm, config_.heads, &s.q_raw, &s.q_inv).split_last(config_.heads);
  const Tensor k = project(w.k, w.k_bias, w.k_norm, config_.kv_heads, &s.k_raw, &s.k_inv);
  const Tensor v = linear(step, x, w.v, w.v_bias);
  s.k = {cache.keys, step.batch.token_pages};
  s.v = {cache.values, step.batch.token_pages};
  kernels::launch(kernels::PagedWrite{.rows = k, .sequences = step.batch.sequences, .store = s.k}, step.stream);
  kernels::launch(kernels::PagedWrite{.rows = v, .sequences = step.batch.sequences, .store = s.v}, step.stream);
  s.o = step.alloc({tokens, config_.heads, d});
  if (saved != nullptr) s.lse = step.island({tokens, config_.heads});
  kernels::launch(kernels::Gqa{.q = s.q, .k = s.k, .v = s.v, .sequences = step.batch.sequences,
                               .kv_heads = config_.kv_heads, .scale = scale_, .o = s.o, .lse = s.lse},
                  step.stream);
  const Tensor y = linear(step, s.o.view({tokens, config_.heads * d}), w.o);
  tp_.all_reduce_sum(y, step.stream);
  if (saved != nullptr) *saved = s;
  return y;
}

Tensor GqaAttention::backward(const Weights& w, const Saved& s, const Tensor& dy, Weights& dw, Step& step) const {
  const int64_t tokens = dy.size(0), d = config_.head_dim, h = config_.heads, kv = config_.kv_heads;
  const Tensor dx = step.alloc({tokens, s.x.size(1)});
  const kernels::ArenaScope scope(step.arena);
  add_weight_grad(step, dy, s.o.view({tokens, h * d}), dw.o);
  const Tensor d_o = input_grad(step, dy, w.o).split_last(h);
  const Tensor dq = step.alloc({tokens, h, d});
  const Tensor dk = step.alloc({tokens, kv, d}), dv = step.alloc({tokens, kv, d});
  kernels::launch(kernels::GqaBackward{.q = s.q, .k = s.k, .v = s.v, .sequences = step.batch.sequences,
                                       .kv_heads = kv, .scale = scale_, .o = s.o, .lse = s.lse, .d_o = d_o, .dq = dq,
                                       .dk = dk, .dv = dv},
                  step.stream);
  // Back through the rotation and the norm of one projection; returns the gradient of its output.
  const auto unproject = [&](const Tensor& grad, int64_t heads, const Tensor& raw, const Tensor& norm,
                             const Tensor& inv, const Tensor& dnorm) {
    rotate(grad, /*inverse=*/true, step);
    const Tensor flat = grad.view({tokens, heads * d});
    if (norm.empty()) return flat;
    return rms_norm_backward(step, raw.view({tokens * heads, d}), norm, inv, grad.view({tokens * heads, d}), dnorm)
        .view({tokens, heads * d});
  };
  const Tensor dq_raw = unproject(dq, h, s.q_raw, w.q_norm, s.q_inv, dw.q_norm);
  const Tensor dk_raw = unproject(dk, kv, s.k_raw, w.k_norm, s.k_inv, dw.k_norm);
  const Tensor dv_raw = dv.view({tokens, kv * d});
  add_weight_grad(step, dq_raw, s.x, dw.q);
  add_weight_grad(step, dk_raw, s.x, dw.k);
  add_weight_grad(step, dv_raw, s.x, dw.v);
  add_bias_grad(step, dq_raw, dw.q_bias);
  add_bias_grad(step, dk_raw, dw.k_bias);
  add_bias_grad(step, dv_raw, dw.v_bias);
  input_grad_into(step, dq_raw, w.q, dx);
  add_input_grad(step, dk_raw, w.k, dx);
  add_input_grad(step, dv_raw, w.v, dx);
  tp_.all_reduce_sum(dx, step.stream);
  return dx;
}

}  // namespace slipstream::model
