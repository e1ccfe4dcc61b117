#include "kernels/sparse_mla/sparse_mla.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sparse_mla/sparse_mla_simd.cc"
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "hwy/foreach_target.h"
#include "kernels/sparse_mla/attention.h"
#include "kernels/sparse_mla/attention_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kRowsMax = 96;  // of a group
constexpr int64_t kKeyBlock =
    128;  // keys whose row pointers (and fp32 copies) are at hand at a time; >= kRowsMax

// One head of a paged store, seen by one group.
struct KeySource {
  KeySource(const PagedRows& rows, const AttentionGroup& g, int64_t head_width)
      : pool(rows.pool.raw()),
        is_bf16(rows.pool.dtype() == DType::kBf16),
        page_stride(rows.pool.stride(0)),
        row_stride(rows.pool.stride(1)),
        pages(rows.page_table.i32() + g.sequence * rows.page_table.stride(0)),
        column(g.kv_head * head_width),
        width(head_width),
        selection(g.selection) {}

  const void* pool;
  bool is_bf16;
  int64_t page_stride, row_stride;
  const int32_t* pages;
  int64_t column, width;
  const int32_t* selection;

  int64_t offset(int64_t i) const {
    const int64_t position = selection == nullptr ? i : selection[i];
    return pages[position / kPageRows] * page_stride + position % kPageRows * row_stride + column;
  }
  int64_t copy_stride() const { return (width + kLanes - 1) / kLanes * kLanes; }
};

// out[j] = row first + j of the source as fp32, j < count. Rows are copied, columns [begin, end) of them,
// when they are bf16 or when `padded` asks for zeros up to a multiple of four values.
HWY_INLINE void gather_rows(const KeySource& source, int64_t first, int64_t count, int64_t begin, int64_t end,
                            bool padded, float* copies, const float** out) {
  const bool in_place = !source.is_bf16 && (!padded || end % kChains == 0);
  for (int64_t j = 0; j < count; ++j) {
    const int64_t offset = source.offset(first + j);
    if (in_place) {
      out[j] = static_cast<const float*>(source.pool) + offset;
      continue;
    }
    float* row = copies + j * source.copy_stride();
    out[j] = row;
    if (source.is_bf16) {
      const bf16* from = static_cast<const bf16*>(source.pool) + offset;
      for_lanes(end - begin, [&](int64_t i, auto chunk)
                                 HWY_ATTR { chunk.store(chunk.load(from + begin + i), row + begin + i); });
    } else {
      std::memcpy(row + begin, static_cast<const float*>(source.pool) + offset + begin,
                  sizeof(float) * static_cast<size_t>(end - begin));
    }
    for (int64_t i = end; i % kChains != 0; ++i) row[i] = 0.0f;
  }
}

// out[m] = the row of x [T, h, *] of row m of the group.
template <class T>
HWY_INLINE void group_rows(const Tensor& x, const AttentionGroup& g, T** out) {
  for (int64_t i = 0; i < g.queries; ++i) {
    for (int64_t j = 0; j < g.heads; ++j) {
      out[i * g.heads + j] = x.f32() + (g.row + i) * x.stride(0) + (g.head + j) * x.stride(1);
    }
  }
}

// s[m, i] = row m of x · key i, for keys [begin, end); s has the group's stride.
void group_dots(const KeySource& source, const AttentionGroup& g, const Tensor& x, int64_t begin, int64_t end,
                float* s, Worker& worker) {
  const float* rows[kRowsMax];
  group_rows(x, g, rows);
  float* packed = worker.scratch<float>(packed_size(g.rows(), source.width));
  float* copies = worker.scratch<float>(kKeyBlock * source.copy_stride());
  pack_rows(g.rows(), source.width, rows, packed);
  for (int64_t first = begin; first < end; first += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, end - first);
    const float* keys[kKeyBlock];
    gather_rows(source, first, count, 0, source.width, /*padded=*/true, copies, keys);
    dot_products(g.rows(), source.width, packed, keys, count, s + first, g.stride());
  }
}

// out rows, columns [begin, end), = the group's s times the source's rows, each row of s over its own keys.
void group_sums(const KeySource& source, const AttentionGroup& g, const float* s, const Tensor& out,
                int64_t begin, int64_t end, Worker& worker) {
  float* c[kRowsMax];
  group_rows(out, g, c);
  if (g.keys() == 0) {
    for (int64_t m = 0; m < g.rows(); ++m) std::fill(c[m] + begin, c[m] + end, 0.0f);
    return;
  }
  float* copies = worker.scratch<float>(kKeyBlock * source.copy_stride());
  const float* keys[kKeyBlock];
  for (int64_t first = 0; first < g.prefix; first += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, g.prefix - first);
    gather_rows(source, first, count, begin, end, /*padded=*/false, copies, keys);
    row_sums(g.rows(), count, {s + first, g.stride(), 1}, keys, c, begin, end, first > 0);
  }
  // The triangle of keys that only the later queries see. Its other half is not padded with zeros: a zero
  // times the NaN of a later token would be NaN.
  gather_rows(source, g.prefix, g.queries - 1, begin, end, /*padded=*/false, copies, keys);
  for (int64_t i = 1; i < g.queries; ++i) {
    const int64_t m = i * g.heads;
    row_sums(g.heads, i, {s + m * g.stride() + g.prefix, g.stride(), 1}, keys, c + m, begin, end, true);
  }
}

struct SoftmaxSums {
  float top, sum;
};

// Scores s[0 .. n) become exp(scale * s - top).
HWY_INLINE SoftmaxSums softmax(float* s, int64_t n, float scale) {
  const float lowest = -std::numeric_limits<float>::infinity();
  const Lanes factor = broadcast(scale);
  Lanes tops = broadcast(lowest);
  for_lanes(n, [&](int64_t i, auto chunk) HWY_ATTR {
    // A lane past the end repeats the first score, which leaves the maximum as it is for any sign of scale.
    tops = max(tops, mul(factor, chunk.load(s + i, s[0])));
  });
  const float top = max_lanes(tops);
  const Lanes shift = broadcast(top);
  Lanes sums = zero_lanes();
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Lanes p = exp(sub(mul(factor, load(s + i)), shift));
    store(p, s + i);
    sums = add(sums, p);
  }
  if (whole < n) {
    store_first(exp(sub(mul(factor, load_first(s + whole, n - whole)), shift)), s + whole, n - whole);
    sums = add(sums, load_first(s + whole, n - whole));
  }
  return {top, sum_lanes(sums)};
}

// Rows [begin, end) of the group's scores become unnormalised probabilities; inverse[m] = 1 / their sum.
void group_softmax(const Attention& args, const AttentionGroup& g, int64_t begin, int64_t end, float* s,
                   float* inverse) {
  for (int64_t m = begin; m < end; ++m) {
    const int64_t query = m / g.heads, n = g.prefix + query;
    float lse = -std::numeric_limits<float>::infinity();
    inverse[m] = 0.0f;
    if (n > 0) {
      const auto [top, sum] = softmax(s + m * g.stride(), n, args.scale);
      lse = top + std::log(sum);
      inverse[m] = 1.0f / sum;
    }
    if (!args.lse.empty()) args.lse.row(g.row + query)[g.head + m % g.heads] = lse;
  }
}

// o, columns [begin, end).
void group_outputs(const Attention& args, const AttentionGroup& g, const float* p, const float* inverse,
                   int64_t begin, int64_t end, Worker& worker) {
  group_sums(KeySource(args.values, g, args.o.size(2)), g, p, args.o, begin, end, worker);
  float* o[kRowsMax];
  group_rows(args.o, g, o);
  for (int64_t m = 0; m < g.rows(); ++m) {
    const Lanes factor = broadcast(inverse[m]);
    float* row = o[m] + begin;
    for_lanes(end - begin, [&](int64_t i, auto chunk)
                               HWY_ATTR { chunk.store(mul(chunk.load(row + i), factor), row + i); });
  }
}

void group_scores(const Attention& args, const AttentionGroup& g, int64_t begin, int64_t end, float* s,
                  Worker& worker) {
  group_dots(KeySource(args.keys, g, args.q.size(2)), g, args.q, begin, end, s, worker);
}

void attend_group(const Attention& args, const AttentionGroup& g, Worker& worker) {
  float* s = worker.scratch<float>(g.rows() * g.stride());
  float* inverse = worker.scratch<float>(g.rows());
  group_scores(args, g, 0, g.keys(), s, worker);
  group_softmax(args, g, 0, g.rows(), s, inverse);
  group_outputs(args, g, s, inverse, 0, args.o.size(2), worker);
}

// dq of the group; ds (the scores' gradient times scale) and p, each [rows, keys], are left for
// backward_keys.
void backward_group(const AttentionBackward& args, const AttentionGroup& g, float* ds, float* p,
                    Worker& worker) {
  const Attention& forward = args.forward;
  const int64_t rank = forward.o.size(2);
  const KeySource keys(forward.keys, g, forward.q.size(2));
  group_dots(keys, g, forward.q, 0, g.keys(), p, worker);
  group_dots(KeySource(forward.values, g, rank), g, args.d_o, 0, g.keys(), ds, worker);
  const float *o[kRowsMax], *d_o[kRowsMax];
  group_rows(forward.o, g, o);
  group_rows(args.d_o, g, d_o);
  const Lanes scale = broadcast(forward.scale);
  for (int64_t m = 0; m < g.rows(); ++m) {
    Lanes dot = zero_lanes();
    for_lanes(rank, [&](int64_t i, auto chunk)
                        HWY_ATTR { dot = fma(chunk.load(o[m] + i), chunk.load(d_o[m] + i), dot); });
    const int64_t query = m / g.heads;
    const Lanes mean = broadcast(sum_lanes(dot));
    const Lanes lse = broadcast(forward.lse.row(g.row + query)[g.head + m % g.heads]);
    float* p_row = p + m * g.stride();
    float* ds_row = ds + m * g.stride();
    for_lanes(g.prefix + query, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes probability = exp(sub(mul(scale, chunk.load(p_row + i)), lse));
      chunk.store(probability, p_row + i);
      chunk.store(mul(mul(probability, sub(chunk.load(ds_row + i), mean)), scale), ds_row + i);
    });
  }
  group_sums(keys, g, ds, args.dq, 0, keys.width, worker);
}

// Adds to dkeys and dvalues what queries [query, query + queries) of the group give to entries [begin, end)
// of its key list, which all of them see: first the chain over ds q, then the chain over p d_o.
void add_key_grads(const AttentionBackward& args, const AttentionGroup& g, const float* ds, int64_t query,
                   int64_t queries, int64_t begin, int64_t end) {
  const int64_t width = args.dq.size(2), rank = args.d_o.size(2), stride = g.stride();
  const int64_t m = query * g.heads, count = queries * g.heads;
  const float* right[2 * kRowsMax];  // q rows, then d_o rows
  group_rows(args.forward.q, g, right);
  group_rows(args.d_o, g, right + g.rows());
  ds += m * stride;
  const float* p = ds + g.rows() * stride;
  const int64_t sequence_row = args.forward.sequences.begin(g.sequence);
  for (int64_t first = begin; first < end; first += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, end - first);
    float *dkeys[kKeyBlock], *dvalues[kKeyBlock];
    const Tensor& value_grads = args.dvalues.empty() ? args.dkeys : args.dvalues;
    for (int64_t i = 0; i < keys; ++i) {
      const int64_t row = sequence_row + (g.selection == nullptr ? first + i : g.selection[first + i]);
      dkeys[i] = args.dkeys.row(row) + g.kv_head * args.dkeys.stride(1);
      dvalues[i] = value_grads.row(row) + g.kv_head * value_grads.stride(1);
    }
    if (args.dvalues.empty() && queries == g.queries) {
      // The two chains of the shared columns in one go: a selection has few rows, so loads of dkeys would
      // dominate.
      row_sums(keys, 2 * count, {ds + first, 1, stride}, right, dkeys, 0, rank, true);
      row_sums(keys, count, {ds + first, 1, stride}, right, dkeys, rank, width, true);
    } else {
      row_sums(keys, count, {ds + first, 1, stride}, right + m, dkeys, 0, width, true);
      row_sums(keys, count, {p + first, 1, stride}, right + g.rows() + m, dvalues, 0, rank, true);
    }
  }
}

// The share of one group in rows [begin, end) of dkeys and dvalues.
void backward_keys(const AttentionBackward& args, const AttentionGroup& g, const float* ds, int64_t begin,
                   int64_t end) {
  const int64_t sequence_row = args.forward.sequences.begin(g.sequence);
  const auto entries_before = [&](int64_t row) {
    const int64_t position = std::max<int64_t>(row - sequence_row, 0);
    if (g.selection == nullptr) return std::min(position, g.keys());
    return static_cast<int64_t>(std::lower_bound(g.selection, g.selection + g.prefix, position) -
                                g.selection);
  };
  begin = entries_before(begin);
  end = entries_before(end);
  add_key_grads(args, g, ds, 0, g.queries, begin, std::min(end, g.prefix));
  for (int64_t i = 1; i < g.queries; ++i) {
    add_key_grads(args, g, ds, i, 1, std::max(begin, g.prefix), std::min(end, g.prefix + i));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(attend_group);
HWY_EXPORT(group_scores);
HWY_EXPORT(group_softmax);
HWY_EXPORT(group_outputs);
HWY_EXPORT(backward_group);
HWY_EXPORT(backward_keys);

namespace {

constexpr int64_t kGroupRows = 96;  // whole tiles of 12 rows
constexpr int64_t kScoresMax = int64_t{1}
                               << 24;  // floats of a group's scores: at a million keys, groups get lower
// Below this many multiply-adds, three rounds of waking threads cost more than they save.
constexpr int64_t kSplitWork = int64_t{1} << 20;

// Query rows a group may have when its queries see about `keys` keys.
int64_t rows_max(int64_t keys) { return std::clamp<int64_t>(kScoresMax / keys / 12 * 12, 12, kGroupRows); }

// Appends the groups of queries [row, row + queries), whose first sees `prefix` keys.
void append_groups(const Attention& args, int64_t sequence, int64_t row, int64_t queries, int64_t prefix,
                   const int32_t* selection, std::vector<AttentionGroup>& groups) {
  const int64_t heads = args.q.size(1) / args.kv_heads, limit = rows_max(prefix + 1);
  const int64_t tile = std::max<int64_t>(limit / heads, 1);
  for (int64_t i = 0; i < queries; i += tile) {
    for (int64_t kv_head = 0; kv_head < args.kv_heads; ++kv_head) {
      for (int64_t j = 0; j < heads; j += limit) {
        groups.push_back({.sequence = sequence,
                          .row = row + i,
                          .queries = std::min(tile, queries - i),
                          .kv_head = kv_head,
                          .head = kv_head * heads + j,
                          .heads = std::min(limit, heads - j),
                          .prefix = prefix + i,
                          .selection = selection});
      }
    }
  }
}

// Every query and head in one group: queries that see their whole prefix together, others one by one.
// Ascending.
std::vector<AttentionGroup> make_groups(const Attention& args) {
  std::vector<AttentionGroup> groups;
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t begin = args.sequences.begin(b), end = args.sequences.end(b);
    const int64_t shift = args.sequences.cached_tokens(b) - begin + 1;
    const auto sees_prefix = [&](int64_t row) {
      return args.indices.empty() || args.counts.i32()[row] == row + shift;
    };
    for (int64_t row = begin; row < end;) {
      int64_t next = row;
      while (next < end && sees_prefix(next)) ++next;
      if (next > row) {
        append_groups(args, b, row, next - row, row + shift, nullptr, groups);
      } else {
        append_groups(args, b, row, 1, args.counts.i32()[row],
                      args.indices.i32() + row * args.indices.stride(0), groups);
        ++next;
      }
      row = next;
    }
  }
  return groups;
}

// Few groups for many threads (decode): scores are split over keys, softmax over rows, outputs over columns.
// No element is shared, so nothing is merged and the bits are those of attend_group.
void attend_split(const Attention& args, const AttentionGroup& g, Stream& stream) {
  const int64_t pieces = 2 * stream.threads(), columns = args.o.size(2);
  const auto buffer =
      std::make_unique_for_overwrite<float[]>(static_cast<size_t>(g.rows() * (g.stride() + 1)));
  float* s = buffer.get();
  float* inverse = s + g.rows() * g.stride();
  // Whole tiles of eight keys, so that no two threads write one column.
  const int64_t key_grain = (g.keys() / pieces + 64) / 64 * 64;
  stream.parallel_for(g.keys(), key_grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(group_scores)(args, g, begin, end, s, worker);
  });
  stream.parallel_for(g.rows(), 1 + g.rows() / pieces, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(group_softmax)(args, g, begin, end, s, inverse);
  });
  stream.parallel_for(columns, (columns / stream.threads() + 16) / 16 * 16,
                      [&](int64_t begin, int64_t end, Worker& worker) {
                        HWY_DYNAMIC_DISPATCH(group_outputs)(args, g, s, inverse, begin, end, worker);
                      });
}

// ds and p of a round of the backward: about what a core's second-level cache holds.
constexpr int64_t kRoundFloats = int64_t{1} << 18;

int64_t floats_of(const AttentionGroup& g) { return 2 * g.rows() * g.stride(); }  // ds and p

// x: [T, heads, width], or [T, width] with one head.
void fill_zero(const Tensor& x, int64_t heads, int64_t width, Stream& stream) {
  stream.parallel_for(x.size(0), 64, [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t g = 0; g < heads; ++g) std::fill_n(x.row(t) + g * x.stride(1), width, 0.0f);
    }
  });
}

}  // namespace

void attend(const Attention& args, Stream& stream) {
  std::vector<AttentionGroup> groups = make_groups(args);
  if (stream.threads() > 1 && static_cast<int64_t>(groups.size()) < 2 * stream.threads()) {
    const int64_t widths = args.q.size(2) + args.o.size(2);
    std::erase_if(groups, [&](const AttentionGroup& g) {
      if (g.rows() * g.keys() * widths < kSplitWork) return false;
      attend_split(args, g, stream);
      return true;
    });
  }
  // The last groups of a sequence see the most keys: they start first.
  const int64_t count = static_cast<int64_t>(groups.size());
  stream.parallel_for(count, 1, [&](int64_t begin, int64_t, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(attend_group)(args, groups[static_cast<size_t>(count - 1 - begin)], worker);
  });
}

// Rounds of groups in ascending order: first each group's ds, p and dq, then their shares of dkeys, split by
// key, so that one thread adds to an element and adds in the order of the groups. Where rounds end changes
// nothing.
void attend_backward(const AttentionBackward& args, Stream& stream) {
  const int64_t kv_heads = args.forward.kv_heads;
  fill_zero(args.dkeys, kv_heads, args.dq.size(2), stream);
  if (!args.dvalues.empty()) fill_zero(args.dvalues, kv_heads, args.d_o.size(2), stream);
  const std::vector<AttentionGroup> groups = make_groups(args.forward);
  int64_t round_floats = kRoundFloats * stream.threads();
  for (const AttentionGroup& g : groups)
    round_floats = std::max(round_floats, floats_of(g) * stream.threads());
  const auto buffer = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(round_floats));
  std::vector<float*> ds(groups.size());
  for (size_t first = 0, last = 0; first < groups.size(); first = last) {
    int64_t used = 0;
    for (; last < groups.size() && used + floats_of(groups[last]) <= round_floats; ++last) {
      ds[last] = buffer.get() + used;
      used += floats_of(groups[last]);
    }
    stream.parallel_for(static_cast<int64_t>(last - first), 1, [&](int64_t begin, int64_t, Worker& worker) {
      const size_t i = first + static_cast<size_t>(begin);
      HWY_DYNAMIC_DISPATCH(backward_group)(args, groups[i], ds[i], ds[i] + floats_of(groups[i]) / 2, worker);
    });
    const int64_t row = args.forward.sequences.begin(groups[first].sequence);
    const int64_t rows = groups[last - 1].row + groups[last - 1].queries - row;
    const int64_t grain = stream.threads() == 1 ? rows : std::max<int64_t>(rows / (4 * stream.threads()), 64);
    stream.parallel_for(rows, grain, [&](int64_t begin, int64_t end, Worker&) {
      for (size_t i = first; i < last; ++i) {
        HWY_DYNAMIC_DISPATCH(backward_keys)(args, groups[i], ds[i], row + begin, row + end);
      }
    });
  }
}

void launch(const SparseMla& args, Stream& stream) {
  CHECK_OK(validate(args));
  attend({.q = args.q,
          .keys = args.keys,
          .values = args.keys,
          .sequences = args.sequences,
          .kv_heads = 1,
          .indices = args.indices,
          .counts = args.counts,
          .scale = args.scale,
          .o = args.o,
          .lse = args.lse},
         stream);
}

void launch(const SparseMlaBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  attend_backward({.forward = {.q = args.q,
                               .keys = args.keys,
                               .values = args.keys,
                               .sequences = args.sequences,
                               .kv_heads = 1,
                               .indices = args.indices,
                               .counts = args.counts,
                               .scale = args.scale,
                               .o = args.o,
                               .lse = args.lse},
                   .d_o = args.d_o,
                   .dq = args.dq,
                   .dkeys = args.dkeys,
                   .dvalues = {}},
                  stream);
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
