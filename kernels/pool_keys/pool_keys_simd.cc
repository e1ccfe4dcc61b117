#include "kernels/pool_keys/pool_keys.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/pool_keys/pool_keys_simd.cc"
#include "hwy/foreach_target.h"

#include "kernels/simd/lanes-inl.h"

#include <algorithm>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// Where the values of one pool's tokens are.
struct PoolRows {
  const float** k;
  const float** gate;
  const float** ape;
  int64_t size;
};

PoolRows make_pool_rows(const Tensor& ape, Worker& worker) {
  const int64_t size = ape.size(0);
  const PoolRows rows{.k = worker.scratch<const float*>(size),
                      .gate = worker.scratch<const float*>(size),
                      .ape = worker.scratch<const float*>(size),
                      .size = size};
  for (int64_t r = 0; r < size; ++r) rows.ape[r] = ape.row(r);
  return rows;
}

// shares[r] = softmax over r of gate[r] + ape[r], sixteen channels from `channel`. Missing lanes read as 0: a
// uniform softmax, never written.
template <class Chunk>
HWY_INLINE void pool_shares(const PoolRows& rows, int64_t channel, Chunk chunk, Lanes* shares) {
  Lanes largest = broadcast(-std::numeric_limits<float>::infinity());
  for (int64_t r = 0; r < rows.size; ++r) {
    shares[r] = add(chunk.load(rows.gate[r] + channel), chunk.load(rows.ape[r] + channel));
    largest = max(largest, shares[r]);
  }
  Lanes sum = zero_lanes();
  for (int64_t r = 0; r < rows.size; ++r) {
    shares[r] = exp(sub(shares[r], largest));
    sum = add(sum, shares[r]);
  }
  for (int64_t r = 0; r < rows.size; ++r) shares[r] = div(shares[r], sum);
}

template <class Chunk>
HWY_INLINE Lanes pool_mean(const PoolRows& rows, int64_t channel, Chunk chunk, const Lanes* shares) {
  Lanes mean = zero_lanes();
  for (int64_t r = 0; r < rows.size; ++r) mean = fma(shares[r], chunk.load(rows.k[r] + channel), mean);
  return mean;
}

template <class T>
void pool_row(const PoolRows& rows, int64_t width, Lanes* shares, T* out) {
  for_lanes(width, [&](int64_t channel, auto chunk) HWY_ATTR {
    pool_shares(rows, channel, chunk, shares);
    chunk.store(pool_mean(rows, channel, chunk, shares), out + channel);
  });
}

// The pools whose last token is one of rows [begin, end) of the batch; earlier tokens come from the batch or,
// before it, from the open pool.
void pool_keys_rows(const PoolKeys& args, int64_t begin, int64_t end, Worker& worker) {
  const int64_t pool = args.ape.size(0);
  const PoolRows rows = make_pool_rows(args.ape, worker);
  Lanes* shares = worker.scratch<Lanes>(pool);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t first = args.sequences.begin(b), cached = args.sequences.cached_tokens(b);
    const float* open = args.open.f32() + args.slots.i32()[b] * args.open.stride(0);
    const int64_t from = std::max(begin, first), to = std::min(end, args.sequences.end(b));
    // The first row at or after `from` that ends a pool.
    const int64_t step = (cached + from - first) % pool;
    for (int64_t t = from + pool - 1 - step; t < to; t += pool) {
      for (int64_t r = 0; r < pool; ++r) {
        const int64_t row = t - (pool - 1) + r;
        rows.k[r] = row >= first ? args.k.row(row) : open + r * args.open.stride(1);
        rows.gate[r] =
            row >= first ? args.gate.row(row) : open + r * args.open.stride(1) + args.open.stride(2);
      }
      const int64_t at = args.pooled.offset(b, (cached + t - first) / pool);
      if (args.pooled.pool.dtype() == DType::kBf16) {
        pool_row(rows, args.k.size(1), shares, args.pooled.pool.bf() + at);
      } else {
        pool_row(rows, args.k.size(1), shares, args.pooled.pool.f32() + at);
      }
    }
  }
}

// Pools [begin, end) of one sequence whose first row is `first` and whose first pool is `first_pool`.
void pool_keys_backward_rows(const PoolKeysBackward& args, int64_t first, int64_t first_pool, int64_t begin,
                             int64_t end, Worker& worker) {
  const int64_t pool = args.ape.size(0);
  const PoolRows rows = make_pool_rows(args.ape, worker);
  Lanes* shares = worker.scratch<Lanes>(pool);
  for (int64_t p = begin; p < end; ++p) {
    const int64_t row = first + p * pool;
    for (int64_t r = 0; r < pool; ++r) {
      rows.k[r] = args.k.row(row + r);
      rows.gate[r] = args.gate.row(row + r);
    }
    for_lanes(args.k.size(1), [&](int64_t channel, auto chunk) HWY_ATTR {
      pool_shares(rows, channel, chunk, shares);
      const Lanes mean = pool_mean(rows, channel, chunk, shares);
      const Lanes slope = chunk.load(args.dpooled.row(first_pool + p) + channel);
      for (int64_t r = 0; r < pool; ++r) {
        const Lanes dk = mul(slope, shares[r]);
        chunk.store(dk, args.dk.row(row + r) + channel);
        chunk.store(mul(dk, sub(chunk.load(rows.k[r] + channel), mean)), args.dgate.row(row + r) + channel);
      }
    });
  }
}

// dape += dgate over all tokens, channels [begin, end): one thread owns a channel and adds in the order of
// the rows.
void pool_keys_ape_grad(const PoolKeysBackward& args, int64_t begin, int64_t end) {
  const int64_t pool = args.ape.size(0);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t first = args.sequences.begin(b), pools = (args.sequences.end(b) - first) / pool;
    for (int64_t t = 0; t < pools * pool; ++t) {
      const float* dgate = args.dgate.row(first + t) + begin;
      float* dape = args.dape.row(t % pool) + begin;
      for_lanes(end - begin, [&](int64_t i, auto chunk) HWY_ATTR {
        chunk.store(add(chunk.load(dape + i), chunk.load(dgate + i)), dape + i);
      });
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(pool_keys_rows);
HWY_EXPORT(pool_keys_backward_rows);
HWY_EXPORT(pool_keys_ape_grad);

void launch(const PoolKeys& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t pool = args.ape.size(0), width = args.k.size(1);
  stream.parallel_for(args.k.size(0), task_rows(width),
                      [&](int64_t begin, int64_t end, Worker& worker) {
                        HWY_DYNAMIC_DISPATCH(pool_keys_rows)(args, begin, end, worker);
                      });
  // The open pools last: the pools above were read from them. A handful of rows, not worth a thread.
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t first = args.sequences.begin(b), end = args.sequences.end(b);
    const int64_t tokens = args.sequences.cached_tokens(b) + end - first;
    float* open = args.open.f32() + args.slots.i32()[b] * args.open.stride(0);
    for (int64_t t = std::max(first, end - tokens % pool); t < end; ++t) {
      float* row = open + (tokens - (end - t)) % pool * args.open.stride(1);
      std::copy_n(args.k.row(t), width, row);
      std::copy_n(args.gate.row(t), width, row + args.open.stride(2));
    }
  }
}

void launch(const PoolKeysBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t pool = args.ape.size(0), width = args.k.size(1);
  int64_t first_pool = 0;
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t first = args.sequences.begin(b), tokens = args.sequences.end(b) - first;
    const int64_t grain = task_rows(pool * width);
    stream.parallel_for(tokens / pool, grain, [&](int64_t begin, int64_t end, Worker& worker) {
      HWY_DYNAMIC_DISPATCH(pool_keys_backward_rows)(args, first, first_pool, begin, end, worker);
    });
    for (int64_t t = first + tokens / pool * pool; t < first + tokens; ++t) {
      std::fill_n(args.dk.row(t), width, 0.0f);
      std::fill_n(args.dgate.row(t), width, 0.0f);
    }
    first_pool += tokens / pool;
  }
  stream.parallel_for(width, 32, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(pool_keys_ape_grad)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
