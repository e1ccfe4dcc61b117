#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/gqa/gqa.h"
#include "kernels/sparse_mla/attention.h"
#include "kernels/sparse_mla/attention_ref.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// Head `head` of row p of sequence b.
std::vector<float> head_of(const PagedRows& rows, int64_t b, int64_t p, int64_t head, int64_t width) {
  return stored_row(rows, b, p, head * width, width);
}

// What forward and backward have in common.
template <class Args>
absl::Status expect_attention(const Operands& op, const Args& args) {
  RETURN_IF_ERROR(expect_activation(op, "q", args.q, {-1, -1, -1}));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2);
  RETURN_IF_ERROR(expect_that(op, width >= 1, "q: head width must be >= 1"));
  RETURN_IF_ERROR(
      expect_supported(op, on_host(args.q) || width <= kGqaWidthCuda, "q: heads wider than 256 on CUDA"));
  RETURN_IF_ERROR(expect_that(op, args.kv_heads >= 1 && heads >= 1 && heads % args.kv_heads == 0,
                              "kv_heads must divide the heads of q"));
  RETURN_IF_ERROR(expect_activation(op, "o", args.o, {tokens, heads, width}));
  RETURN_IF_ERROR(expect_sequences(op, args.sequences, tokens));
  RETURN_IF_ERROR(expect_paged(op, "k", args.k, args.sequences, args.kv_heads * width));
  return expect_paged(op, "v", args.v, args.sequences, args.kv_heads * width);
}

}  // namespace

absl::Status validate(const Gqa& args) {
  const Operands op("gqa");
  RETURN_IF_ERROR(expect_attention(op, args));
  if (args.lse.empty()) return absl::OkStatus();
  return expect_tensor(op, "lse", args.lse, DType::kF32, {args.q.size(0), args.q.size(1)});
}

absl::Status validate(const GqaBackward& args) {
  const Operands op("gqa_backward");
  RETURN_IF_ERROR(expect_attention(op, args));
  RETURN_IF_ERROR(expect_whole(op, args.sequences));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2);
  RETURN_IF_ERROR(expect_tensor(op, "lse", args.lse, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_activation(op, "d_o", args.d_o, {tokens, heads, width}));
  RETURN_IF_ERROR(expect_activation(op, "dq", args.dq, {tokens, heads, width}));
  RETURN_IF_ERROR(expect_activation(op, "dk", args.dk, {tokens, args.kv_heads, width}));
  return expect_activation(op, "dv", args.dv, {tokens, args.kv_heads, width});
}

void reference(const Gqa& args) {
  CHECK_OK(validate(args));
  const int64_t heads = args.q.size(1), width = args.q.size(2), group = heads / args.kv_heads;
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); ++t) {
      const int64_t position = args.sequences.cached_tokens(b) + t - args.sequences.begin(b);
      for (int64_t head = 0; head < heads; ++head) {
        std::vector<double> p;
        for (int64_t s = 0; s <= position; ++s) {
          const std::vector<float> key = head_of(args.k, b, s, head / group, width);
          p.push_back(dot_product(args.q.row(t, head), key.data(), width) * args.scale);
        }
        const double lse = softmax(p);
        std::vector<double> o(static_cast<size_t>(width), 0.0);
        for (int64_t s = 0; s <= position; ++s) {
          const std::vector<float> value = head_of(args.v, b, s, head / group, width);
          for (size_t r = 0; r < o.size(); ++r) o[r] += p[static_cast<size_t>(s)] * value[r];
        }
        std::copy(o.begin(), o.end(), args.o.row(t, head));
        if (!args.lse.empty()) args.lse.row(t)[head] = static_cast<float>(lse);
      }
    }
  }
}

void reference(const GqaBackward& args) {
  CHECK_OK(validate(args));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2);
  const int64_t group = heads / args.kv_heads;
  std::vector<double> dk(static_cast<size_t>(tokens * args.kv_heads * width), 0.0), dv = dk;
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t begin = args.sequences.begin(b);
    for (int64_t t = begin; t < args.sequences.end(b); ++t) {
      for (int64_t head = 0; head < heads; ++head) {
        const float* q = args.q.row(t, head);
        const float* d_o = args.d_o.row(t, head);
        const double mean = dot_product(d_o, args.o.row(t, head), width);
        std::vector<double> dq(static_cast<size_t>(width), 0.0);
        for (int64_t s = 0; s <= t - begin; ++s) {
          const std::vector<float> key = head_of(args.k, b, s, head / group, width);
          const std::vector<float> value = head_of(args.v, b, s, head / group, width);
          const double p = std::exp(dot_product(q, key.data(), width) * args.scale - args.lse.row(t)[head]);
          const double ds = p * (dot_product(d_o, value.data(), width) - mean) * args.scale;
          const int64_t row = ((begin + s) * args.kv_heads + head / group) * width;
          for (int64_t i = 0; i < width; ++i) {
            dq[static_cast<size_t>(i)] += ds * key[static_cast<size_t>(i)];
            dk[static_cast<size_t>(row + i)] += ds * q[i];
            dv[static_cast<size_t>(row + i)] += p * d_o[i];
          }
        }
        std::copy(dq.begin(), dq.end(), args.dq.row(t, head));
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t g = 0; g < args.kv_heads; ++g) {
      std::copy_n(dk.data() + (t * args.kv_heads + g) * width, width, args.dk.row(t, g));
      std::copy_n(dv.data() + (t * args.kv_heads + g) * width, width, args.dv.row(t, g));
    }
  }
}

}  // namespace slipstream::kernels
