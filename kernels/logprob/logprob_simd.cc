#include "kernels/logprob/logprob.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/logprob/logprob_simd.cc"
#include <algorithm>
#include <cstring>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"
#include "kernels/simd/logsumexp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

SoftmaxPart logprob_part(const LogProb& args, int64_t t, int64_t block) {
  const int64_t begin = block * kSoftmaxBlock, end = std::min(begin + kSoftmaxBlock, args.logits.size(1));
  return softmax_part(args.logits.row(t) + begin, end - begin, 1.0f / args.temperature,
                      !args.entropy.empty());
}

void logprob_finish(const LogProb& args, int64_t t, SoftmaxPart* parts) {
  const RowSoftmax row = merge_softmax(parts, softmax_blocks(args.logits.size(1)), 1.0f / args.temperature);
  const int32_t target = args.targets.i32()[t];
  args.logprob.f32()[t] = target < 0 ? 0.0f : row.logprob(args.logits.row(t)[target]);
  args.lse.f32()[t] = row.lse();
  if (!args.entropy.empty()) args.entropy.f32()[t] = row.entropy;
}

// dlogits of row t in columns [begin, end).
void logprob_backward_part(const LogProbBackward& args, int64_t t, int64_t begin, int64_t end) {
  const int32_t target = args.targets.i32()[t];
  const float dlogprob = target < 0 ? 0.0f : args.dlogprob.f32()[t];  // the logprob of -1 is the constant 0
  const float dentropy = args.dentropy.empty() ? 0.0f : args.dentropy.f32()[t];
  float* out = args.dlogits.row(t) + begin;
  if (dlogprob == 0.0f && dentropy == 0.0f) {
    std::memset(out, 0, static_cast<size_t>(end - begin) * sizeof(float));
    return;
  }
  const float* x = args.logits.row(t) + begin;
  const float inv_temperature = 1.0f / args.temperature;
  const Lanes scale = broadcast(inv_temperature), lse = broadcast(args.lse.f32()[t]);
  if (dentropy == 0.0f) {
    const Lanes factor = broadcast(-dlogprob * inv_temperature);
    for_lanes(end - begin, [&](int64_t i, auto chunk) HWY_ATTR {
      chunk.store(mul(exp(sub(mul(chunk.load(x + i), scale), lse)), factor), out + i);
    });
  } else {
    const Lanes slope = broadcast(-dentropy * inv_temperature);
    const Lanes offset = broadcast(-(dlogprob + dentropy * args.entropy.f32()[t]) * inv_temperature);
    for_lanes(end - begin, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes log_p = bounded_exponent(sub(mul(chunk.load(x + i), scale), lse));
      chunk.store(mul(exp(log_p), fma(slope, log_p, offset)), out + i);
    });
  }
  if (begin <= target && target < end) out[target - begin] += dlogprob * inv_temperature;
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(logprob_part);
HWY_EXPORT(logprob_finish);
HWY_EXPORT(logprob_backward_part);

void launch(const LogProb& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t tokens = args.logits.size(0), blocks = softmax_blocks(args.logits.size(1));
  for_softmax_rows(
      stream, tokens, blocks, /*row_grain=*/4 / std::max<int64_t>(blocks, 1) + 1, /*finish_grain=*/tokens,
      [&](int64_t t, int64_t block) { return HWY_DYNAMIC_DISPATCH(logprob_part)(args, t, block); },
      [&](int64_t t, SoftmaxPart* parts, Worker&) { HWY_DYNAMIC_DISPATCH(logprob_finish)(args, t, parts); });
}

void launch(const LogProbBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t vocab = args.logits.size(1), blocks = softmax_blocks(vocab);
  stream.parallel_for(args.logits.size(0) * blocks, /*grain=*/4, [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t column = i % blocks * kSoftmaxBlock;
      HWY_DYNAMIC_DISPATCH(logprob_backward_part)
      (args, i / blocks, column, std::min(column + kSoftmaxBlock, vocab));
    }
  });
}

void launch(const HeadLogProb& args, Stream& stream) {
  CHECK_OK(validate(args));
  launch_cuda(args, stream);
}

void launch(const HeadLogProbBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  launch_cuda(args, stream);
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
