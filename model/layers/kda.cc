#include "model/layers/kda.h"

#include "kernels/gated_norm/gated_norm.h"
#include "kernels/kda/kda.h"
#include "kernels/kda_inputs/kda_inputs.h"
#include "kernels/short_conv/short_conv.h"

namespace slipstream::model {
namespace {

// Third i of [T, 3*h*d], as heads.
Tensor third(const Tensor& qkv, int64_t i, int64_t heads) {
  const int64_t width = qkv.size(1) / 3;
  return qkv.slice(1, i * width, (i + 1) * width).split_last(heads);
}

}  // namespace

Tensor KdaAttention::forward(const Weights& w, const Tensor& x, const LayerCache& cache, Saved* saved,
                             Step& step) const {
  const int64_t tokens = x.size(0), h = config_.heads, d = config_.head_dim, width = h * d;
  const PreparedBatch& batch = step.batch;
  Saved s;
  s.x = x;
  s.qkv = step.alloc({tokens, 3 * width});
  s.f_a = step.alloc({tokens, w.f_a.size(0)});
  s.g_a = step.alloc({tokens, w.g_a.size(0)});
  s.beta_logit = step.island({tokens, h});
  linears_into(step, {{.x = x, .w = w.q, .y = s.qkv.slice(1, 0, width)},
                      {.x = x, .w = w.k, .y = s.qkv.slice(1, width, 2 * width)},
                      {.x = x, .w = w.v, .y = s.qkv.slice(1, 2 * width, 3 * width)},
                      {.x = x, .w = w.f_a, .y = s.f_a},
                      {.x = x, .w = w.g_a, .y = s.g_a},
                      {.x = x, .w = w.b, .y = s.beta_logit}});
  s.mixed = step.alloc({tokens, 3 * width});
  kernels::launch(kernels::ShortConv{.x = s.qkv, .w = w.conv, .sequences = batch.sequences, .tail = cache.conv_tail,
                                     .slots = cache.conv_tail.empty() ? Tensor() : batch.slots, .y = s.mixed},
                  step.stream);
  s.decay_logit = step.island({tokens, h, d});
  s.gate = step.alloc({tokens * h, d});
  linears_into(step, {{.x = s.f_a, .w = w.f_b, .y = s.decay_logit.view({tokens, width})},
                      {.x = s.g_a, .w = w.g_b, .y = s.gate.view({tokens, width})}});
  s.q_hat = step.alloc({tokens, h, d});
  s.k_hat = step.alloc({tokens, h, d});
  s.log_decay = step.island({tokens, h, d});
  s.beta = step.island({tokens, h});
  kernels::launch(kernels::KdaInputs{.q = third(s.mixed, 0, h), .k = third(s.mixed, 1, h),
                                     .decay_logit = s.decay_logit, .beta_logit = s.beta_logit, .a_log = w.a_log,
                                     .dt_bias = w.dt_bias.view({h, d}), .lower_bound = config_.lower_bound,
                                     .q_hat = s.q_hat, .k_hat = s.k_hat, .log_decay = s.log_decay, .beta = s.beta},
                  step.stream);
  const Tensor o = step.alloc({tokens, h, d});
  if (saved != nullptr) {
    s.span_states = step.island({kernels::kda_spans(batch.sequences), h, d, d});
    s.r = step.island({tokens, h, d});
  }
  kernels::launch(kernels::Kda{.q = s.q_hat, .k = s.k_hat, .v = third(s.mixed, 2, h), .log_decay = s.log_decay,
                               .beta = s.beta, .sequences = batch.sequences, .cache = cache.kda,
                               .slots = cache.kda.state.empty() ? Tensor() : batch.slots, .o = o,
                               .span_states = s.span_states, .r = s.r},
                  step.stream);
  s.o = o.view({tokens * h, d});
  s.gated = step.alloc({tokens, width});
  if (saved != nullptr) s.o_inv = step.island({tokens * h});
  kernels::launch(kernels::GatedNorm{.x = s.o, .w = w.o_norm, .gate = s.gate, .y = s.gated.view({tokens * h, d}),
                                     .inv_rms = s.o_inv, .eps = norm_eps_},
                  step.stream);
  const Tensor y = linear(step, s.gated, w.o);
  tp_.all_reduce_sum(y, step.stream);
  if (saved != nullptr) *saved = s;
  return y;
}

Tensor KdaAttention::backward(const Weights& w, const Saved& s, const Tensor& dy, Weights& dw, Step& step) const {
  const int64_t tokens = dy.size(0), h = config_.heads, d = config_.head_dim, width = h * d;
  const PreparedBatch& batch = step.batch;
  const Tensor dx = step.alloc({tokens, s.x.size(1)});
  const kernels::ArenaScope scope(step.arena);
  add_weight_grad(step, dy, s.gated, dw.o);
  const Tensor dgated = input_grad(step, dy, w.o).view({tokens * h, d});
  const Tensor d_o = step.alloc({tokens * h, d}), dgate = step.alloc({tokens * h, d});
  kernels::launch(kernels::GatedNormBackward{.x = s.o, .gate = s.gate, .w = w.o_norm, .inv_rms = s.o_inv,
                                             .dy = dgated, .dx = d_o, .dgate = dgate, .dw = dw.o_norm},
                  step.stream);
  const Tensor dgate_rows = dgate.view({tokens, width});
  add_weight_grad(step, dgate_rows, s.g_a, dw.g_b);
  const Tensor dg_a = input_grad(step, dgate_rows, w.g_b);
  add_weight_grad(step, dg_a, s.x, dw.g_a);
  input_grad_into(step, dg_a, w.g_a, dx);

  const Tensor dmixed = step.alloc({tokens, 3 * width});
  const Tensor dq_hat = step.alloc({tokens, h, d}), dk_hat = step.alloc({tokens, h, d});
  const Tensor dlog_decay = step.island({tokens, h, d}), dbeta = step.island({tokens, h});
  kernels::launch(
      kernels::KdaBackward{.q = s.q_hat, .k = s.k_hat, .log_decay = s.log_decay, .beta = s.beta,
                           .sequences = batch.sequences, .span_states = s.span_states, .r = s.r,
                           .d_o = d_o.view({tokens, h, d}), .dq = dq_hat, .dk = dk_hat,
                           .dlog_decay = dlog_decay, .dv = third(dmixed, 2, h), .dbeta = dbeta},
      step.stream);
  const Tensor ddecay_logit = step.island({tokens, h, d}), dbeta_logit = step.island({tokens, h});
  kernels::launch(
      kernels::KdaInputsBackward{.q = third(s.mixed, 0, h), .k = third(s.mixed, 1, h), .decay_logit = s.decay_logit,
                                 .beta_logit = s.beta_logit, .a_log = w.a_log, .dt_bias = w.dt_bias.view({h, d}),
                                 .lower_bound = config_.lower_bound, .dq_hat = dq_hat, .dk_hat = dk_hat,
                                 .dlog_decay = dlog_decay, .dbeta = dbeta, .dq = third(dmixed, 0, h),
                                 .dk = third(dmixed, 1, h), .ddecay_logit = ddecay_logit, .dbeta_logit = dbeta_logit,
                                 .da_log = dw.a_log, .ddt_bias = dw.dt_bias.view({h, d})},
      step.stream);
  add_weight_grad(step, dbeta_logit, s.x, dw.b);
  add_input_grad(step, dbeta_logit, w.b, dx);
  const Tensor ddecay = ddecay_logit.view({tokens, width});
  add_weight_grad(step, ddecay, s.f_a, dw.f_b);
  const Tensor df_a = input_grad(step, ddecay, w.f_b);
  add_weight_grad(step, df_a, s.x, dw.f_a);
  add_input_grad(step, df_a, w.f_a, dx);

  const Tensor dqkv = step.alloc({tokens, 3 * width});
  kernels::launch(kernels::ShortConvBackward{.x = s.qkv, .w = w.conv, .sequences = batch.sequences, .dy = dmixed,
                                             .dx = dqkv, .dw = dw.conv},
                  step.stream);
  const auto project = [&](int64_t i, const Tensor& weight, const Tensor& dweight) {
    const Tensor part = dqkv.slice(1, i * width, (i + 1) * width);
    add_weight_grad(step, part, s.x, dweight);
    add_input_grad(step, part, weight, dx);
  };
  project(0, w.q, dw.q);
  project(1, w.k, dw.k);
  project(2, w.v, dw.v);
  tp_.all_reduce_sum(dx, step.stream);
  return dx;
}

}  // namespace slipstream::model
