#include "kernels/swiglu/swiglu.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/swiglu/swiglu_simd.cc"
#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// The limit stands first in min and max: x86 returns the second operand when one is NaN, so NaN passes.
HWY_INLINE Lanes clamp_above(const Lanes& x, const Lanes& limit) { return min(limit, x); }
HWY_INLINE Lanes clamp_both(const Lanes& x, const Lanes& limit) {
  return max(sub(zero_lanes(), limit), min(limit, x));
}

// grad where |x| (or x) is not beyond the limit, 0 elsewhere.
HWY_INLINE Lanes where_not_above(const Lanes& x, const Lanes& limit, const Lanes& grad) {
  return map([&](int64_t i)
                 HWY_ATTR { return hn::IfThenZeroElse(hn::Gt(x.part[i], limit.part[i]), grad.part[i]); });
}
HWY_INLINE Lanes where_within(const Lanes& x, const Lanes& limit, const Lanes& grad) {
  return map([&](int64_t i) HWY_ATTR {
    return hn::IfThenZeroElse(hn::Gt(hn::Abs(x.part[i]), limit.part[i]), grad.part[i]);
  });
}

void swiglu_rows(const SwiGlu& args, int64_t begin, int64_t end) {
  const int64_t width = args.gate.size(1);
  const Lanes limit = broadcast(args.limit);
  for (int64_t t = begin; t < end; ++t) {
    const float* gate = args.gate.row(t);
    const float* up = args.up.row(t);
    float* y = args.y.row(t);
    for_lanes(width, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes g = clamp_above(chunk.load(gate + i), limit);
      const Lanes u = clamp_both(chunk.load(up + i), limit);
      chunk.store(mul(mul(g, sigmoid(g)), u), y + i);
    });
  }
}

void swiglu_backward_rows(const SwiGluBackward& args, int64_t begin, int64_t end) {
  const int64_t width = args.gate.size(1);
  const Lanes limit = broadcast(args.limit), one = broadcast(1.0f);
  for (int64_t t = begin; t < end; ++t) {
    const float* gate = args.gate.row(t);
    const float* up = args.up.row(t);
    const float* dy = args.dy.row(t);
    float* dgate = args.dgate.row(t);
    float* dup = args.dup.row(t);
    for_lanes(width, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes raw_gate = chunk.load(gate + i), raw_up = chunk.load(up + i), grad = chunk.load(dy + i);
      const Lanes g = clamp_above(raw_gate, limit);
      const Lanes u = clamp_both(raw_up, limit);
      const Lanes s = sigmoid(g);
      const Lanes slope = mul(s, fma(g, sub(one, s), one));
      chunk.store(where_not_above(raw_gate, limit, mul(mul(grad, u), slope)), dgate + i);
      chunk.store(where_within(raw_up, limit, mul(grad, mul(g, s))), dup + i);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(swiglu_rows);
HWY_EXPORT(swiglu_backward_rows);

void launch(const SwiGlu& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.gate.size(1));
  stream.parallel_for(args.gate.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(swiglu_rows)(args, begin, end);
  });
}

void launch(const SwiGluBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.gate.size(1));
  stream.parallel_for(args.gate.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(swiglu_backward_rows)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
