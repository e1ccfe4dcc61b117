#include "model/layers/decoder_layer.h"

#include "kernels/add/add.h"
#include "kernels/mhc/mhc.h"
#include "kernels/range.h"

namespace slipstream::model {

DecoderLayer::DecoderLayer(const ModelConfig& config, const LayerConfig& layer, parallel::Groups groups)
    : layer_(layer), hidden_(config.hidden), norm_eps_(config.norm_eps), hyper_(config.hyper) {
  parallel::Group& tp = *groups.tensor;
  switch (layer.attention) {
    case AttentionKind::kMla: mla_.emplace(*config.mla, layer.indexer, tp); break;
    case AttentionKind::kGqa: gqa_.emplace(*config.gqa, config.norm_eps, tp); break;
    case AttentionKind::kKda: kda_.emplace(*config.kda, config.norm_eps, tp); break;
  }
  if (layer.moe) {
    moe_.emplace(*config.moe, config.swiglu_limit, tp);
  } else {
    dense_.emplace(config.swiglu_limit, tp);
  }
}

// From the state to a sublayer's input: the mix of the streams (or the state itself), then the norm.
Tensor DecoderLayer::enter(const HyperWeights& hyper, const Tensor& norm, const Tensor& state, SublayerSaved& s,
                           bool keep, Step& step) const {
  const int64_t tokens = state.size(0);
  s.streams = state;
  s.u = state;
  if (hyper_) {
    const int64_t n = hyper_->streams;
    s.zr = linear_island(step, state, hyper.fn);
    s.inv_rms = step.island({tokens});
    s.post = step.island({tokens, n});
    s.comb = step.island({tokens, n, n});
    s.u = step.alloc({tokens, hidden_});
    const Tensor y = step.alloc({tokens, hidden_});
    if (keep) s.u_inv = step.island({tokens});
    kernels::launch(kernels::MhcMix{.x = state.view({tokens, n, hidden_}), .zr = s.zr, .base = hyper.base,
                                    .scale = hyper.scale, .norm_eps = norm_eps_, .eps = hyper_->eps,
                                    .iterations = hyper_->iterations, .inv_rms = s.inv_rms, .post = s.post,
                                    .comb = s.comb, .u = s.u, .w = norm, .y = y, .u_inv = keep ? s.u_inv : Tensor()},
                    step.stream);
    return y;
  }
  return rms_norm(step, s.u, norm, norm_eps_, keep ? &s.u_inv : nullptr);
}

// out = state + y, or its mHC form.
void DecoderLayer::leave(const SublayerSaved& s, const Tensor& y, const Tensor& out, Step& step) const {
  if (!hyper_) {
    kernels::launch(kernels::Add{.a = s.streams, .b = y, .y = out}, step.stream);
    return;
  }
  const int64_t tokens = y.size(0), n = hyper_->streams;
  kernels::launch(kernels::MhcMerge{.x = s.streams.view({tokens, n, hidden_}), .y = y, .post = s.post, .comb = s.comb,
                                    .out = out.view({tokens, n, hidden_})},
                  step.stream);
}

Tensor DecoderLayer::pass(const SublayerSaved& from, const Tensor& y, const Tensor& between, const HyperWeights& hyper,
                          const Tensor& norm, SublayerSaved& to, bool keep, Step& step) const {
  if (hyper_) {
    leave(from, y, between, step);
    return enter(hyper, norm, between, to, keep, step);
  }
  to.streams = to.u = between;
  return rms_norm_of_sum(step, from.streams, y, between, norm, norm_eps_, keep ? &to.u_inv : nullptr);
}

// The gradient of y; dstate receives the share of the residual path.
Tensor DecoderLayer::leave_backward(const SublayerSaved& s, const Tensor& dout, const Tensor& dstate, Tensor* dpost,
                                    Tensor* dcomb, Step& step) const {
  const int64_t tokens = dout.size(0);
  if (!hyper_) {
    if (dstate.raw() != dout.raw()) copy_into(step, dout.split_last(1), dstate.split_last(1));
    return dout;
  }
  const int64_t n = hyper_->streams;
  const Tensor dy = step.alloc({tokens, hidden_});
  *dpost = step.island({tokens, n});
  *dcomb = step.island({tokens, n, n});
  kernels::launch(kernels::MhcMergeBackward{.x = s.streams.view({tokens, n, hidden_}), .y = s.y, .post = s.post,
                                            .comb = s.comb, .dout = dout.view({tokens, n, hidden_}),
                                            .dx = dstate.view({tokens, n, hidden_}), .dy = dy, .dpost = *dpost,
                                            .dcomb = *dcomb},
                  step.stream);
  return dy;
}

// dstate += the share of the sublayer's input, whose gradient is dh.
void DecoderLayer::enter_backward(const HyperWeights& hyper, const Tensor& norm, const SublayerSaved& s,
                                  const Tensor& dh, const Tensor& dpost, const Tensor& dcomb, const Tensor& dstate,
                                  HyperWeights& dhyper, const Tensor& dnorm, Step& step) const {
  const Tensor du = rms_norm_backward(step, s.u, norm, s.u_inv, dh, dnorm);
  if (!hyper_) {
    add_into(step, dstate, du);
    return;
  }
  const int64_t tokens = dh.size(0), n = hyper_->streams;
  const Tensor dzr = step.island({tokens, hyper_->mixes()});
  kernels::launch(kernels::MhcMixBackward{.x = s.streams.view({tokens, n, hidden_}), .zr = s.zr, .base = hyper.base,
                                          .scale = hyper.scale, .eps = hyper_->eps,
                                          .iterations = hyper_->iterations, .inv_rms = s.inv_rms, .du = du,
                                          .dpost = dpost, .dcomb = dcomb, .dx = dstate.view({tokens, n, hidden_}),
                                          .dzr = dzr, .dbase = dhyper.base, .dscale = dhyper.scale},
                  step.stream);
  add_weight_grad(step, dzr, s.streams, dhyper.fn);
  add_input_grad(step, dzr, hyper.fn, dstate);
}

void DecoderLayer::forward(const LayerWeights& w, const Tensor& state, const Tensor& out, const LayerCache& cache,
                           const Selection& selection, const LayerReplay& replay, const Tensor& chosen_experts,
                           Saved* saved, Step& step) const {
  const bool keep = saved != nullptr;
  Saved unkept;
  Saved& s = keep ? *saved : unkept;
  const Tensor middle = step.alloc({state.size(0), state.size(1)});
  {
    const kernels::Range range(mla_ ? "mla" : gqa_ ? "gqa" : "kda");
    const Tensor x = enter(w.attn_hyper, w.input_norm, state, s.attention, keep, step);
    if (mla_) {
      const bool replayed = runs_indexer() && !replay.selection.empty();
      s.attention.y = mla_->forward(w.mla, x, cache, selection, replayed, keep ? &s.mla : nullptr, step);
    }
    if (gqa_) s.attention.y = gqa_->forward(w.gqa, x, cache, keep ? &s.gqa : nullptr, step);
    if (kda_) s.attention.y = kda_->forward(w.kda, x, cache, keep ? &s.kda : nullptr, step);
  }
  const kernels::Range range(moe_ ? "moe" : "mlp");
  const Tensor x = pass(s.attention, s.attention.y, middle, w.mlp_hyper, w.post_norm, s.mlp, keep, step);
  s.mlp.y = moe_ ? moe_->forward(w.moe, x, replay.experts, chosen_experts, keep ? &s.moe : nullptr, step)
                 : dense_->forward(w.mlp, x, keep ? &s.dense : nullptr, step);
  leave(s.mlp, s.mlp.y, out, step);
}

void DecoderLayer::backward(const LayerWeights& w, const Saved& s, const Tensor& dout, const Tensor& dstate,
                            LayerWeights& dw, Step& step) const {
  Tensor dpost, dcomb;
  {
    const kernels::Range range(moe_ ? "moe backward" : "mlp backward");
    const Tensor dy = leave_backward(s.mlp, dout, dstate, &dpost, &dcomb, step);
    const Tensor dh =
        moe_ ? moe_->backward(w.moe, s.moe, dy, dw.moe, step) : dense_->backward(w.mlp, s.dense, dy, dw.mlp, step);
    enter_backward(w.mlp_hyper, w.post_norm, s.mlp, dh, dpost, dcomb, dstate, dw.mlp_hyper, dw.post_norm, step);
  }
  const kernels::Range range(mla_ ? "mla backward" : gqa_ ? "gqa backward" : "kda backward");
  const Tensor dy = leave_backward(s.attention, dstate, dstate, &dpost, &dcomb, step);
  Tensor dh;
  if (mla_) dh = mla_->backward(w.mla, s.mla, dy, dw.mla, step);
  if (gqa_) dh = gqa_->backward(w.gqa, s.gqa, dy, dw.gqa, step);
  if (kda_) dh = kda_->backward(w.kda, s.kda, dy, dw.kda, step);
  enter_backward(w.attn_hyper, w.input_norm, s.attention, dh, dpost, dcomb, dstate, dw.attn_hyper, dw.input_norm, step);
}

}  // namespace slipstream::model
