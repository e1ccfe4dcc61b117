#include "kernels/moe_dispatch/moe_dispatch.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe_dispatch/moe_dispatch_simd.cc"
#include <algorithm>
#include <cstring>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// The rows of one token's slots, bounds checked.
void slot_rows(const Tensor& rows, const Tensor& slot_row, int64_t token, float** out) {
  const int32_t* index = slot_row.i32() + token * slot_row.stride(0);
  for (int64_t k = 0; k < slot_row.size(1); ++k) {
    CHECK(index[k] >= 0 && index[k] < rows.size(0));
    out[k] = rows.row(index[k]);
  }
}

// y += sum over slots, ascending, of weights[k] rows[k]. Four vectors a step: their chains hide each other's
// latency.
void combine_token(float* const* rows, const float* weights, int64_t slots, int64_t hidden, float* y) {
  constexpr int64_t kVectors = 4;
  int64_t begin = 0;
  for (; begin + kVectors * kLanes <= hidden; begin += kVectors * kLanes) {
    Lanes sum[kVectors] = {zero_lanes(), zero_lanes(), zero_lanes(), zero_lanes()};
    for (int64_t k = 0; k < slots; ++k) {
      const Lanes weight = broadcast(weights[k]);
      for (int64_t v = 0; v < kVectors; ++v) sum[v] = fma(weight, load(rows[k] + begin + v * kLanes), sum[v]);
    }
    for (int64_t v = 0; v < kVectors; ++v) {
      float* to = y + begin + v * kLanes;
      store(add(load(to), sum[v]), to);
    }
  }
  for_lanes(hidden - begin, [&](int64_t i, auto chunk) HWY_ATTR {
    Lanes sum = zero_lanes();
    for (int64_t k = 0; k < slots; ++k)
      sum = fma(broadcast(weights[k]), chunk.load(rows[k] + begin + i), sum);
    chunk.store(add(chunk.load(y + begin + i), sum), y + begin + i);
  });
}

// y[t] += sum over slots of weights[t, k] rows[slot_row[t, k]]; weights absent: 1.
void combine_tokens(const Tensor& rows, const Tensor& weights, const Tensor& slot_row, const Tensor& y,
                    int64_t begin, int64_t end, Worker& worker) {
  const int64_t slots = slot_row.size(1), hidden = y.size(1);
  float** token_rows = worker.scratch<float*>(slots);
  float* ones = worker.scratch<float>(slots);
  std::fill(ones, ones + slots, 1.0f);
  for (int64_t t = begin; t < end; ++t) {
    slot_rows(rows, slot_row, t, token_rows);
    combine_token(token_rows, weights.empty() ? ones : weights.row(t), slots, hidden, y.row(t));
  }
}

// Returns rows · dy and makes drow = weight dy. drow may be row: each value is read before it is written.
HWY_INLINE float combine_backward_slot(const float* row, float weight, const float* dy, int64_t hidden,
                                       float* drow) {
  const Lanes factor = broadcast(weight);
  Lanes dot = zero_lanes();
  for_lanes(hidden, [&](int64_t i, auto chunk) HWY_ATTR {
    const Lanes slope = chunk.load(dy + i);
    dot = fma(slope, chunk.load(row + i), dot);
    chunk.store(mul(factor, slope), drow + i);
  });
  return sum_lanes(dot);
}

void combine_backward_tokens(const MoeCombineBackward& args, int64_t begin, int64_t end, Worker& worker) {
  const int64_t slots = args.slot_row.size(1), hidden = args.dy.size(1);
  float** rows = worker.scratch<float*>(slots);
  float** drows = worker.scratch<float*>(slots);
  for (int64_t t = begin; t < end; ++t) {
    slot_rows(args.rows, args.slot_row, t, rows);
    slot_rows(args.drows, args.slot_row, t, drows);
    const float* weights = args.weights.row(t);
    float* dweights = args.dweights.row(t);
    for (int64_t k = 0; k < slots; ++k) {
      dweights[k] = combine_backward_slot(rows[k], weights[k], args.dy.row(t), hidden, drows[k]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(combine_tokens);
HWY_EXPORT(combine_backward_tokens);

namespace {

// A counting sort. One thread: 32,768 slots take 0.1 ms, a thousandth of the experts' products that follow.
void plan(const MoePlan& args, Worker& worker) {
  const int64_t tokens = args.experts.size(0), slots = args.experts.size(1);
  const int64_t num_experts = args.row_begin.size(0) - 1;
  const int32_t* experts = args.experts.i32();
  const int64_t experts_stride = args.experts.stride(0), slot_row_stride = args.slot_row.stride(0);
  int32_t* row_begin = args.row_begin.i32();
  int32_t* slot_row = args.slot_row.i32();
  int32_t* row_token = args.row_token.i32();

  std::fill(row_begin, row_begin + num_experts + 1, 0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < slots; ++k) {
      const int32_t expert = experts[t * experts_stride + k];
      CHECK(expert >= 0 && expert < num_experts);
      ++row_begin[expert + 1];
    }
  }
  for (int64_t e = 0; e < num_experts; ++e) row_begin[e + 1] += row_begin[e];
  int32_t* next = worker.scratch<int32_t>(num_experts);
  std::copy(row_begin, row_begin + num_experts, next);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < slots; ++k) {
      const int32_t row = next[experts[t * experts_stride + k]]++;
      slot_row[t * slot_row_stride + k] = row;
      row_token[row] = static_cast<int32_t>(t);
    }
  }
}

}  // namespace

void launch(const MoePlan& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(1, 1, [&](int64_t, int64_t, Worker& worker) { plan(args, worker); });
}

void launch(const MoeGather& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t tokens = args.x.size(0), hidden = args.x.size(1);
  if (hidden == 0) return;
  stream.parallel_for(args.rows.size(0), task_rows(hidden), [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t r = begin; r < end; ++r) {
      const int32_t token = args.row_token.i32()[r];
      CHECK(token >= -1 && token < tokens);
      const size_t bytes = static_cast<size_t>(hidden) * sizeof(float);
      if (token < 0) {
        std::memset(args.rows.row(r), 0, bytes);
      } else {
        std::memcpy(args.rows.row(r), args.x.row(token), bytes);
      }
    }
  });
}

void launch(const MoeCombine& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.slot_row.size(1) * args.y.size(1));
  stream.parallel_for(args.y.size(0), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(combine_tokens)(args.rows, args.weights, args.slot_row, args.y, begin, end, worker);
  });
}

void launch(const MoeCombineBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.slot_row.size(1) * args.dy.size(1));
  stream.parallel_for(args.dy.size(0), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(combine_backward_tokens)(args, begin, end, worker);
  });
}

void launch(const MoeGatherBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = task_rows(args.slot_row.size(1) * args.dx.size(1));
  stream.parallel_for(args.dx.size(0), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(combine_tokens)(args.drows, Tensor(), args.slot_row, args.dx, begin, end, worker);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
