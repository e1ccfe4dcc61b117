#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/sparse_mla/sparse_mla.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// The selection of every query lies in its causal prefix, in ascending order.
absl::Status expect_selection(const char* op, const Tensor& indices, const Tensor& counts,
                              const Sequences& sequences, int64_t tokens) {
  if (indices.empty()) return expect_that(op, counts.empty(), "counts without indices");
  RETURN_IF_ERROR(expect_tensor(op, "indices", indices, DType::kI32, {tokens, -1}));
  RETURN_IF_ERROR(expect_tensor(op, "counts", counts, DType::kI32, {tokens}));
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

// Row p of sequence b as fp32.
std::vector<float> key_row(const PagedRows& keys, int64_t b, int64_t p) {
  const int64_t offset = keys.offset(b, p);
  std::vector<float> row;
  for (int64_t w = 0; w < keys.width(); ++w) {
    row.push_back(keys.pool.dtype() == DType::kBf16 ? to_f32(keys.pool.bf()[offset + w])
                                                    : keys.pool.f32()[offset + w]);
  }
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

const float* head_row(const Tensor& x, int64_t t, int64_t head) {
  return x.f32() + t * x.stride(0) + head * x.stride(1);
}
float* mutable_head_row(const Tensor& x, int64_t t, int64_t head) {
  return x.f32() + t * x.stride(0) + head * x.stride(1);
}

double dot(const float* a, const float* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{a[i]} * b[i];
  return sum;
}

}  // namespace

absl::Status validate(const SparseMla& args) {
  constexpr const char* kOp = "sparse_mla";
  RETURN_IF_ERROR(expect_tensor(kOp, "q", args.q, DType::kF32, {-1, -1, -1}));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2);
  RETURN_IF_ERROR(expect_tensor(kOp, "o", args.o, DType::kF32, {tokens, heads, -1}));
  RETURN_IF_ERROR(
      expect_that(kOp, args.o.size(2) >= 1 && args.o.size(2) <= width, "o: rank must be in 1..W"));
  if (!args.lse.empty()) RETURN_IF_ERROR(expect_tensor(kOp, "lse", args.lse, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_sequences(kOp, args.sequences, tokens));
  RETURN_IF_ERROR(expect_paged(kOp, "keys", args.keys, args.sequences, width));
  return expect_selection(kOp, args.indices, args.counts, args.sequences, tokens);
}

absl::Status validate(const SparseMlaBackward& args) {
  constexpr const char* kOp = "sparse_mla_backward";
  RETURN_IF_ERROR(expect_tensor(kOp, "q", args.q, DType::kF32, {-1, -1, -1}));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2);
  RETURN_IF_ERROR(expect_tensor(kOp, "o", args.o, DType::kF32, {tokens, heads, -1}));
  const int64_t rank = args.o.size(2);
  RETURN_IF_ERROR(expect_that(kOp, rank >= 1 && rank <= width, "o: rank must be in 1..W"));
  RETURN_IF_ERROR(expect_tensor(kOp, "lse", args.lse, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_tensor(kOp, "d_o", args.d_o, DType::kF32, {tokens, heads, rank}));
  RETURN_IF_ERROR(expect_tensor(kOp, "dq", args.dq, DType::kF32, {tokens, heads, width}));
  RETURN_IF_ERROR(expect_tensor(kOp, "dkeys", args.dkeys, DType::kF32, {tokens, width}));
  RETURN_IF_ERROR(expect_sequences(kOp, args.sequences, tokens));
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    RETURN_IF_ERROR(expect_that(kOp, args.sequences.cached_tokens(b) == 0, "cached must be 0"));
  }
  RETURN_IF_ERROR(expect_paged(kOp, "keys", args.keys, args.sequences, width));
  return expect_selection(kOp, args.indices, args.counts, args.sequences, tokens);
}

void reference(const SparseMla& args) {
  CHECK_OK(validate(args));
  const int64_t heads = args.q.size(1), width = args.q.size(2), rank = args.o.size(2);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); ++t) {
      const std::vector<int64_t> positions = selection(args.sequences, args.indices, args.counts, b, t);
      for (int64_t head = 0; head < heads; ++head) {
        std::vector<double> p;
        for (int64_t s : positions) {
          p.push_back(dot(head_row(args.q, t, head), key_row(args.keys, b, s).data(), width) * args.scale);
        }
        const double top = p.empty() ? 0.0 : *std::max_element(p.begin(), p.end());
        double sum = 0.0;
        for (double& x : p) sum += x = std::exp(x - top);
        std::vector<double> o(static_cast<size_t>(rank), 0.0);
        for (size_t i = 0; i < positions.size(); ++i) {
          const std::vector<float> key = key_row(args.keys, b, positions[i]);
          for (size_t r = 0; r < o.size(); ++r) o[r] += p[i] / sum * key[r];
        }
        std::copy(o.begin(), o.end(), mutable_head_row(args.o, t, head));
        if (args.lse.empty()) continue;
        args.lse.row(t)[head] =
            p.empty() ? -std::numeric_limits<float>::infinity() : static_cast<float>(top + std::log(sum));
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
        const float* q = head_row(args.q, t, head);
        const float* d_o = head_row(args.d_o, t, head);
        const double mean = dot(d_o, head_row(args.o, t, head), rank);
        std::vector<double> dq(static_cast<size_t>(width), 0.0);
        for (int64_t s : selection(args.sequences, args.indices, args.counts, b, t)) {
          const std::vector<float> key = key_row(args.keys, b, s);
          const double p = std::exp(dot(q, key.data(), width) * args.scale - args.lse.row(t)[head]);
          const double ds = p * (dot(d_o, key.data(), rank) - mean) * args.scale;
          double* dkey = dkeys.data() + (begin + s) * width;
          for (int64_t w = 0; w < width; ++w) dq[static_cast<size_t>(w)] += ds * key[static_cast<size_t>(w)];
          for (int64_t w = 0; w < width; ++w) dkey[w] += ds * q[w];
          for (int64_t r = 0; r < rank; ++r) dkey[r] += p * d_o[r];
        }
        std::copy(dq.begin(), dq.end(), mutable_head_row(args.dq, t, head));
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    std::copy_n(dkeys.data() + t * width, width, args.dkeys.row(t));
  }
}

}  // namespace slipstream::kernels
