#include "model/layers/gated_mlp.h"

#include "kernels/swiglu/swiglu.h"

namespace slipstream::model {

Tensor GatedMlp::forward(const Weights& w, const Tensor& x, Saved* saved, Step& step) const {
  const Tensor gate = step.alloc({x.size(0), w.gate.size(0)}), up = step.alloc({x.size(0), w.up.size(0)});
  linears_into(step, {{.x = x, .w = w.gate, .y = gate}, {.x = x, .w = w.up, .y = up}});
  // In place when nothing is kept.
  const Tensor h = saved != nullptr ? step.alloc({gate.size(0), gate.size(1)}) : up;
  kernels::launch(kernels::SwiGlu{.gate = gate, .up = up, .y = h, .limit = limit_}, step.stream);
  const Tensor y = linear(step, h, w.down);
  tp_.all_reduce_sum(y, step.stream);
  if (saved != nullptr) *saved = {.x = x, .gate = gate, .up = up};
  return y;
}

Tensor GatedMlp::backward(const Weights& w, const Saved& saved, const Tensor& dy, Weights& dw, Step& step) const {
  const Tensor dx = step.alloc({saved.x.size(0), saved.x.size(1)});
  const kernels::ArenaScope scope(step.arena);  // everything below is given back
  const Tensor h = step.alloc({saved.gate.size(0), saved.gate.size(1)});  // recomputed: cheaper than kept
  kernels::launch(kernels::SwiGlu{.gate = saved.gate, .up = saved.up, .y = h, .limit = limit_}, step.stream);
  add_weight_grad(step, dy, h, dw.down);
  const Tensor dh = input_grad(step, dy, w.down);
  const Tensor dgate = step.alloc({h.size(0), h.size(1)}), dup = step.alloc({h.size(0), h.size(1)});
  kernels::launch(kernels::SwiGluBackward{.gate = saved.gate, .up = saved.up, .dy = dh, .dgate = dgate, .dup = dup,
                                          .limit = limit_},
                  step.stream);
  add_weight_grad(step, dgate, saved.x, dw.gate);
  add_weight_grad(step, dup, saved.x, dw.up);
  input_grad_into(step, dgate, w.gate, dx);
  add_input_grad(step, dup, w.up, dx);
  tp_.all_reduce_sum(dx, step.stream);
  return dx;
}

}  // namespace slipstream::model
