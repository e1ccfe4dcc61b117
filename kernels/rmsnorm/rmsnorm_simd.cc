#include "kernels/rmsnorm/rmsnorm.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rmsnorm/rmsnorm_simd.cc"
#include "hwy/foreach_target.h"

#include "kernels/simd/column_sums-inl.h"

#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

void rmsnorm_rows(const RmsNorm& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.x.size(1);
  const float* w = args.w.empty() ? nullptr : args.w.f32();
  for (int64_t t = begin; t < end; ++t) {
    const float* x = args.x.row(t);
    float* y = args.y.row(t);
    if (!args.b.empty()) {
      const float* const b = args.b.row(t);
      float* const sum = args.sum.row(t);
      for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR { chunk.store(add(chunk.load(x + i), chunk.load(b + i)), sum + i); });
      x = sum;
    }
    Lanes squares = zero_lanes();
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes v = chunk.load(x + i);
      squares = fma(v, v, squares);
    });
    const float inv_rms = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(hidden) + args.eps);
    const Lanes scale = broadcast(inv_rms);
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes normed = mul(chunk.load(x + i), scale);
      chunk.store(w == nullptr ? normed : mul(chunk.load(w + i), normed), y + i);
    });
    if (!args.inv_rms.empty()) args.inv_rms.f32()[t] = inv_rms;
  }
}

void rmsnorm_backward_rows(const RmsNormBackward& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.x.size(1);
  const float* w = args.w.empty() ? nullptr : args.w.f32();
  for (int64_t t = begin; t < end; ++t) {
    const float* x = args.x.row(t);
    const float* dy = args.dy.row(t);
    float* dx = args.dx.row(t);
    const Lanes inv_rms = broadcast(args.inv_rms.f32()[t]);
    Lanes dot = zero_lanes();
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes slope = w == nullptr ? chunk.load(dy + i) : mul(chunk.load(w + i), chunk.load(dy + i));
      dot = fma(slope, mul(chunk.load(x + i), inv_rms), dot);
    });
    const Lanes mean = broadcast(sum_lanes(dot) / static_cast<float>(hidden));
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes slope = w == nullptr ? chunk.load(dy + i) : mul(chunk.load(w + i), chunk.load(dy + i));
      const Lanes normed = mul(chunk.load(x + i), inv_rms);
      chunk.store(mul(inv_rms, fnma(normed, mean, slope)), dx + i);
    });
  }
}

// dw for columns [begin, end).
void rmsnorm_weight_grad(const RmsNormBackward& args, int64_t begin, int64_t end) {
  add_column_sums(args.x.size(0), begin, end, args.dw.f32(),
                  [&](const Lanes& sum, int64_t t, int64_t i, auto chunk) HWY_ATTR {
                    const Lanes inv_rms = broadcast(args.inv_rms.f32()[t]);
                    const Lanes normed = mul(chunk.load(args.x.row(t) + i), inv_rms);
                    return fma(chunk.load(args.dy.row(t) + i), normed, sum);
                  });
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(rmsnorm_rows);
HWY_EXPORT(rmsnorm_backward_rows);
HWY_EXPORT(rmsnorm_weight_grad);

namespace {
constexpr int64_t kGradColumns = 64;  // what one pass over the tokens sums side by side
}

void launch(const RmsNorm& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.x.size(1));
  stream.parallel_for(args.x.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(rmsnorm_rows)(args, begin, end);
  });
}

void launch(const RmsNormBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  // dw first: dx may overwrite dy.
  if (!args.dw.empty()) {
    stream.parallel_for(args.x.size(1), kGradColumns, [&](int64_t begin, int64_t end, Worker&) {
      HWY_DYNAMIC_DISPATCH(rmsnorm_weight_grad)(args, begin, end);
    });
  }
  const int64_t grain = task_rows(args.x.size(1));
  stream.parallel_for(args.x.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(rmsnorm_backward_rows)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
