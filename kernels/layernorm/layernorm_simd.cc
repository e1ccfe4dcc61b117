#include "kernels/layernorm/layernorm.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layernorm/layernorm_simd.cc"
#include <cmath>

#include "hwy/foreach_target.h"
#include "kernels/simd/column_sums-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

void layernorm_rows(const LayerNorm& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.x.size(1);
  const float* w = args.w.f32();
  const float* b = args.b.f32();
  for (int64_t t = begin; t < end; ++t) {
    const float* x = args.x.row(t);
    float* y = args.y.row(t);
    Lanes sum = zero_lanes();
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR { sum = add(sum, chunk.load(x + i)); });
    const float mean = sum_lanes(sum) / static_cast<float>(hidden);
    // The squares of differences, not the difference of squares: a large mean would cancel the variance away.
    const Lanes center = broadcast(mean);
    Lanes squares = zero_lanes();
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes d = sub(chunk.load(x + i, mean), center);
      squares = fma(d, d, squares);
    });
    const float inv_std = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(hidden) + args.eps);
    const Lanes scale = broadcast(inv_std);
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes normed = mul(sub(chunk.load(x + i), center), scale);
      chunk.store(fma(chunk.load(w + i), normed, chunk.load(b + i)), y + i);
    });
    if (!args.mean.empty()) {
      args.mean.f32()[t] = mean;
      args.inv_std.f32()[t] = inv_std;
    }
  }
}

void layernorm_backward_rows(const LayerNormBackward& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.x.size(1);
  const float* w = args.w.f32();
  for (int64_t t = begin; t < end; ++t) {
    const float* x = args.x.row(t);
    const float* dy = args.dy.row(t);
    float* dx = args.dx.row(t);
    const Lanes center = broadcast(args.mean.f32()[t]), scale = broadcast(args.inv_std.f32()[t]);
    Lanes slope_sum = zero_lanes(), dot = zero_lanes();
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes slope = mul(chunk.load(w + i), chunk.load(dy + i));  // 0 beyond the row's end
      slope_sum = add(slope_sum, slope);
      dot = fma(slope, mul(sub(chunk.load(x + i), center), scale), dot);
    });
    const Lanes slope_mean = broadcast(sum_lanes(slope_sum) / static_cast<float>(hidden));
    const Lanes dot_mean = broadcast(sum_lanes(dot) / static_cast<float>(hidden));
    for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes slope = mul(chunk.load(w + i), chunk.load(dy + i));
      const Lanes normed = mul(sub(chunk.load(x + i), center), scale);
      chunk.store(mul(scale, fnma(normed, dot_mean, sub(slope, slope_mean))), dx + i);
    });
  }
}

// dw and db for columns [begin, end).
void layernorm_weight_grad(const LayerNormBackward& args, int64_t begin, int64_t end) {
  const int64_t tokens = args.x.size(0);
  add_column_sums(tokens, begin, end, args.dw.f32(),
                  [&](const Lanes& sum, int64_t t, int64_t i, auto chunk) HWY_ATTR {
                    const Lanes center = broadcast(args.mean.f32()[t]), scale = broadcast(args.inv_std.f32()[t]);
                    const Lanes normed = mul(sub(chunk.load(args.x.row(t) + i), center), scale);
                    return fma(chunk.load(args.dy.row(t) + i), normed, sum);
                  });
  add_column_sums(tokens, begin, end, args.db.f32(),
                  [&](const Lanes& sum, int64_t t, int64_t i, auto chunk)
                      HWY_ATTR { return add(chunk.load(args.dy.row(t) + i), sum); });
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(layernorm_rows);
HWY_EXPORT(layernorm_backward_rows);
HWY_EXPORT(layernorm_weight_grad);

namespace {
constexpr int64_t kGradColumns = 64;     // the indexer's keys are 128 wide: two threads find work
}  // namespace

void launch(const LayerNorm& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.x.size(1));
  stream.parallel_for(args.x.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(layernorm_rows)(args, begin, end);
  });
}

void launch(const LayerNormBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  // dw and db first: dx may overwrite dy.
  stream.parallel_for(args.x.size(1), kGradColumns, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(layernorm_weight_grad)(args, begin, end);
  });
  const int64_t grain = task_rows(args.x.size(1));
  stream.parallel_for(args.x.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(layernorm_backward_rows)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
