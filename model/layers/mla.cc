#include "model/layers/mla.h"

#include <cmath>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/latent_rows/latent_rows.h"
#include "kernels/paged_rows/paged_rows.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/rope/rope.h"
#include "kernels/sparse_mla/sparse_mla.h"

namespace slipstream::model {

Mla::Mla(const MlaConfig& config, IndexerMode mode, parallel::Group& tp)
    : config_(config),
      mode_(mode),
      indexer_(config.indexer.value_or(IndexerConfig{}), config.rope),
      scale_(1.0f / std::sqrt(static_cast<float>(config.qk()))),
      tp_(tp) {}

void Mla::rotate(const Tensor& heads, bool inverse, Step& step) const {
  if (config_.rope == 0) return;
  kernels::launch(kernels::Rope{.x = heads, .cos = step.batch.cos, .sin = step.batch.sin,
                                .layout = config_.rope_layout, .inverse = inverse},
                  step.stream);
}

Tensor Mla::forward(const Weights& w, const Tensor& x, const LayerCache& cache, const Selection& selection,
                    bool replayed, Saved* saved, Step& step) const {
  const int64_t tokens = x.size(0), h = config_.heads, nope = config_.nope, rank = config_.kv_lora_rank;
  const int64_t width = config_.key_width();
  Saved s;
  s.x = x;
  s.q_resid = x;

  // Key rows [norm(c) ; rotated k_rope], built in place and then stored: the store may round them.
  const Tensor rows = step.alloc({tokens, width}), k_rope = rows.slice(1, rank, width);
  const auto bias_part = [&](int64_t begin, int64_t end) {
    return w.kv_a_bias.empty() ? Tensor() : w.kv_a_bias.slice(0, begin, end);
  };
  s.c_raw = step.alloc({tokens, rank});
  std::vector<Linear> of_x = {{.x = x, .w = w.kv_a.slice(0, 0, rank), .y = s.c_raw, .bias = bias_part(0, rank)}};
  if (config_.rope > 0) of_x.push_back({.x = x, .w = w.kv_a.slice(0, rank, width), .y = k_rope, .bias = bias_part(rank, width)});
  if (config_.q_lora_rank > 0) {
    s.q_a = step.alloc({tokens, config_.q_lora_rank});
    of_x.push_back({.x = x, .w = w.q_a, .y = s.q_a, .bias = w.q_a_bias});
  }
  linears_into(step, of_x);
  if (config_.q_lora_rank > 0) s.q_resid = rms_norm(step, s.q_a, w.q_a_norm, config_.latent_norm_eps, &s.q_a_inv);
  s.q = linear(step, s.q_resid, config_.q_lora_rank > 0 ? w.q_b : w.q_proj).split_last(h);
  s.c_inv = step.island({tokens});
  kernels::launch(kernels::RmsNorm{.x = s.c_raw, .w = w.kv_a_norm, .y = rows.slice(1, 0, rank), .inv_rms = s.c_inv,
                                   .eps = config_.latent_norm_eps},
                  step.stream);
  if (config_.rope > 0) rotate(k_rope.split_last(1), /*inverse=*/false, step);
  s.keys = {cache.keys, step.batch.token_pages};
  if (cache.keys.dtype() == kernels::DType::kF8E4M3) {
    kernels::launch(kernels::LatentWrite{.rows = rows, .rank = rank, .sequences = step.batch.sequences, .store = s.keys},
                    step.stream);
  } else {
    kernels::launch(kernels::PagedWrite{.rows = rows, .sequences = step.batch.sequences, .store = s.keys}, step.stream);
  }

  if (mode_ == IndexerMode::kFull && !replayed) {
    indexer_.forward(w.indexer, x, s.q_resid, cache, selection, step);
  }
  if (mode_ != IndexerMode::kNone) s.selection = selection;

  s.q_absorbed = step.alloc({tokens, h, width});
  kernels::launch(kernels::Gemm{.a = s.q.slice(2, 0, nope).transpose01(), .b = w_uk(w.kv_b),
                                .c = s.q_absorbed.slice(2, 0, rank).transpose01(), .bias = {}},
                  step.stream);
  if (config_.rope > 0) {
    const Tensor q_rope = s.q_absorbed.slice(2, rank, width);
    copy_into(step, s.q.slice(2, nope, config_.qk()), q_rope);
    rotate(q_rope, /*inverse=*/false, step);
  }
  s.o_latent = step.alloc({tokens, h, rank});
  if (saved != nullptr) s.lse = step.island({tokens, h});
  kernels::launch(kernels::SparseMla{.q = s.q_absorbed, .keys = s.keys, .sequences = step.batch.sequences,
                                     .indices = s.selection.indices, .counts = s.selection.counts, .scale = scale_,
                                     .o = s.o_latent, .lse = s.lse},
                  step.stream);
  s.o = step.alloc({tokens, h * config_.v});
  kernels::launch(kernels::Gemm{.a = s.o_latent.transpose01(), .b = w_uv(w.kv_b),
                                .c = s.o.split_last(h).transpose01(), .bias = {}, .transpose_b = true,
                                .b_panels = panels_of(step, w_uv(w.kv_b))},
                  step.stream);
  const Tensor y = linear(step, s.o, w.o, w.o_bias);
  tp_.all_reduce_sum(y, step.stream);
  if (saved != nullptr) *saved = s;
  return y;
}

Tensor Mla::backward(const Weights& w, const Saved& s, const Tensor& dy, Weights& dw, Step& step) const {
  const int64_t tokens = dy.size(0), h = config_.heads, nope = config_.nope, rank = config_.kv_lora_rank;
  const int64_t width = config_.key_width();
  const Tensor dx = step.alloc({tokens, s.x.size(1)});
  const kernels::ArenaScope scope(step.arena);
  add_weight_grad(step, dy, s.o, dw.o);
  add_bias_grad(step, dy, dw.o_bias);
  const Tensor d_o = input_grad(step, dy, w.o).split_last(h);
  const Tensor do_latent = step.alloc({tokens, h, rank});
  kernels::launch(kernels::Gemm{.a = d_o.transpose01(), .b = w_uv(w.kv_b), .c = do_latent.transpose01(), .bias = {}},
                  step.stream);
  if (!dw.kv_b.empty()) {
    kernels::launch(kernels::Gemm{.a = d_o.transpose01(), .b = s.o_latent.transpose01(), .c = w_uv(dw.kv_b),
                                  .bias = {}, .transpose_a = true, .accumulate = true},
                    step.stream);
  }
  const Tensor dq_absorbed = step.alloc({tokens, h, width});
  const Tensor dkeys = step.alloc({tokens, width});
  kernels::launch(
      kernels::SparseMlaBackward{.q = s.q_absorbed, .keys = s.keys, .sequences = step.batch.sequences,
                                 .indices = s.selection.indices, .counts = s.selection.counts, .scale = scale_,
                                 .o = s.o_latent, .lse = s.lse, .d_o = do_latent, .dq = dq_absorbed, .dkeys = dkeys},
      step.stream);

  // The query: out of the absorbed form, through the low-rank pair, to x.
  const Tensor dq = step.alloc({tokens, h, config_.qk()});
  const Tensor dq_latent = dq_absorbed.slice(2, 0, rank);
  kernels::launch(kernels::Gemm{.a = dq_latent.transpose01(), .b = w_uk(w.kv_b),
                                .c = dq.slice(2, 0, nope).transpose01(), .bias = {}, .transpose_b = true},
                  step.stream);
  if (!dw.kv_b.empty()) {
    kernels::launch(kernels::Gemm{.a = s.q.slice(2, 0, nope).transpose01(), .b = dq_latent.transpose01(),
                                  .c = w_uk(dw.kv_b), .bias = {}, .transpose_a = true, .accumulate = true},
                    step.stream);
  }
  if (config_.rope > 0) {
    const Tensor dq_rope = dq.slice(2, nope, config_.qk());
    copy_into(step, dq_absorbed.slice(2, rank, width), dq_rope);
    rotate(dq_rope, /*inverse=*/true, step);
  }
  const Tensor dq_flat = dq.view({tokens, h * config_.qk()});
  if (config_.q_lora_rank > 0) {
    add_weight_grad(step, dq_flat, s.q_resid, dw.q_b);
    const Tensor dq_resid = input_grad(step, dq_flat, w.q_b);
    const Tensor dq_a = rms_norm_backward(step, s.q_a, w.q_a_norm, s.q_a_inv, dq_resid, dw.q_a_norm);
    add_weight_grad(step, dq_a, s.x, dw.q_a);
    add_bias_grad(step, dq_a, dw.q_a_bias);
    input_grad_into(step, dq_a, w.q_a, dx);
  } else {
    add_weight_grad(step, dq_flat, s.x, dw.q_proj);
    input_grad_into(step, dq_flat, w.q_proj, dx);
  }

  // The key row: the latent through its norm, the rotary part back by its angle, both to x.
  const auto part = [](const Tensor& t, int64_t begin, int64_t end) {
    return t.empty() ? Tensor() : t.slice(0, begin, end);
  };
  const Tensor dc = rms_norm_backward(step, s.c_raw, w.kv_a_norm, s.c_inv, dkeys.slice(1, 0, rank), dw.kv_a_norm);
  add_weight_grad(step, dc, s.x, part(dw.kv_a, 0, rank));
  add_bias_grad(step, dc, part(dw.kv_a_bias, 0, rank));
  add_input_grad(step, dc, w.kv_a.slice(0, 0, rank), dx);
  if (config_.rope > 0) {
    const Tensor dk_rope = dkeys.slice(1, rank, width);
    rotate(dk_rope.split_last(1), /*inverse=*/true, step);
    add_weight_grad(step, dk_rope, s.x, part(dw.kv_a, rank, width));
    add_bias_grad(step, dk_rope, part(dw.kv_a_bias, rank, width));
    add_input_grad(step, dk_rope, w.kv_a.slice(0, rank, width), dx);
  }
  tp_.all_reduce_sum(dx, step.stream);
  return dx;
}

}  // namespace slipstream::model
