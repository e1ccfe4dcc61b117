#include "kernels/logprob/logprob.h"

#include "kernels/cuda/softmax_row.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

__global__ void __launch_bounds__(kSoftmaxThreads) logprob(Rows<const float> logits, const int32_t* targets,
                                                           float* logprobs, float* lses, float* entropies,
                                                           int64_t vocab, float inv_temperature) {
  const int64_t t = blockIdx.x;
  const RowSoftmax row = softmax_of(logits[t], vocab, inv_temperature, entropies != nullptr);
  if (threadIdx.x != 0) return;
  const int32_t target = targets[t];
  if (target < -1 || target >= vocab) __trap();
  logprobs[t] = target < 0 ? 0.0f : row.logprob(logits[t][target]);
  lses[t] = row.lse();
  if (entropies != nullptr) entropies[t] = row.entropy;
}

constexpr int kGradThreads = 256, kGradColumns = 4096;  // of a block

template <class X>
__global__ void logprob_backward(Rows<const float> logits, const int32_t* targets, const float* lses,
                                 const float* dlogprobs, const float* entropies, const float* dentropies,
                                 Rows<X> dlogits, int64_t vocab, float inv_temperature) {
  const int64_t t = blockIdx.x, begin = int64_t{blockIdx.y} * kGradColumns, end = min(begin + kGradColumns, vocab);
  const int32_t target = targets[t];
  const float dlogprob = target < 0 ? 0.0f : dlogprobs[t];  // the log-prob of -1 is the constant 0
  const float dentropy = dentropies == nullptr ? 0.0f : dentropies[t];
  if (dlogprob == 0.0f && dentropy == 0.0f) {
    for (int64_t i = begin + threadIdx.x; i < end; i += kGradThreads) store(dlogits[t] + i, 0.0f);
    return;
  }
  const float lse = lses[t], entropy = dentropy == 0.0f ? 0.0f : entropies[t];
  for (int64_t i = begin + threadIdx.x; i < end; i += kGradThreads) {
    const float log_p = logits[t][i] * inv_temperature - lse, p = expf(log_p);
    float grad = dlogprob * ((i == target ? 1.0f : 0.0f) - p);
    if (dentropy != 0.0f && p != 0.0f) grad -= dentropy * p * (log_p + entropy);
    store(dlogits[t] + i, grad * inv_temperature);
  }
}

}  // namespace

template <>
void launch_cuda<LogProb>(const LogProb& args, Stream& stream) {
  const int64_t rows = args.logits.size(0);
  if (rows == 0) return;
  logprob<<<static_cast<unsigned>(rows), kSoftmaxThreads, 0, cuda_stream(stream)>>>(
      rows_of<const float>(args.logits), args.targets.i32(), args.logprob.f32(), args.lse.f32(),
      data_of<float>(args.entropy), args.logits.size(1), 1.0f / args.temperature);
  check_launch("logprob");
}

template <>
void launch_cuda<LogProbBackward>(const LogProbBackward& args, Stream& stream) {
  const int64_t rows = args.logits.size(0), vocab = args.logits.size(1);
  if (rows == 0) return;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(divide_up(vocab, kGradColumns)));
  with_type(args.dlogits.dtype(), [&](auto x) {
    using X = decltype(x);
    logprob_backward<X><<<grid, kGradThreads, 0, cuda_stream(stream)>>>(
        rows_of<const float>(args.logits), args.targets.i32(), args.lse.f32(), args.dlogprob.f32(),
        data_of<float>(args.entropy), data_of<float>(args.dentropy), rows_of<X>(args.dlogits), vocab,
        1.0f / args.temperature);
  });
  check_launch("logprob_backward");
}

}  // namespace slipstream::kernels
