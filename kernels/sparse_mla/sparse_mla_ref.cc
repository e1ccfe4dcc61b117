#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/latent_rows/latent_rows.h"
#include "kernels/sparse_mla/attention.h"
#include "kernels/sparse_mla/attention_ref.h"
#include "kernels/sparse_mla/sparse_mla.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// The selection of every query lies in its causal prefix, in ascending order.
absl::Status expect_selection(const Operands& op, const Tensor& indices, const Tensor& counts,
                              const Sequences& sequences, int64_t tokens) {
  if (indices.empty()) return expect_that(op, counts.empty(), "counts without indices");
  RETURN_IF_ERROR(expect_tensor(op, "indices", indices, DType::kI32, {tokens, -1}));
  RETURN_IF_ERROR(expect_tensor(op, "counts", counts, DType::kI32, {tokens}));
  if (!on_host(indices)) return absl::OkStatus();
  for (int64_t b = 0; b < sequences.count(); ++b) {
    for (int64_t t = sequences.begin(b); t < sequences.end(b); ++t) {
      const int64_t position = sequences.cached_tokens(b) + t - sequences.begin(b);
      const int32_t* selected = indices.i32() + t * indices.stride(0);
      const int64_t count = counts.i32()[t];
      RETURN_IF_ERROR(expect_that(op, count >= 0 && count <= indices.size(1), "counts out of range"));
      bool ascending = count == 0 || (selected[0] >= 0 && selected[count - 1] <= position);
      for (int64_t i = 1; i < count; ++i) ascending &= selected[i - 1] < selected[i];
      RETURN_IF_ERROR(expect_that(op, ascending, "indices must ascend from 0 to the query's position"));
    }
  }
  return absl::OkStatus();
}

// Row p of sequence b; of fp8 latents, the values of this layout.
std::vector<float> key_row(const PagedRows& keys, int64_t b, int64_t p, const LatentRow& latents = {}) {
  if (keys.pool.dtype() != DType::kF8E4M3) return stored_row(keys, b, p, 0, keys.width());
  std::vector<float> row(static_cast<size_t>(latents.rank + latents.rope));
  read_latent_row(latents, keys.pool.data<e4m3>() + keys.offset(b, p), 0, latents.rank + latents.rope, row.data());
  return row;
}

// The positions query t of sequence b attends to.
std::vector<int64_t> selection(const Sequences& sequences, const Tensor& indices, const Tensor& counts,
                               int64_t b, int64_t t) {
  std::vector<int64_t> positions;
  const int64_t position = sequences.cached_tokens(b) + t - sequences.begin(b);
  const int64_t count = indices.empty() ? position + 1 : counts.i32()[t];
  for (int64_t i = 0; i < count; ++i) {
    positions.push_back(indices.empty() ? i : indices.i32()[t * indices.stride(0) + i]);
  }
  return positions;
}

// What forward and backward have in common.
template <class Args>
absl::Status expect_attention(const Operands& op, const Args& args) {
  RETURN_IF_ERROR(expect_activation(op, "q", args.q, {-1, -1, -1}));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2);
  RETURN_IF_ERROR(expect_activation(op, "o", args.o, {tokens, heads, -1}));
  RETURN_IF_ERROR(expect_that(op, args.o.size(2) >= 1 && args.o.size(2) <= width, "o: rank must be in 1..W"));
  RETURN_IF_ERROR(expect_supported(op, on_host(args.q) || width <= kAttentionWidthCuda,
                                   "q: rows wider than 640 on CUDA"));
  RETURN_IF_ERROR(expect_sequences(op, args.sequences, tokens));
  return expect_selection(op, args.indices, args.counts, args.sequences, tokens);
}

}  // namespace

absl::Status validate(const SparseMla& args) {
  const Operands op("sparse_mla");
  RETURN_IF_ERROR(expect_attention(op, args));
  const int64_t width = args.q.size(2), rank = args.o.size(2);
  RETURN_IF_ERROR(args.keys.pool.dtype() == DType::kF8E4M3
                      ? expect_latent_rows(op, "keys", args.keys, args.sequences, latent_row(rank, width - rank))
                      : expect_paged(op, "keys", args.keys, args.sequences, width));
  if (args.lse.empty()) return absl::OkStatus();
  return expect_tensor(op, "lse", args.lse, DType::kF32, {args.q.size(0), args.q.size(1)});
}

absl::Status validate(const SparseMlaBackward& args) {
  const Operands op("sparse_mla_backward");
  RETURN_IF_ERROR(expect_attention(op, args));
  RETURN_IF_ERROR(expect_paged(op, "keys", args.keys, args.sequences, args.q.size(2)));
  RETURN_IF_ERROR(expect_whole(op, args.sequences));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2), rank = args.o.size(2);
  RETURN_IF_ERROR(expect_tensor(op, "lse", args.lse, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_activation(op, "d_o", args.d_o, {tokens, heads, rank}));
  RETURN_IF_ERROR(expect_activation(op, "dq", args.dq, {tokens, heads, width}));
  return expect_activation(op, "dkeys", args.dkeys, {tokens, width});
}

void reference(const SparseMla& args) {
  CHECK_OK(validate(args));
  const int64_t heads = args.q.size(1), width = args.q.size(2), rank = args.o.size(2);
  const LatentRow latents = latent_row(rank, width - rank);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); ++t) {
      const std::vector<int64_t> positions = selection(args.sequences, args.indices, args.counts, b, t);
      for (int64_t head = 0; head < heads; ++head) {
        std::vector<double> p;
        for (int64_t s : positions) {
          p.push_back(dot_product(args.q.row(t, head), key_row(args.keys, b, s, latents).data(), width) *
                      args.scale);
        }
        const double lse = softmax(p);
        std::vector<double> o(static_cast<size_t>(rank), 0.0);
        for (size_t i = 0; i < positions.size(); ++i) {
          const std::vector<float> key = key_row(args.keys, b, positions[i], latents);
          for (size_t r = 0; r < o.size(); ++r) o[r] += p[i] * key[r];
        }
        std::copy(o.begin(), o.end(), args.o.row(t, head));
        if (!args.lse.empty()) args.lse.row(t)[head] = static_cast<float>(lse);
      }
    }
  }
}

void reference(const SparseMlaBackward& args) {
  CHECK_OK(validate(args));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2),
                rank = args.o.size(2);
  std::vector<double> dkeys(static_cast<size_t>(tokens * width), 0.0);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t begin = args.sequences.begin(b);
    for (int64_t t = begin; t < args.sequences.end(b); ++t) {
      for (int64_t head = 0; head < heads; ++head) {
        const float* q = args.q.row(t, head);
        const float* d_o = args.d_o.row(t, head);
        const double mean = dot_product(d_o, args.o.row(t, head), rank);
        std::vector<double> dq(static_cast<size_t>(width), 0.0);
        for (int64_t s : selection(args.sequences, args.indices, args.counts, b, t)) {
          const std::vector<float> key = key_row(args.keys, b, s);
          const double p = std::exp(dot_product(q, key.data(), width) * args.scale - args.lse.row(t)[head]);
          const double ds = p * (dot_product(d_o, key.data(), rank) - mean) * args.scale;
          double* dkey = dkeys.data() + (begin + s) * width;
          for (int64_t w = 0; w < width; ++w) dq[static_cast<size_t>(w)] += ds * key[static_cast<size_t>(w)];
          for (int64_t w = 0; w < width; ++w) dkey[w] += ds * q[w];
          for (int64_t r = 0; r < rank; ++r) dkey[r] += p * d_o[r];
        }
        std::copy(dq.begin(), dq.end(), args.dq.row(t, head));
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    std::copy_n(dkeys.data() + t * width, width, args.dkeys.row(t));
  }
}

}  // namespace slipstream::kernels
