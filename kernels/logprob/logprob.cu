#include "kernels/logprob/logprob.h"

#include <algorithm>

#include "kernels/cuda/softmax_row.cuh"
#include "kernels/cuda/wgmma_products.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// Parts of all rows, written by one kernel and merged by the next: [rows, blocks]. Maximum and sum of a block lie together.
struct Parts {
  float2* max_sum;
  float* dot;
  int64_t blocks;

  __device__ void put(int64_t row, int64_t block, const RowPart& part) const {
    max_sum[row * blocks + block] = {part.max, part.sum};
    dot[row * blocks + block] = part.dot;
  }
  __device__ RowPart get(int64_t row, int64_t block) const {
    const float2 both = max_sum[row * blocks + block];
    return {both.x, both.y, dot[row * blocks + block]};
  }
};
constexpr int64_t kPartBytes = 12, kPartBytesMax = int64_t{128} << 20;
Parts allocate_parts(int64_t rows, int64_t vocab, Stream& stream) {
  const int64_t blocks = column_blocks(vocab);
  return {reinterpret_cast<float2*>(stream.workspace().alloc(DType::kF32, {rows, blocks, 2}).f32()),
          stream.workspace().alloc(DType::kF32, {rows, blocks}).f32(), blocks};
}

// Calls f(begin, end) for runs of rows whose parts fit the workspace.
template <class F>
void for_runs(int64_t rows, int64_t vocab, F&& f) {
  const int64_t most = std::max<int64_t>(1, kPartBytesMax / (column_blocks(vocab) * kPartBytes) / 128 * 128);
  for (int64_t begin = 0; begin < rows; begin += most) f(begin, std::min(begin + most, rows));
}

constexpr int kPartThreads = 256;  // four a block of columns

__global__ void __launch_bounds__(kPartThreads) stored_parts(Rows<const float> logits, int64_t vocab, float scale, bool pairs,
                                                             Parts parts) {
  const int64_t row = blockIdx.x, block = int64_t{blockIdx.y} * (kPartThreads / 4) + threadIdx.x / 4;
  float v[kSoftmaxColumns / 4];
  load_block(logits[row], vocab, block, pairs, v);  // all lanes take part in the exchanges, also beyond the last block
  const RowPart part = part_of_block(v, scale);
  if (threadIdx.x % 4 == 0 && block < parts.blocks) parts.put(row, block, part);
}

struct LogProbOutputs {
  float* logprobs;
  float* lses;
  float* entropies;  // may be null
};

// One block a row. Its target's logit is in a row of logits, or alone in a column when `ld` is 0.
__global__ void __launch_bounds__(kSoftmaxThreads) merge_parts(Parts parts, const int32_t* targets, Rows<const float> logits,
                                                               int64_t vocab, float inv_temperature, LogProbOutputs out) {
  const int64_t t = blockIdx.x;
  const RowSoftmax row =
      softmax_of_blocks(parts.blocks, inv_temperature, [&](int64_t block) { return parts.get(t, block); });
  if (threadIdx.x != 0) return;
  const int32_t target = targets[t];
  if (target < -1 || target >= vocab) __trap();
  const bool alone = logits.stride == 0;
  out.logprobs[t] = target < 0 ? 0.0f : row.logprob(alone ? logits.data[t] : logits[t][target]);
  out.lses[t] = row.lse();
  if (out.entropies != nullptr) out.entropies[t] = row.entropy;
}

// --- The gradient -----------------------------------------------------------------------------------------------------

struct GradientInputs {
  const int32_t* targets;
  const float* lses;
  const float* dlogprobs;
  const float* entropies;   // null when dentropies is
  const float* dentropies;  // may be null
  float inv_temperature;
};

class RowGradient {
 public:
  __device__ RowGradient(const GradientInputs& in, int64_t t)
      : inv_temperature_(in.inv_temperature), target_(in.targets[t]), lse_(in.lses[t]) {
    dlogprob_ = target_ < 0 ? 0.0f : in.dlogprobs[t];  // the log-prob of -1 is the constant 0
    dentropy_ = in.dentropies == nullptr ? 0.0f : in.dentropies[t];
    entropy_ = dentropy_ == 0.0f ? 0.0f : in.entropies[t];
  }
  // Otherwise the row is zeros, whatever its logits: masking is selection.
  __device__ bool live() const { return dlogprob_ != 0.0f || dentropy_ != 0.0f; }
  __device__ int64_t target() const { return target_; }
  // Of a logit that is not the target's; at_target() is to be added to that one's.
  __device__ float of(float logit) const {
    const float log_p = fmaf(logit, inv_temperature_, -lse_), p = fast_exp2(log_p * kLog2E);
    return -p * fmaf(dentropy_, bounded(log_p) + entropy_, dlogprob_) * inv_temperature_;
  }
  __device__ float at_target() const { return dlogprob_ * inv_temperature_; }

 private:
  float inv_temperature_;
  int32_t target_;
  float lse_, dlogprob_, dentropy_, entropy_;
};

constexpr int kGradThreads = 256, kGradColumns = 4096;  // of a block

template <class X>
__global__ void logprob_backward(Rows<const float> logits, GradientInputs in, Rows<X> dlogits, int64_t vocab) {
  const int64_t t = blockIdx.x, begin = int64_t{blockIdx.y} * kGradColumns, end = min(begin + kGradColumns, vocab);
  const RowGradient row(in, t);
  for (int64_t i = begin + threadIdx.x; i < end; i += kGradThreads) {
    float grad = 0.0f;
    if (row.live()) grad = row.of(logits[t][i]);
    if (i == row.target()) grad += row.at_target();
    store(dlogits[t] + i, grad);
  }
}

// --- The head's product and what follows it ---------------------------------------------------------------------------

using HeadShape = WgmmaShape<bf16, 2, 256, 4>;
static_assert(HeadShape::kN == 4 * kSoftmaxColumns);  // a thread of each four stores one block's part

// A thread's rows of a tile of logits and where the row's target lies in its sums, if this thread has it.
template <int kSums, class F>
__device__ __forceinline__ void with_target(float (&sums)[kSums], int low, int64_t column, F&& f) {  // column: in the tile
  if (column < 0 || column >= kSums * 2 || column % 8 / 2 != threadIdx.x % 4) return;
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      if (column == i * 8 + threadIdx.x % 4 * 2 + odd) f(sums[i * 4 + low * 2 + odd]);
    }
  }
}

// Instead of logits their parts, and the target's logit.
struct HeadParts {
  Parts parts;
  const int32_t* targets;
  float* target_logits;
  float scale;

  template <int kSums>
  __device__ void begin(const Product&, const Tile&, float (&)[kSums]) const {}
  template <int kSums>
  __device__ void end(const Product& p, const Tile& tile, float (&sums)[kSums]) const {
    const PairsOfC<float> at(p, tile);
    if (tile.n0 + kSums * 2 > p.n) {  // the weights' rows beyond the vocabulary were zeros
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (at.column0 + i / 4 * 8 + i % 2 >= p.n) sums[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const int64_t row = at.row0 + low * 8;
      const bool exists = row < p.m;
      if (exists) with_target(sums, low, targets[row] - tile.n0, [&](float& logit) { target_logits[row] = logit; });
      RowPart mine = no_columns();
#pragma unroll
      for (int block = 0; block < kSums * 2 / kSoftmaxColumns; ++block) {
        float v[kSoftmaxColumns / 4];
#pragma unroll
        for (int i = 0; i < kSoftmaxColumns / 4; ++i) {
          v[i] = sums[(block * (kSoftmaxColumns / 8) + i / 2) * 4 + low * 2 + i % 2];
        }
        const RowPart part = part_of_block(v, scale);
        if (threadIdx.x % 4 == block) mine = part;
      }
      const int64_t block = tile.n0 / kSoftmaxColumns + threadIdx.x % 4;
      if (exists && block < parts.blocks) parts.put(row, block, mine);
    }
  }
};

// The gradient of the logits, which are gone again.
struct HeadGradient {
  GradientInputs in;

  template <int kSums>
  __device__ void begin(const Product&, const Tile&, float (&)[kSums]) const {}
  template <int kSums>
  __device__ void end(const Product& p, const Tile& tile, float (&sums)[kSums]) const {
    const PairsOfC<bf16> at(p, tile);
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const RowGradient row(in, min(at.row0 + low * 8, p.m - 1));
      const bool live = row.live();
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        float& sum = sums[i / 2 * 4 + low * 2 + i % 2];
        sum = live ? row.of(sum) : 0.0f;
      }
      with_target(sums, low, row.target() - tile.n0, [&](float& grad) { grad += row.at_target(); });
    }
    at.store_all(sums);
  }
};

Product head_product(const Tensor& hidden, const Tensor& weight) {
  return {.a = hidden.raw(), .b = weight.raw(), .c = nullptr, .m = hidden.size(0), .n = weight.size(0),
          .k = weight.size(1), .lda = hidden.stride(0), .ldb = weight.stride(0), .ldc = 0, .fast_a = eights(hidden),
          .fast_b = eights(weight)};
}

GradientInputs gradient_inputs(const auto& args) {
  return {args.targets.i32(), args.lse.f32(), args.dlogprob.f32(), data_of<float>(args.entropy),
          data_of<float>(args.dentropy), 1.0f / args.temperature};
}

}  // namespace

template <>
void launch_cuda<LogProb>(const LogProb& args, Stream& stream) {
  const int64_t vocab = args.logits.size(1);
  const float inv_temperature = 1.0f / args.temperature;
  for_runs(args.logits.size(0), vocab, [&](int64_t begin, int64_t end) {
    const ArenaScope scope(stream.workspace());
    const auto rows = static_cast<unsigned>(end - begin);
    const Tensor logits = args.logits.slice(0, begin, end);
    const Parts parts = allocate_parts(rows, vocab, stream);
    const dim3 grid(rows, static_cast<unsigned>(divide_up(parts.blocks, kPartThreads / 4)));
    stored_parts<<<grid, kPartThreads, 0, cuda_stream(stream)>>>(rows_of<const float>(logits), vocab,
                                                                 inv_temperature * kLog2E, reads_pairs(logits), parts);
    merge_parts<<<rows, kSoftmaxThreads, 0, cuda_stream(stream)>>>(
        parts, args.targets.i32() + begin, rows_of<const float>(logits), vocab, inv_temperature,
        {args.logprob.f32() + begin, args.lse.f32() + begin,
         args.entropy.empty() ? nullptr : args.entropy.f32() + begin});
  });
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
        rows_of<const float>(args.logits), gradient_inputs(args), rows_of<X>(args.dlogits), vocab);
  });
  check_launch("logprob_backward");
}

template <>
void launch_cuda<HeadLogProb>(const HeadLogProb& args, Stream& stream) {
  const int64_t vocab = args.weight.size(0);
  const float inv_temperature = 1.0f / args.temperature;
  for_runs(args.hidden.size(0), vocab, [&](int64_t begin, int64_t end) {
    const ArenaScope scope(stream.workspace());
    const auto rows = static_cast<unsigned>(end - begin);
    const Parts parts = allocate_parts(rows, vocab, stream);
    float* const target_logits = stream.workspace().alloc(DType::kF32, {end - begin}).f32();
    launch_wgmma_product<HeadShape, false, true>(
        head_product(args.hidden.slice(0, begin, end), args.weight),
        HeadParts{parts, args.targets.i32() + begin, target_logits, inv_temperature * kLog2E}, stream);
    merge_parts<<<rows, kSoftmaxThreads, 0, cuda_stream(stream)>>>(
        parts, args.targets.i32() + begin, Rows<const float>{target_logits, 0}, vocab, inv_temperature,
        {args.logprob.f32() + begin, args.lse.f32() + begin,
         args.entropy.empty() ? nullptr : args.entropy.f32() + begin});
  });
  check_launch("head_logprob");
}

template <>
void launch_cuda<HeadLogProbBackward>(const HeadLogProbBackward& args, Stream& stream) {
  if (args.hidden.size(0) == 0) return;
  Product p = head_product(args.hidden, args.weight);
  p.c = args.dlogits.raw(), p.ldc = args.dlogits.stride(0), p.fast_c = eights(args.dlogits);
  launch_wgmma_product<HeadShape, false, true>(p, HeadGradient{gradient_inputs(args)}, stream);
  check_launch("head_logprob_backward");
}

}  // namespace slipstream::kernels
