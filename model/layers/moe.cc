#include "model/layers/moe.h"

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/moe_dispatch/moe_dispatch.h"
#include "kernels/router/router.h"
#include "kernels/swiglu/swiglu.h"

namespace slipstream::model {
namespace {

// drows [R, N] times each expert's w [E, N, K].
Tensor grouped_input_grad(Step& step, const Tensor& drows, const Tensor& w, const Tensor& row_begin) {
  const Tensor dx = step.alloc({drows.size(0), w.size(2)});
  kernels::launch(kernels::GroupedGemm{.x = drows, .w = w, .row_begin = row_begin, .y = dx, .transpose_w = false},
                  step.stream);
  return dx;
}

void add_grouped_weight_grad(Step& step, const Tensor& drows, const Tensor& rows, const Tensor& row_begin,
                             const Tensor& dw) {
  if (dw.empty()) return;
  kernels::launch(kernels::GroupedWeightGrad{.dy = drows, .x = rows, .row_begin = row_begin, .dw = dw}, step.stream);
}

Tensor gather(Step& step, const Tensor& x, const Tensor& row_token) {
  const Tensor rows = step.alloc({row_token.size(0), x.size(1)});
  kernels::launch(kernels::MoeGather{.x = x, .row_token = row_token, .rows = rows}, step.stream);
  return rows;
}

}  // namespace

Tensor Moe::forward(const Weights& w, const Tensor& x, const Tensor& replayed, const Tensor& chosen, Saved* saved,
                    Step& step) const {
  const int64_t tokens = x.size(0), k = config_.per_token;
  Saved s;
  s.x = x;
  s.logits = linear_island(step, x, w.router);
  s.experts = !replayed.empty() ? replayed : !chosen.empty() ? chosen : step.ints({tokens, k});
  s.weights = step.island({tokens, k});
  kernels::launch(kernels::Router{.logits = s.logits, .bias = w.router_bias, .experts = s.experts, .weights = s.weights,
                                  .groups = config_.groups, .groups_kept = config_.groups_kept,
                                  .normalize = config_.normalize, .scale = config_.scale,
                                  .replayed = !replayed.empty()},
                  step.stream);
  s.row_begin = step.ints({config_.experts + 1});
  s.slot_row = step.ints({tokens, k});
  s.row_token = step.ints({tokens * k});
  kernels::launch(kernels::MoePlan{.experts = s.experts, .row_begin = s.row_begin, .slot_row = s.slot_row,
                                   .row_token = s.row_token},
                  step.stream);
  const Tensor rows = gather(step, x, s.row_token);
  s.gate = step.alloc({rows.size(0), w.gate.size(1)});
  s.up = step.alloc({rows.size(0), w.up.size(1)});
  linears_into(step, {{.x = rows, .w = w.gate, .y = s.gate, .row_begin = s.row_begin},
                      {.x = rows, .w = w.up, .y = s.up, .row_begin = s.row_begin}});
  const Tensor h = saved != nullptr ? step.alloc({s.gate.size(0), s.gate.size(1)}) : s.up;
  kernels::launch(kernels::SwiGlu{.gate = s.gate, .up = s.up, .y = h, .limit = limit_}, step.stream);
  s.rows = step.alloc({h.size(0), w.down.size(1)});
  linears_into(step, {{.x = h, .w = w.down, .y = s.rows, .row_begin = s.row_begin}});
  const Tensor y = config_.shared > 0 ? shared_.forward(w.shared, x, saved != nullptr ? &s.shared : nullptr, step)
                                      : step.arena.zeros(step.dtype, {tokens, x.size(1)}, step.stream);
  kernels::launch(kernels::MoeCombine{.rows = s.rows, .weights = s.weights, .slot_row = s.slot_row, .y = y},
                  step.stream);
  if (saved != nullptr) *saved = s;
  return y;
}

Tensor Moe::backward(const Weights& w, const Saved& s, const Tensor& dy, Weights& dw, Step& step) const {
  const int64_t tokens = dy.size(0);
  const Tensor dx = config_.shared > 0
                        ? shared_.backward(w.shared, s.shared, dy, dw.shared, step)
                        : step.arena.zeros(step.dtype, {tokens, dy.size(1)}, step.stream);
  const kernels::ArenaScope scope(step.arena);
  const Tensor drows = step.alloc({s.rows.size(0), s.rows.size(1)});
  const Tensor dweights = step.island({tokens, config_.per_token});
  kernels::launch(kernels::MoeCombineBackward{.rows = s.rows, .weights = s.weights, .slot_row = s.slot_row, .dy = dy,
                                              .drows = drows, .dweights = dweights},
                  step.stream);
  const Tensor h = step.alloc({s.gate.size(0), s.gate.size(1)});
  kernels::launch(kernels::SwiGlu{.gate = s.gate, .up = s.up, .y = h, .limit = limit_}, step.stream);
  add_grouped_weight_grad(step, drows, h, s.row_begin, dw.down);
  const Tensor dh = grouped_input_grad(step, drows, w.down, s.row_begin);
  const Tensor dgate = step.alloc({h.size(0), h.size(1)}), dup = step.alloc({h.size(0), h.size(1)});
  kernels::launch(kernels::SwiGluBackward{.gate = s.gate, .up = s.up, .dy = dh, .dgate = dgate, .dup = dup,
                                          .limit = limit_},
                  step.stream);
  const Tensor rows = gather(step, s.x, s.row_token);
  add_grouped_weight_grad(step, dgate, rows, s.row_begin, dw.gate);
  add_grouped_weight_grad(step, dup, rows, s.row_begin, dw.up);
  const Tensor drows_in = grouped_input_grad(step, dgate, w.gate, s.row_begin);
  add_into(step, drows_in, grouped_input_grad(step, dup, w.up, s.row_begin));
  kernels::launch(kernels::MoeGatherBackward{.drows = drows_in, .slot_row = s.slot_row, .dx = dx}, step.stream);

  const Tensor dlogits = step.island({tokens, config_.experts});
  kernels::launch(kernels::RouterBackward{.logits = s.logits, .experts = s.experts, .dweights = dweights,
                                          .dlogits = dlogits, .normalize = config_.normalize, .scale = config_.scale},
                  step.stream);
  add_weight_grad(step, dlogits, s.x, dw.router);
  add_input_grad(step, dlogits, w.router, dx);
  return dx;
}

}  // namespace slipstream::model
