#include "kernels/add/add.h"
#include "kernels/gated_norm/gated_norm.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gated_norm/gated_norm_simd.cc"
#include <algorithm>
#include <cmath>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

void gated_norm_rows(const GatedNorm& args, int64_t begin, int64_t end) {
  const int64_t dim = args.x.size(1);
  const float* w = args.w.f32();
  for (int64_t r = begin; r < end; ++r) {
    const float* x = args.x.row(r);
    const float* gate = args.gate.row(r);
    float* y = args.y.row(r);
    Lanes squares = zero_lanes();
    for_lanes(dim, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes v = chunk.load(x + i);
      squares = fma(v, v, squares);
    });
    const float inv_rms = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(dim) + args.eps);
    const Lanes scale = broadcast(inv_rms);
    for_lanes(dim, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes normed = mul(chunk.load(w + i), mul(chunk.load(x + i), scale));
      chunk.store(mul(normed, sigmoid(chunk.load(gate + i))), y + i);
    });
    if (!args.inv_rms.empty()) args.inv_rms.f32()[r] = inv_rms;
  }
}

// Rows [begin, end) and their share of dw, which starts at zero. One pass: x, gate and dy are read and the
// sigmoid is computed once.
void gated_norm_backward_rows(const GatedNormBackward& args, int64_t begin, int64_t end, float* dw) {
  const int64_t dim = args.x.size(1);
  const float* w = args.w.f32();
  const Lanes one = broadcast(1.0f);
  std::fill(dw, dw + dim, 0.0f);
  for (int64_t r = begin; r < end; ++r) {
    const float* x = args.x.row(r);
    const float* gate = args.gate.row(r);
    const float* dy = args.dy.row(r);
    float* dx = args.dx.row(r);
    float* dgate = args.dgate.row(r);
    const Lanes inv_rms = broadcast(args.inv_rms.f32()[r]);
    Lanes dot = zero_lanes();
    for_lanes(dim, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes normed = mul(chunk.load(x + i), inv_rms);
      const Lanes s = sigmoid(chunk.load(gate + i));
      const Lanes gated = mul(chunk.load(dy + i), s);
      const Lanes slope = mul(gated, chunk.load(w + i));
      const Lanes product = mul(slope, normed);
      dot = add(dot, product);
      chunk.store(fma(gated, normed, chunk.load(dw + i)), dw + i);
      chunk.store(mul(product, sub(one, s)), dgate + i);
      chunk.store(slope, dx + i);  // kept for the second loop; dy, which dx may be, has been read
    });
    const Lanes mean = broadcast(sum_lanes(dot) / static_cast<float>(dim));
    for_lanes(dim, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes normed = mul(chunk.load(x + i), inv_rms);
      chunk.store(mul(inv_rms, fnma(normed, mean, chunk.load(dx + i))), dx + i);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(gated_norm_rows);
HWY_EXPORT(gated_norm_backward_rows);

void launch(const GatedNorm& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.x.size(1));
  stream.parallel_for(args.x.size(0), grain, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(gated_norm_rows)(args, begin, end);
  });
}

// Heads are narrow (64..128): columns would not feed the threads, so dw is split by rows. As many ranges as
// partial sums fit in 32 KiB of stack, 64 for a head of 128; their number never depends on the threads.
void launch(const GatedNormBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t rows = args.x.size(0), dim = args.x.size(1);
  if (rows == 0 || dim == 0) return;
  float partial[kGatedNormDimMax];
  const int64_t rows_per_range = (rows + kGatedNormDimMax / dim - 1) / (kGatedNormDimMax / dim);
  const int64_t ranges = (rows + rows_per_range - 1) / rows_per_range;
  stream.parallel_for(ranges, 1, [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t first = k * rows_per_range, last = std::min(first + rows_per_range, rows);
      HWY_DYNAMIC_DISPATCH(gated_norm_backward_rows)(args, first, last, partial + k * dim);
    }
  });
  launch(ColumnSum{.x = Tensor(partial, DType::kF32, {ranges, dim}), .y = args.dw}, stream);
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
