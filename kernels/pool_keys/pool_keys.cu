#include "kernels/pool_keys/pool_keys.h"

#include "kernels/cuda/column_sums.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int kPoolMax = 16;  // tokens a pool

// The softmax over a pool's tokens of gate + ape, one channel.
__device__ void shares_of(const float* logits, int64_t pool, float* shares) {
  float largest = logits[0], sum = 0.0f;
  for (int64_t r = 1; r < pool; ++r) largest = fmaxf(largest, logits[r]);
  for (int64_t r = 0; r < pool; ++r) {
    shares[r] = expf(logits[r] - largest);
    sum += shares[r];
  }
  for (int64_t r = 0; r < pool; ++r) shares[r] = shares[r] / sum;
}

struct Open {
  float* data;  // [slots, P, 2, Di]
  int64_t slot_stride, token_stride, part_stride;
  const int32_t* slots;
  __device__ float* at(int b, int64_t r, int64_t part) const {
    return data + slots[b] * slot_stride + r * token_stride + part * part_stride;
  }
};

// One block a row: the pool that the row completes, of rows of this batch and of tokens kept by earlier ones.
template <class X, class P>
__global__ void complete_pools(Rows<const X> k, Rows<const X> gate, Rows<const float> ape, DeviceSequences sequences,
                               Open open, DevicePages<P> pooled, int64_t width, int64_t pool) {
  const int64_t row = blockIdx.x;
  const int b = sequence_of(sequences.row_begin, sequences.count, row);
  const int64_t cached = sequences.cached[b], position = cached + row - sequences.row_begin[b];
  if ((position + 1) % pool != 0) return;
  P* const to = pooled.row(b, position / pool);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    float logits[kPoolMax], shares[kPoolMax];
    const auto fresh = [&](int64_t r) { return position - (pool - 1) + r >= cached; };
    const auto row_at = [&](int64_t r) { return row - (pool - 1) + r; };
    for (int64_t r = 0; r < pool; ++r) {
      logits[r] = (fresh(r) ? load(gate[row_at(r)] + i) : open.at(b, r, 1)[i]) + ape[r][i];
    }
    shares_of(logits, pool, shares);
    float sum = 0.0f;
    for (int64_t r = 0; r < pool; ++r) {
      sum = fmaf(shares[r], fresh(r) ? load(k[row_at(r)] + i) : open.at(b, r, 0)[i], sum);
    }
    store(to + i, sum);
  }
}

// One block a row: the last P tokens of a sequence are kept, each at its own place.
template <class X>
__global__ void keep_open(Rows<const X> k, Rows<const X> gate, DeviceSequences sequences, Open open, int64_t width,
                          int64_t pool) {
  const int64_t row = blockIdx.x;
  const int b = sequence_of(sequences.row_begin, sequences.count, row);
  if (row + pool < sequences.row_begin[b + 1]) return;
  const int64_t position = sequences.cached[b] + row - sequences.row_begin[b];
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    open.at(b, position % pool, 0)[i] = load(k[row] + i);
    open.at(b, position % pool, 1)[i] = load(gate[row] + i);
  }
}

// Gradients of one token's key, gate and ape in one channel; zeros in an incomplete pool.
struct TokenGrad {
  float dk, dlogit;
  int64_t r;
};
template <class X>
struct PoolGrad {
  Rows<const X> k, gate, dpooled;
  Rows<const float> ape;
  DeviceSequences sequences;
  int64_t pool;
  __device__ TokenGrad at(int64_t row, int64_t i) const {
    const int b = sequence_of(sequences.row_begin, sequences.count, row);
    const int64_t begin = sequences.row_begin[b], p = (row - begin) / pool, r = (row - begin) % pool;
    const int64_t first = begin + p * pool;  // row of the pool
    if (first + pool > sequences.row_begin[b + 1]) return {0.0f, 0.0f, r};
    int64_t before = 0;  // pools of earlier sequences
    for (int s = 0; s < b; ++s) before += (sequences.row_begin[s + 1] - sequences.row_begin[s]) / pool;
    float logits[kPoolMax], shares[kPoolMax], mean = 0.0f;
    for (int64_t j = 0; j < pool; ++j) logits[j] = load(gate[first + j] + i) + ape[j][i];
    shares_of(logits, pool, shares);
    for (int64_t j = 0; j < pool; ++j) mean = fmaf(shares[j], load(k[first + j] + i), mean);
    const float slope = load(dpooled[before + p] + i) * shares[r];
    return {slope, slope * (load(k[row] + i) - mean), r};
  }
};

template <class X>
__global__ void pool_keys_backward(PoolGrad<X> grad, Rows<X> dk, Rows<X> dgate, int64_t width) {
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    const TokenGrad token = grad.at(row, i);
    store(dk[row] + i, token.dk);
    store(dgate[row] + i, token.dlogit);
  }
}

template <class X>
void backward(const PoolKeysBackward& args, Stream& stream) {
  const int64_t rows = args.k.size(0), width = args.k.size(1), pool = args.ape.size(0);
  const PoolGrad<X> grad = {rows_of<const X>(args.k), rows_of<const X>(args.gate), rows_of<const X>(args.dpooled),
                            rows_of<const float>(args.ape), on_device(args.sequences), pool};
  pool_keys_backward<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
      grad, rows_of<X>(args.dk), rows_of<X>(args.dgate), width);
  CHECK(args.dape.dense());
  add_column_sums([=] __device__(int64_t row, int64_t column) {
    const TokenGrad token = grad.at(row, column % width);
    return token.r == column / width ? token.dlogit : 0.0f;
  }, rows, pool * width, args.dape.f32(), stream);
  check_launch("pool_keys_backward");
}

}  // namespace

template <>
void launch_cuda<PoolKeys>(const PoolKeys& args, Stream& stream) {
  const int64_t rows = args.k.size(0), width = args.k.size(1), pool = args.ape.size(0);
  if (rows == 0) return;
  CHECK_LE(pool, kPoolMax);
  const Open open = {args.open.f32(), args.open.stride(0), args.open.stride(1), args.open.stride(2), args.slots.i32()};
  const DeviceSequences sequences = on_device(args.sequences);
  with_type(args.k.dtype(), [&](auto x) {
    using X = decltype(x);
    const Rows<const X> k = rows_of<const X>(args.k), gate = rows_of<const X>(args.gate);
    with_type(args.pooled.pool.dtype(), [&](auto p) {
      using P = decltype(p);
      complete_pools<X, P><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
          k, gate, rows_of<const float>(args.ape), sequences, open, on_device<P>(args.pooled), width, pool);
    });
    keep_open<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(k, gate, sequences, open,
                                                                                           width, pool);
  });
  check_launch("pool_keys");
}

template <>
void launch_cuda<PoolKeysBackward>(const PoolKeysBackward& args, Stream& stream) {
  if (args.k.size(0) == 0) return;
  CHECK_LE(args.ape.size(0), kPoolMax);
  with_type(args.k.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
}

}  // namespace slipstream::kernels
