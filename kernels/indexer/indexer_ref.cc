#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/indexer/indexer.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// Rows of keys that a sequence has at the end of the batch: tokens, or complete pools.
int64_t key_rows(const Sequences& sequences, int64_t b, int64_t pool) {
  return (sequences.cached_tokens(b) + sequences.end(b) - sequences.begin(b)) / pool;
}

int64_t longest_sequence(const Sequences& sequences) {
  int64_t longest = 0;
  for (int64_t b = 0; b < sequences.count(); ++b) longest = std::max(longest, key_rows(sequences, b, 1));
  return longest;
}

// What the three operators have in common.
absl::Status expect_inputs(const Operands& op, const Tensor& q, const Tensor& weights, const PagedRows& keys,
                           const Sequences& sequences, int64_t pool) {
  RETURN_IF_ERROR(expect_activation(op, "q", q, {-1, -1, -1}));
  RETURN_IF_ERROR(expect_tensor(op, "weights", weights, DType::kF32, {q.size(0), q.size(1)}));
  RETURN_IF_ERROR(expect_sequences(op, sequences, q.size(0)));
  RETURN_IF_ERROR(expect_that(op, pool >= 1, "pool must be >= 1"));
  RETURN_IF_ERROR(expect_paged(op, "keys", keys, sequences, q.size(2), pool));
  if (on_host(q)) return absl::OkStatus();
  RETURN_IF_ERROR(expect_supported(op, q.size(1) <= kIndexerHeadsCuda && q.size(2) <= kIndexerWidthCuda,
                                   "q: more than 64 heads or 256 channels on CUDA"));
  // Tensor cores read whole vectors.
  const auto vectors = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0 && t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0;
  };
  const bool bf16s = q.dtype() == DType::kBf16 && keys.pool.dtype() == DType::kBf16;
  return expect_that(op, !bf16s || q.size(2) % 16 != 0 || (vectors(q) && vectors(keys.pool)),
                     "q, keys: bf16 rows must be 16-byte aligned on CUDA");
}

absl::Status expect_rows(const Operands& op, const Tensor& rows, const Sequences& sequences, int64_t pool) {
  RETURN_IF_ERROR(expect_tensor(op, "rows", rows, DType::kI32, {sequences.rows(), -1}));
  if (!on_host(rows)) return absl::OkStatus();
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const int64_t limit = key_rows(sequences, b, pool);
    for (int64_t t = sequences.begin(b); t < sequences.end(b); ++t) {
      const int32_t* row = rows.i32() + t * rows.stride(0);
      int32_t low = -1, high = -1;
      for (int64_t s = 0; s < rows.size(1); ++s) {
        low = std::min(low, row[s]);
        high = std::max(high, row[s]);
      }
      RETURN_IF_ERROR(expect_that(op, low >= -1 && high < limit, "rows: row out of range"));
    }
  }
  return absl::OkStatus();
}

float key_value(const PagedRows& keys, int64_t b, int64_t row, int64_t channel) {
  const int64_t at = keys.offset(b, row) + channel;
  return keys.pool.dtype() == DType::kBf16 ? to_f32(keys.pool.bf()[at]) : keys.pool.f32()[at];
}

// q[t, head] · keys[row] * key_scale.
template <class Args>
float head_product(const Args& args, int64_t b, int64_t t, int64_t head, int64_t row) {
  const float* q = args.q.row(t) + head * args.q.stride(1);
  float product = 0.0f;
  for (int64_t i = 0; i < args.q.size(2); ++i)
    product = std::fma(q[i], key_value(args.keys, b, row, i), product);
  return product * args.key_scale;
}

template <class Args>
float score(const Args& args, int64_t b, int64_t t, int64_t row) {
  float sum = 0.0f;
  for (int64_t head = 0; head < args.q.size(1); ++head) {
    const float product = head_product(args, b, t, head, row);
    sum = std::fma(args.weights.row(t)[head], product < 0.0f ? 0.0f : product, sum);  // NaN stays NaN
  }
  return sum;
}

}  // namespace

int64_t selection_width(int64_t topk, int64_t pool, bool tail, int64_t longest) {
  return std::min(topk + (tail ? pool - 1 : 0), longest);
}

absl::Status validate(const IndexerSelect& args) {
  const Operands op("indexer_select");
  RETURN_IF_ERROR(expect_inputs(op, args.q, args.weights, args.keys, args.sequences, args.pool));
  RETURN_IF_ERROR(expect_that(op, args.topk >= 1 && args.topk % args.pool == 0,
                              "topk must be a positive multiple of pool"));
  const int64_t longest = longest_sequence(args.sequences);
  RETURN_IF_ERROR(
      expect_that(op, longest <= std::numeric_limits<int32_t>::max(), "positions must fit 32 bits"));
  RETURN_IF_ERROR(expect_tensor(op, "indices", args.indices, DType::kI32, {args.q.size(0), -1}));
  RETURN_IF_ERROR(
      expect_that(op, args.indices.size(1) >= selection_width(args.topk, args.pool, args.tail, longest),
                  "indices: fewer columns than selection_width()"));
  return expect_tensor(op, "counts", args.counts, DType::kI32, {args.q.size(0)});
}

absl::Status validate(const IndexerScores& args) {
  const Operands op("indexer_scores");
  RETURN_IF_ERROR(expect_inputs(op, args.q, args.weights, args.keys, args.sequences, args.pool));
  RETURN_IF_ERROR(expect_rows(op, args.rows, args.sequences, args.pool));
  return expect_tensor(op, "scores", args.scores, DType::kF32, {args.q.size(0), args.rows.size(1)});
}

absl::Status validate(const IndexerScoresBackward& args) {
  const Operands op("indexer_scores_backward");
  RETURN_IF_ERROR(expect_inputs(op, args.q, args.weights, args.keys, args.sequences, args.pool));
  RETURN_IF_ERROR(expect_rows(op, args.rows, args.sequences, args.pool));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2);
  RETURN_IF_ERROR(expect_whole(op, args.sequences));
  int64_t rows = 0;
  for (int64_t b = 0; b < args.sequences.count(); ++b) rows += key_rows(args.sequences, b, args.pool);
  RETURN_IF_ERROR(expect_tensor(op, "dscores", args.dscores, DType::kF32, {tokens, args.rows.size(1)}));
  RETURN_IF_ERROR(expect_activation(op, "dq", args.dq, {tokens, heads, width}));
  RETURN_IF_ERROR(expect_tensor(op, "dweights", args.dweights, DType::kF32, {tokens, heads}));
  return expect_activation(op, "dkeys", args.dkeys, {rows, width});
}

void reference(const IndexerSelect& args) {
  CHECK_OK(validate(args));
  const Sequences& sequences = args.sequences;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    for (int64_t t = sequences.begin(b); t < sequences.end(b); ++t) {
      const int64_t position = sequences.cached_tokens(b) + t - sequences.begin(b);
      const int64_t candidates = (position + 1) / args.pool;
      std::vector<float> scores(static_cast<size_t>(candidates));
      std::vector<int64_t> chosen(static_cast<size_t>(candidates));
      std::iota(chosen.begin(), chosen.end(), 0);
      if (candidates > args.topk / args.pool) {
        for (int64_t row = 0; row < candidates; ++row)
          scores[static_cast<size_t>(row)] = score(args, b, t, row);
        std::stable_sort(chosen.begin(), chosen.end(), [&](int64_t i, int64_t j) {
          const float a = scores[static_cast<size_t>(i)], c = scores[static_cast<size_t>(j)];
          return a > c || (!std::isnan(a) && std::isnan(c));
        });
        chosen.resize(static_cast<size_t>(args.topk / args.pool));
        std::sort(chosen.begin(), chosen.end());
      }
      std::vector<int32_t> selection;
      for (int64_t row : chosen) {
        for (int64_t r = 0; r < args.pool; ++r)
          selection.push_back(static_cast<int32_t>(row * args.pool + r));
      }
      for (int64_t s = candidates * args.pool; args.tail && s <= position; ++s) {
        selection.push_back(static_cast<int32_t>(s));
      }
      args.counts.i32()[t] = static_cast<int32_t>(selection.size());
      selection.resize(static_cast<size_t>(args.indices.size(1)), -1);
      std::copy(selection.begin(), selection.end(), args.indices.i32() + t * args.indices.stride(0));
    }
  }
}

void reference(const IndexerScores& args) {
  CHECK_OK(validate(args));
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); ++t) {
      for (int64_t s = 0; s < args.rows.size(1); ++s) {
        const int32_t row = args.rows.i32()[t * args.rows.stride(0) + s];
        args.scores.row(t)[s] = row < 0 ? 0.0f : score(args, b, t, row);
      }
    }
  }
}

void reference(const IndexerScoresBackward& args) {
  CHECK_OK(validate(args));
  const int64_t heads = args.q.size(1), width = args.q.size(2), tokens = args.q.size(0);
  std::vector<double> dq(static_cast<size_t>(tokens * heads * width)),
      dweights(static_cast<size_t>(tokens * heads));
  std::vector<double> dkeys(static_cast<size_t>(args.dkeys.numel()));
  int64_t first_row = 0;  // of the sequence, in dkeys
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); ++t) {
      for (int64_t s = 0; s < args.rows.size(1); ++s) {
        const int32_t row = args.rows.i32()[t * args.rows.stride(0) + s];
        if (row < 0) continue;
        const double dscore = args.dscores.row(t)[s];
        for (int64_t head = 0; head < heads; ++head) {
          const double product = head_product(args, b, t, head, row);
          if (!(product > 0.0)) continue;
          dweights[static_cast<size_t>(t * heads + head)] += dscore * product;
          const double slope = dscore * args.weights.row(t)[head] * args.key_scale;
          for (int64_t i = 0; i < width; ++i) {
            const double q = args.q.row(t)[head * args.q.stride(1) + i];
            dq[static_cast<size_t>((t * heads + head) * width + i)] +=
                slope * key_value(args.keys, b, row, i);
            dkeys[static_cast<size_t>((first_row + row) * width + i)] += slope * q;
          }
        }
      }
    }
    first_row += key_rows(args.sequences, b, args.pool);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t head = 0; head < heads; ++head) {
      args.dweights.row(t)[head] = static_cast<float>(dweights[static_cast<size_t>(t * heads + head)]);
      for (int64_t i = 0; i < width; ++i) {
        args.dq.row(t)[head * args.dq.stride(1) + i] =
            static_cast<float>(dq[static_cast<size_t>((t * heads + head) * width + i)]);
      }
    }
  }
  for (int64_t row = 0; row < args.dkeys.size(0); ++row) {
    for (int64_t i = 0; i < width; ++i) {
      args.dkeys.row(row)[i] = static_cast<float>(dkeys[static_cast<size_t>(row * width + i)]);
    }
  }
}

}  // namespace slipstream::kernels
