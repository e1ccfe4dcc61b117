#include "kernels/moe_dispatch/moe_dispatch.h"

#include "kernels/cuda/row_values.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// --- MoePlan: a counting sort in pieces of 256 entries, entry = token * k + slot --------------------------------------

constexpr int kPiece = 256;

__device__ int expert_of(Rows<const int32_t> experts, int64_t entry, int64_t slots, int64_t num_experts) {
  const int32_t e = experts[entry / slots][entry % slots];
  if (e < 0 || e >= num_experts) __trap();
  return e;
}

// counts[piece, e]: entries of the piece with this expert. Integer additions: any order gives the same.
__global__ void count_experts(Rows<const int32_t> experts, int64_t entries, int64_t slots, int64_t num_experts,
                              int32_t* counts) {
  extern __shared__ int32_t sums[];
  for (int64_t e = threadIdx.x; e < num_experts; e += blockDim.x) sums[e] = 0;
  __syncthreads();
  const int64_t entry = int64_t{blockIdx.x} * kPiece + threadIdx.x;
  if (entry < entries) atomicAdd(&sums[expert_of(experts, entry, slots, num_experts)], 1);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < num_experts; e += blockDim.x) counts[blockIdx.x * num_experts + e] = sums[e];
}

// counts becomes the entries of the expert in earlier pieces; row_begin the experts' first rows. One block of 1024.
__global__ void place_experts(int32_t* counts, int64_t pieces, int64_t num_experts, int32_t* row_begin) {
  __shared__ int32_t totals[1024];
  int32_t carried = 0;
  for (int64_t base = 0; base < num_experts; base += blockDim.x) {
    const int64_t e = base + threadIdx.x;
    int32_t total = 0;
    if (e < num_experts) {
      constexpr int kTogether = 16;  // read before any is written
      for (int64_t base = 0; base < pieces; base += kTogether) {
        const int many = static_cast<int>(min(int64_t{kTogether}, pieces - base));
        int32_t* const at = counts + base * num_experts + e;
        int32_t count[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) count[i] = i < many ? at[i * num_experts] : 0;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (i < many) at[i * num_experts] = total;
          total += count[i];
        }
      }
    }
    totals[threadIdx.x] = total;
    __syncthreads();
    for (unsigned distance = 1; distance < blockDim.x; distance *= 2) {
      const int32_t other = threadIdx.x >= distance ? totals[threadIdx.x - distance] : 0;
      __syncthreads();
      totals[threadIdx.x] += other;
      __syncthreads();
    }
    if (e < num_experts) row_begin[e] = carried + totals[threadIdx.x] - total;
    carried += totals[blockDim.x - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) row_begin[num_experts] = carried;
}

__global__ void place_entries(Rows<const int32_t> experts, int64_t entries, int64_t slots, int64_t num_experts,
                              const int32_t* before, const int32_t* row_begin, Rows<int32_t> slot_row,
                              int32_t* row_token) {
  __shared__ int32_t ids[kPiece];
  const int64_t entry = int64_t{blockIdx.x} * kPiece + threadIdx.x;
  const int32_t e = entry < entries ? expert_of(experts, entry, slots, num_experts) : -1;
  ids[threadIdx.x] = e;
  __syncthreads();
  if (e < 0) return;
  int32_t rank = 0;
  for (unsigned i = 0; i < threadIdx.x; ++i) rank += ids[i] == e;
  const int32_t row = row_begin[e] + before[blockIdx.x * num_experts + e] + rank;
  slot_row[entry / slots][entry % slots] = row;
  row_token[row] = static_cast<int32_t>(entry / slots);
}

// --- Rows to experts and back -----------------------------------------------------------------------------------------

constexpr int kGatherRuns = 2;

template <class X>
__global__ void __launch_bounds__(kPartThreads) gather_rows(Rows<const X> x, const int32_t* row_token, Rows<X> rows, int width,
                                                            bool whole) {
  const int64_t row = blockIdx.x;
  const int32_t token = row_token[row];
  Four<X> run[kGatherRuns];
  for_part<kGatherRuns>(width, [&](int r, int i) {
    run[r] = token < 0 ? Four<X>(float4{0.0f, 0.0f, 0.0f, 0.0f}) : load_four(x[token] + i, width - i, whole);
  });
  for_part<kGatherRuns>(width, [&](int r, int i) { store_run(rows[row] + i, run[r].values(), width - i, whole); });
}

// y[t] += sum over slots, ascending, of weight * rows[slot_row[t, slot]]; without weights they are 1. Eight slots are read
// together.
template <class X>
__global__ void __launch_bounds__(kPartThreads) combine_rows(Rows<const X> rows, Rows<const float> weights,
                                                             Rows<const int32_t> slot_row, Rows<X> y, int slots, int width,
                                                             bool whole) {
  constexpr int kTogether = 8;
  const int64_t t = blockIdx.x;
  for_part<1>(width, [&](int, int i) {
    const float4 before = load_run(y[t] + i, width - i, whole);
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int base = 0; base < slots; base += kTogether) {
      Four<X> run[kTogether];
      float weight[kTogether];
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
        if (base + s >= slots) continue;
        run[s] = load_four(rows[slot_row[t][base + s]] + i, width - i, whole);
        weight[s] = weights.data == nullptr ? 1.0f : weights[t][base + s];
      }
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
        if (base + s < slots) sum = add_scaled(weight[s], run[s].values(), sum);
      }
    }
    store_run(y[t] + i, {before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w}, width - i, whole);
  });
}

// One block a token and slot: dweight = dy · row, drow = weight dy; drows may be rows.
template <class X>
__global__ void combine_backward(Rows<const X> rows, Rows<const float> weights, Rows<const int32_t> slot_row,
                                 Rows<const X> dys, Rows<X> drows, Rows<float> dweights, int64_t slots, int64_t width,
                                 bool whole) {
  const int64_t t = blockIdx.x / slots, slot = blockIdx.x % slots, row = slot_row[t][slot];
  constexpr int kRuns = 4;
  const RowShare share = block_share(width, whole);
  const HeldRow<X, kRuns> dy(dys[t], share), from(rows[row], share);
  const float w = weights[t][slot];
  float dot = 0.0f;
  for_runs<kRuns>(share, [&](int r, int column) {
    const float4 d = dy.at(r, column, share);
    dot = add_products(d, from.at(r, column, share), dot);
    store_run(drows[row] + column, {w * d.x, w * d.y, w * d.z, w * d.w}, width - column, whole);
  });
  dot = block_sum(dot);
  if (threadIdx.x == 0) dweights[t][slot] = dot;
}

}  // namespace

template <>
void launch_cuda<MoePlan>(const MoePlan& args, Stream& stream) {
  const int64_t slots = args.experts.size(1), entries = args.experts.size(0) * slots;
  const int64_t num_experts = args.row_begin.size(0) - 1, pieces = divide_up(entries, kPiece);
  if (entries == 0) return stream.zero(args.row_begin);
  const ArenaScope scope(stream.workspace());
  int32_t* const counts = stream.workspace().alloc(DType::kI32, {pieces, num_experts}).i32();
  const Rows<const int32_t> experts = rows_of<const int32_t>(args.experts);
  const unsigned grid = static_cast<unsigned>(pieces);
  const cudaStream_t queue = cuda_stream(stream);
  count_experts<<<grid, kPiece, static_cast<size_t>(num_experts) * sizeof(int32_t), queue>>>(experts, entries, slots,
                                                                                          num_experts, counts);
  place_experts<<<1, 1024, 0, queue>>>(counts, pieces, num_experts, args.row_begin.i32());
  place_entries<<<grid, kPiece, 0, queue>>>(experts, entries, slots, num_experts, counts, args.row_begin.i32(),
                                            rows_of<int32_t>(args.slot_row), args.row_token.i32());
  check_launch("moe_plan");
}

template <>
void launch_cuda<MoeGather>(const MoeGather& args, Stream& stream) {
  const int64_t rows = args.rows.size(0), width = args.x.size(1);
  if (rows * width == 0) return;
  const bool whole = fours(args.x) && fours(args.rows);
  with_type(args.x.dtype(), [&](auto x) {
    using X = decltype(x);
    gather_rows<X><<<part_grid<kGatherRuns>(rows, width), kPartThreads, 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.x), args.row_token.i32(), rows_of<X>(args.rows), static_cast<int>(width), whole);
  });
  check_launch("moe_gather");
}

namespace {

void combine(const Tensor& rows, const Tensor& weights, const Tensor& slot_row, const Tensor& y, Stream& stream) {
  const int64_t tokens = y.size(0), width = y.size(1);
  if (tokens * width == 0) return;
  const bool whole = fours(rows) && fours(y);
  with_type(y.dtype(), [&](auto x) {
    using X = decltype(x);
    combine_rows<X><<<part_grid<1>(tokens, width), kPartThreads, 0, cuda_stream(stream)>>>(
        rows_of<const X>(rows), rows_of<const float>(weights), rows_of<const int32_t>(slot_row), rows_of<X>(y),
        static_cast<int>(slot_row.size(1)), static_cast<int>(width), whole);
  });
  check_launch("moe_combine");
}

}  // namespace

template <>
void launch_cuda<MoeCombine>(const MoeCombine& args, Stream& stream) {
  combine(args.rows, args.weights, args.slot_row, args.y, stream);
}

template <>
void launch_cuda<MoeGatherBackward>(const MoeGatherBackward& args, Stream& stream) {
  combine(args.drows, Tensor(), args.slot_row, args.dx, stream);
}

template <>
void launch_cuda<MoeCombineBackward>(const MoeCombineBackward& args, Stream& stream) {
  const int64_t tokens = args.dy.size(0), slots = args.slot_row.size(1), width = args.dy.size(1);
  if (tokens * slots == 0) return;
  const bool whole = fours(args.rows) && fours(args.dy) && fours(args.drows);
  with_type(args.dy.dtype(), [&](auto x) {
    using X = decltype(x);
    combine_backward<X><<<static_cast<unsigned>(tokens * slots), row_threads(width), 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.rows), rows_of<const float>(args.weights), rows_of<const int32_t>(args.slot_row),
        rows_of<const X>(args.dy), rows_of<X>(args.drows), rows_of<float>(args.dweights), slots, width, whole);
  });
  check_launch("moe_combine_backward");
}

}  // namespace slipstream::kernels
