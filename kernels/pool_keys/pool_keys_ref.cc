#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/pool_keys/pool_keys.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// softmax over r of gates[r] + ape[r, channel].
std::vector<double> shares(const std::vector<float>& gates, const Tensor& ape, int64_t channel) {
  std::vector<double> out(gates.size());
  double largest = -std::numeric_limits<double>::infinity(), sum = 0.0;
  for (size_t r = 0; r < gates.size(); ++r) {
    out[r] = double{gates[r]} + ape.row(static_cast<int64_t>(r))[channel];
    largest = std::max(largest, out[r]);
  }
  for (double& value : out) sum += value = std::exp(value - largest);
  for (double& value : out) value /= sum;
  return out;
}

// What forward and backward read of every token.
template <class Args>
absl::Status expect_tokens(const Operands& op, const Args& args) {
  RETURN_IF_ERROR(expect_activation(op, "k", args.k, {-1, -1}));
  const int64_t tokens = args.k.size(0), width = args.k.size(1);
  RETURN_IF_ERROR(expect_activation(op, "gate", args.gate, {tokens, width}));
  RETURN_IF_ERROR(expect_tensor(op, "ape", args.ape, DType::kF32, {-1, width}));
  RETURN_IF_ERROR(expect_that(op, args.ape.size(0) >= 1, "ape must have a row for each token of a pool"));
  return expect_sequences(op, args.sequences, tokens);
}

}  // namespace

absl::Status validate(const PoolKeys& args) {
  const Operands op("pool_keys");
  RETURN_IF_ERROR(expect_tokens(op, args));
  const int64_t width = args.k.size(1), pool = args.ape.size(0);
  RETURN_IF_ERROR(expect_tensor(op, "open", args.open, DType::kF32, {-1, pool, 2, width}));
  RETURN_IF_ERROR(expect_slots(op, args.slots, args.sequences, args.open.size(0)));
  return expect_paged(op, "pooled", args.pooled, args.sequences, width, pool);
}

absl::Status validate(const PoolKeysBackward& args) {
  const Operands op("pool_keys_backward");
  RETURN_IF_ERROR(expect_tokens(op, args));
  RETURN_IF_ERROR(expect_whole(op, args.sequences));
  const int64_t tokens = args.k.size(0), width = args.k.size(1), pool = args.ape.size(0);
  int64_t pools = 0;
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    pools += (args.sequences.end(b) - args.sequences.begin(b)) / pool;
  }
  RETURN_IF_ERROR(expect_activation(op, "dpooled", args.dpooled, {pools, width}));
  RETURN_IF_ERROR(expect_activation(op, "dk", args.dk, {tokens, width}));
  RETURN_IF_ERROR(expect_activation(op, "dgate", args.dgate, {tokens, width}));
  return expect_tensor(op, "dape", args.dape, DType::kF32, {pool, width});
}

// Token by token: into the open pool, and out of it when it is full.
void reference(const PoolKeys& args) {
  CHECK_OK(validate(args));
  const int64_t pool = args.ape.size(0), width = args.k.size(1);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const Tensor open = args.open[args.slots.i32()[b]];
    for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); ++t) {
      const int64_t position = args.sequences.cached_tokens(b) + t - args.sequences.begin(b);
      std::copy_n(args.k.row(t), width, open[position % pool].row(0));
      std::copy_n(args.gate.row(t), width, open[position % pool].row(1));
      if ((position + 1) % pool != 0) continue;
      for (int64_t i = 0; i < width; ++i) {
        std::vector<float> gates;
        for (int64_t r = 0; r < pool; ++r) gates.push_back(open[r].row(1)[i]);
        const std::vector<double> share = shares(gates, args.ape, i);
        double sum = 0.0;
        for (int64_t r = 0; r < pool; ++r) sum += share[static_cast<size_t>(r)] * open[r].row(0)[i];
        const int64_t at = args.pooled.offset(b, position / pool) + i;
        if (args.pooled.pool.dtype() == DType::kBf16) {
          args.pooled.pool.bf()[at] = to_bf16(static_cast<float>(sum));
        } else {
          args.pooled.pool.f32()[at] = static_cast<float>(sum);
        }
      }
    }
  }
}

void reference(const PoolKeysBackward& args) {
  CHECK_OK(validate(args));
  const int64_t pool = args.ape.size(0), width = args.k.size(1);
  int64_t first_pool = 0;  // of the sequence, in dpooled
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t begin = args.sequences.begin(b), pools = (args.sequences.end(b) - begin) / pool;
    for (int64_t t = begin; t < args.sequences.end(b); ++t) {
      std::fill_n(args.dk.row(t), width, 0.0f);
      std::fill_n(args.dgate.row(t), width, 0.0f);
    }
    for (int64_t p = 0; p < pools; ++p) {
      for (int64_t i = 0; i < width; ++i) {
        const double slope = args.dpooled.row(first_pool + p)[i];
        std::vector<float> gates;
        for (int64_t r = 0; r < pool; ++r) gates.push_back(args.gate.row(begin + p * pool + r)[i]);
        const std::vector<double> share = shares(gates, args.ape, i);
        double mean = 0.0;
        for (int64_t r = 0; r < pool; ++r)
          mean += share[static_cast<size_t>(r)] * args.k.row(begin + p * pool + r)[i];
        for (int64_t r = 0; r < pool; ++r) {
          const int64_t t = begin + p * pool + r;
          const double own = share[static_cast<size_t>(r)];
          const double dlogit = slope * own * (args.k.row(t)[i] - mean);
          args.dk.row(t)[i] = static_cast<float>(slope * own);
          args.dgate.row(t)[i] = static_cast<float>(dlogit);
          args.dape.row(r)[i] += static_cast<float>(dlogit);
        }
      }
    }
    first_pool += pools;
  }
}

}  // namespace slipstream::kernels
