#include "kernels/rmsnorm/rmsnorm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rmsnorm/rmsnorm_simd.cc"
#include "hwy/foreach_target.h"

#include "kernels/simd/lanes-inl.h"

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

// dw for columns [begin, end): each thread owns columns and walks the tokens in order, so no sum is ever shared.
void rmsnorm_weight_grad(const RmsNormBackward& args, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    const float* x = args.x.row(t) + begin;
    const float* dy = args.dy.row(t) + begin;
    float* dw = args.dw.f32() + begin;
    const Lanes inv_rms = broadcast(args.inv_rms.f32()[t]);
    for_lanes(end - begin, [&](int64_t i, auto chunk) HWY_ATTR {
      chunk.store(fma(chunk.load(dy + i), mul(chunk.load(x + i), inv_rms), chunk.load(dw + i)), dw + i);
    });
  }
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
constexpr int64_t kGrainValues = 16384;  // about 5 us of work: below that, waking a thread costs more
}

void launch(const RmsNorm& args, Stream& stream) {
  CHECK_OK(validate(args));
  const int64_t grain = kGrainValues / (args.x.size(1) + 1) + 1;
  stream.parallel_for(args.x.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(rmsnorm_rows)(args, begin, end);
  });
}

void launch(const RmsNormBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  // dw first: dx may overwrite dy.
  if (!args.dw.empty()) {
    stream.parallel_for(args.x.size(1), 256, [&](int64_t begin, int64_t end, Worker&) {
      HWY_DYNAMIC_DISPATCH(rmsnorm_weight_grad)(args, begin, end);
    });
  }
  const int64_t grain = kGrainValues / (args.x.size(1) + 1) + 1;
  stream.parallel_for(args.x.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(rmsnorm_backward_rows)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
