#include "kernels/sparse_mla/sparse_mla.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sparse_mla/sparse_mla_simd.cc"
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "hwy/foreach_target.h"
#include "kernels/launch_cuda.h"
#include "kernels/sparse_mla/attention.h"
#include "kernels/sparse_mla/attention_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kRowsMax = 96;          // of a group
constexpr int64_t kKeysAhead = kDotRows;  // rows fetched for the next block
constexpr int64_t kSumBlock = 256;        // rows whose columns under a tile fit in the first-level cache
constexpr float kNothing = -std::numeric_limits<float>::infinity();  // log of an empty sum

// One head of a paged store, seen by one group.
struct KeySource {
  KeySource(const PagedRows& rows, const LatentRow& layout, const AttentionGroup& g, int64_t head_width)
      : pool(rows.pool.raw()),
        dtype(rows.pool.dtype()),
        latents(layout),
        page_stride(rows.pool.stride(0)),
        row_stride(rows.pool.stride(1)),
        pages(rows.page_table.i32() + g.sequence * rows.page_table.stride(0)),
        column(g.kv_head * head_width),
        width(head_width),
        selection(g.selection),
        size(g.keys()) {}

  const void* pool;
  DType dtype;
  const LatentRow& latents;  // of e4m3 rows
  int64_t page_stride, row_stride;
  const int32_t* pages;
  int64_t column, width;
  const int32_t* selection;
  int64_t size;

  int64_t offset(int64_t i) const {
    const int64_t position = selection == nullptr ? i : selection[i];
    return pages[position / kPageRows] * page_stride + position % kPageRows * row_stride + column;
  }
  // Rows are read where they lie if they are f32 and cannot end inside a step of a dot product.
  bool in_place() const { return dtype == DType::kF32 && width % kChains == 0; }
  int64_t copy_stride() const { return (width + kLanes - 1) / kLanes * kLanes; }
  float* copies(Worker& worker) const {
    return in_place() ? nullptr : worker.scratch<float>(kAttentionBlock * copy_stride());
  }
};

// Row pointers to fp32 entries [first, first + count) of a key list, count <= kAttentionBlock.
struct KeyRows {
  const float* rows[kAttentionBlock + 2 * kDotRows];
  int64_t ahead;  // rows after the first `count` that point to the entries that follow
};

// Columns [begin, end) of the rows are valid, and zeros up to a multiple of four of them.
HWY_INLINE void gather_rows(const KeySource& source, int64_t first, int64_t count, int64_t begin, int64_t end,
                            float* copies, KeyRows& out) {
  out.ahead = 0;
  if (source.in_place()) {
    out.ahead = std::min(kKeysAhead, source.size - first - count);
    const float* pool = static_cast<const float*>(source.pool);
    for (int64_t j = 0; j < count + out.ahead; ++j) out.rows[j] = pool + source.offset(first + j);
    return;
  }
  for (int64_t j = 0; j < count; ++j) {
    float* row = copies + j * source.copy_stride();
    const int64_t offset = source.offset(first + j);
    if (source.dtype == DType::kBf16) {
      const bf16* from = static_cast<const bf16*>(source.pool) + offset + begin;
      for_lanes(end - begin,
                [&](int64_t i, auto chunk) HWY_ATTR { chunk.store(chunk.load(from + i), row + begin + i); });
    } else if (source.dtype == DType::kF8E4M3) {
      read_latent_row(source.latents, static_cast<const e4m3*>(source.pool) + offset, begin, end, row + begin);
    } else {
      std::copy_n(static_cast<const float*>(source.pool) + offset + begin, end - begin, row + begin);
    }
    for (int64_t i = end; i % kChains != 0; ++i) row[i] = 0.0f;
    out.rows[j] = row;
  }
}

// out[m] = the row of x [T, h, *] of row m of the group.
template <class T>
HWY_INLINE void group_rows(const Tensor& x, const AttentionGroup& g, T** out) {
  for (int64_t i = 0; i < g.queries; ++i) {
    for (int64_t j = 0; j < g.heads; ++j) {
      out[i * g.heads + j] = x.row(g.row + i, g.head + j);
    }
  }
}

HWY_INLINE float* pack_group(const Tensor& x, const AttentionGroup& g, int64_t width, Worker& worker) {
  const float* rows[kRowsMax];
  group_rows(x, g, rows);
  float* packed = worker.scratch<float>(packed_size(g.rows(), width));
  pack_rows(g.rows(), width, rows, packed);
  return packed;
}

// How many of the entries [first, first + count) row m of the group sees.
HWY_INLINE int64_t entries_seen(const AttentionGroup& g, int64_t m, int64_t first, int64_t count) {
  return std::clamp<int64_t>(g.prefix + m / g.heads - first, 0, count);
}

// out[m][begin .. end) (+)= sum of s[m, i] rows[i] over the entries first + i < first + count that row m
// sees; the sum starts at zero when first is 0.
HWY_INLINE void add_block(const AttentionGroup& g, int64_t first, int64_t count, const float* s,
                          int64_t stride, const float* const* rows, float* const* out, int64_t begin,
                          int64_t end) {
  const int64_t shared = entries_seen(g, 0, first, count);
  for (int64_t i = 0; i < shared; i += kSumBlock) {
    row_sums(g.rows(), std::min(kSumBlock, shared - i), RowMajor{s + i, stride}, rows + i, out, begin, end,
             first + i > 0);
  }
  // The triangle that only the later queries see. Its other half is not padded with zeros: a zero times the
  // NaN of a later token would be NaN.
  for (int64_t m = g.heads; m < g.rows(); m += g.heads) {
    const int64_t own = entries_seen(g, m, first, count) - shared;
    if (own > 0)
      row_sums(g.heads, own, RowMajor{s + m * stride + shared, stride}, rows + shared, out + m, begin, end,
               true);
  }
}

// A softmax over blocks of a row: exact within a block; the sums so far are rescaled when a block has a new
// maximum.
struct Softmax {
  float top = kNothing;
  float sum = 0.0f;
};

// Scores s[0 .. n) become exp(scale * s - top) with the new top; returns the factor for what was summed
// before.
HWY_INLINE float softmax_block(float* s, int64_t n, float scale, Softmax& state) {
  if (n == 0) return 1.0f;
  const Lanes factor = broadcast(scale);
  Lanes tops = broadcast(kNothing);
  // A lane past the end repeats the first score, which leaves the maximum as it is for any sign of scale.
  for_lanes(n,
            [&](int64_t i, auto chunk) HWY_ATTR { tops = max(tops, mul(factor, chunk.load(s + i, s[0]))); });
  const float top = std::max(state.top, max_lanes(tops));
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
  float rescale = 1.0f;
  if (top != state.top) {
    float values[kLanes];
    store(exp(broadcast(state.top - top)), values);
    rescale = values[0];
  }
  state = {top, state.sum * rescale + sum_lanes(sums)};
  return rescale;
}

HWY_INLINE void scale_row(float* row, int64_t n, float factor) {
  const Lanes factors = broadcast(factor);
  for_lanes(n,
            [&](int64_t i, auto chunk) HWY_ATTR { chunk.store(mul(chunk.load(row + i), factors), row + i); });
}

// add_block after rescaling what the rows hold.
HWY_INLINE void add_outputs(const AttentionGroup& g, int64_t first, int64_t count, const float* p,
                            int64_t stride, const float* rescale, const float* const* values, float* const* o,
                            int64_t begin, int64_t end) {
  for (int64_t m = 0; first > 0 && m < g.rows(); ++m) {
    if (rescale[m] != 1.0f) scale_row(o[m] + begin, end - begin, rescale[m]);
  }
  add_block(g, first, count, p, stride, values, o, begin, end);
}

// o, columns [begin, end), becomes the mean over the selection; zero if that is empty.
HWY_INLINE void finish_outputs(const AttentionGroup& g, const float* sums, float* const* o, int64_t begin,
                               int64_t end) {
  for (int64_t m = 0; m < g.rows(); ++m) {
    if (g.keys() == 0) {
      std::fill(o[m] + begin, o[m] + end, 0.0f);
    } else {
      scale_row(o[m] + begin, end - begin, 1.0f / sums[m]);
    }
  }
}

HWY_INLINE void store_lse(const Attention& args, const AttentionGroup& g, int64_t m, const Softmax& state) {
  if (args.lse.empty()) return;
  args.lse.row(g.row + m / g.heads)[g.head + m % g.heads] =
      g.keys() == 0 ? kNothing : state.top + std::log(state.sum);
}

// Keys and values of one token may be one row (MLA): then it is gathered once.
HWY_INLINE bool same_rows(const KeySource& keys, const KeySource& values) {
  return keys.pool == values.pool && keys.pages == values.pages && keys.column == values.column &&
         keys.width >= values.width;
}

void attend_group(const Attention& args, const AttentionGroup& g, Worker& worker) {
  constexpr int64_t kStride = kAttentionBlock | kLanes;  // an odd number of cache lines
  const int64_t rank = args.o.size(2);
  const KeySource keys(args.keys, args.latents, g, args.q.size(2)), values(args.values, args.latents, g, rank);
  const bool shared = same_rows(keys, values);
  const float* packed = pack_group(args.q, g, keys.width, worker);
  float* s = worker.scratch<float>(g.rows() * kStride);
  float* key_copies = keys.copies(worker);
  float* value_copies = shared ? nullptr : values.copies(worker);
  float* o[kRowsMax];
  group_rows(args.o, g, o);
  Softmax state[kRowsMax];
  KeyRows key_rows, value_rows;
  for (int64_t first = 0; first < g.keys(); first += kAttentionBlock) {
    const int64_t count = std::min(kAttentionBlock, g.keys() - first);
    gather_rows(keys, first, count, 0, keys.width, key_copies, key_rows);
    if (!shared) gather_rows(values, first, count, 0, rank, value_copies, value_rows);
    dot_products(g.rows(), keys.width, packed, key_rows.rows, count, key_rows.ahead, s, kStride);
    float rescale[kRowsMax];
    for (int64_t m = 0; m < g.rows(); ++m) {
      rescale[m] = softmax_block(s + m * kStride, entries_seen(g, m, first, count), args.scale, state[m]);
    }
    add_outputs(g, first, count, s, kStride, rescale, (shared ? key_rows : value_rows).rows, o, 0, rank);
  }
  float sums[kRowsMax];
  for (int64_t m = 0; m < g.rows(); ++m) {
    sums[m] = state[m].sum;
    store_lse(args, g, m, state[m]);
  }
  finish_outputs(g, sums, o, 0, rank);
}

// The same group in three steps that can each be split: scores of entries [begin, end) ...
void split_scores(const Attention& args, const AttentionGroup& g, int64_t begin, int64_t end, float* s,
                  Worker& worker) {
  const KeySource keys(args.keys, args.latents, g, args.q.size(2));
  const float* packed = pack_group(args.q, g, keys.width, worker);
  float* copies = keys.copies(worker);
  KeyRows rows;
  for (int64_t first = begin; first < end; first += kAttentionBlock) {
    const int64_t count = std::min(kAttentionBlock, end - first);
    gather_rows(keys, first, count, 0, keys.width, copies, rows);
    dot_products(g.rows(), keys.width, packed, rows.rows, count, rows.ahead, s + first, g.stride());
  }
}

// ... probabilities of rows [begin, end), with sums [rows] and rescale [blocks, rows] ...
void split_softmax(const Attention& args, const AttentionGroup& g, int64_t begin, int64_t end, float* s,
                   float* sums, float* rescale) {
  for (int64_t m = begin; m < end; ++m) {
    Softmax state;
    for (int64_t first = 0; first < g.keys(); first += kAttentionBlock) {
      const int64_t seen = entries_seen(g, m, first, std::min(kAttentionBlock, g.keys() - first));
      rescale[first / kAttentionBlock * g.rows() + m] =
          softmax_block(s + m * g.stride() + first, seen, args.scale, state);
    }
    sums[m] = state.sum;
    store_lse(args, g, m, state);
  }
}

// ... and columns [begin, end) of o.
void split_outputs(const Attention& args, const AttentionGroup& g, const float* s, const float* sums,
                   const float* rescale, int64_t begin, int64_t end, Worker& worker) {
  const KeySource values(args.values, args.latents, g, args.o.size(2));
  float* copies = values.copies(worker);
  float* o[kRowsMax];
  group_rows(args.o, g, o);
  KeyRows rows;
  for (int64_t first = 0; first < g.keys(); first += kAttentionBlock) {
    const int64_t count = std::min(kAttentionBlock, g.keys() - first);
    gather_rows(values, first, count, begin, end, copies, rows);
    add_outputs(g, first, count, s + first, g.stride(), rescale + first / kAttentionBlock * g.rows(),
                rows.rows, o, begin, end);
  }
  finish_outputs(g, sums, o, begin, end);
}

// dq of the group; its gradients of the scores, times scale, and its p are left in `tiles` for backward_keys.
// Entries of the key list are kept in tiles of kGradTile, [2 * rows, kGradTile] each, ds above p: whole rows
// would put every value that a key needs on a page of its own.
void backward_group(const AttentionBackward& args, const AttentionGroup& g, float* tiles, Worker& worker) {
  const Attention& forward = args.forward;
  const int64_t rank = forward.o.size(2), rows = g.rows();
  const KeySource keys(forward.keys, forward.latents, g, forward.q.size(2)),
      values(forward.values, forward.latents, g, rank);
  const bool shared = same_rows(keys, values);
  const float* packed_q = pack_group(forward.q, g, keys.width, worker);
  const float* packed_d_o = pack_group(args.d_o, g, rank, worker);
  float* key_copies = keys.copies(worker);
  float* value_copies = shared ? nullptr : values.copies(worker);
  float *o[kRowsMax], *d_o[kRowsMax], *dq[kRowsMax], mean[kRowsMax], lse[kRowsMax];
  group_rows(forward.o, g, o);
  group_rows(args.d_o, g, d_o);
  group_rows(args.dq, g, dq);
  for (int64_t m = 0; m < rows; ++m) {
    Lanes dot = zero_lanes();
    for_lanes(rank, [&](int64_t i, auto chunk)
                        HWY_ATTR { dot = fma(chunk.load(o[m] + i), chunk.load(d_o[m] + i), dot); });
    mean[m] = sum_lanes(dot);
    lse[m] = forward.lse.row(g.row + m / g.heads)[g.head + m % g.heads];
    if (g.keys() == 0) std::fill_n(dq[m], keys.width, 0.0f);
  }
  const Lanes scale = broadcast(forward.scale);
  KeyRows key_rows, value_rows;
  for (int64_t first = 0; first < g.keys(); first += kGradTile, tiles += 2 * rows * kGradTile) {
    const int64_t count = std::min(kGradTile, g.keys() - first);
    gather_rows(keys, first, count, 0, keys.width, key_copies, key_rows);
    if (!shared) gather_rows(values, first, count, 0, rank, value_copies, value_rows);
    KeyRows& value_source = shared ? key_rows : value_rows;
    float* ds = tiles;
    float* p = tiles + rows * kGradTile;
    dot_products(rows, keys.width, packed_q, key_rows.rows, count, key_rows.ahead, p, kGradTile);
    dot_products(rows, rank, packed_d_o, value_source.rows, count, value_source.ahead, ds, kGradTile);
    for (int64_t m = 0; m < rows; ++m) {
      float* p_row = p + m * kGradTile;
      float* ds_row = ds + m * kGradTile;
      const Lanes row_lse = broadcast(lse[m]), row_mean = broadcast(mean[m]);
      for_lanes(entries_seen(g, m, first, count), [&](int64_t i, auto chunk) HWY_ATTR {
        const Lanes probability = exp(sub(mul(scale, chunk.load(p_row + i)), row_lse));
        chunk.store(probability, p_row + i);
        chunk.store(mul(mul(probability, sub(chunk.load(ds_row + i), row_mean)), scale), ds_row + i);
      });
    }
    add_block(g, first, count, ds, kGradTile, key_rows.rows, dq, 0, keys.width);
  }
}

// Adds to dkeys and dvalues what queries [query, query + queries) of the group give to entries [begin, end)
// of its key list, which all of them see: first the chain over ds q, then the chain over p d_o.
void add_key_grads(const AttentionBackward& args, const AttentionGroup& g, const float* tiles, int64_t query,
                   int64_t queries, int64_t begin, int64_t end) {
  if (begin >= end) return;
  const int64_t width = args.dq.size(2), rank = args.d_o.size(2), rows = g.rows();
  const int64_t m = query * g.heads, count = queries * g.heads;
  const float* right[2 * kRowsMax];  // q rows, then d_o rows
  group_rows(args.forward.q, g, right);
  group_rows(args.d_o, g, right + rows);
  const int64_t sequence_row = args.forward.sequences.begin(g.sequence);
  const Tensor& value_grads = args.dvalues.empty() ? args.dkeys : args.dvalues;
  for (int64_t first = begin, next = 0; first < end; first = next) {
    next = std::min((first / kGradTile + 1) * kGradTile, end);
    float *dkeys[kGradTile], *dvalues[kGradTile];
    for (int64_t i = first; i < next; ++i) {
      const int64_t row = sequence_row + (g.selection == nullptr ? i : g.selection[i]);
      dkeys[i - first] = args.dkeys.row(row) + g.kv_head * args.dkeys.stride(1);
      dvalues[i - first] = value_grads.row(row) + g.kv_head * value_grads.stride(1);
    }
    const float* tile = tiles + first / kGradTile * 2 * rows * kGradTile + first % kGradTile;
    const ColumnMajor ds{tile + m * kGradTile, kGradTile}, p{tile + (rows + m) * kGradTile, kGradTile};
    if (args.dvalues.empty() && queries == g.queries && rows <= kRowsMax / 4) {
      // The two chains of the shared columns in one go: with few rows, loads of dkeys would dominate.
      row_sums(next - first, 2 * rows, ds, right, dkeys, 0, rank, true);
      row_sums(next - first, rows, ds, right, dkeys, rank, width, true);
    } else {
      row_sums(next - first, count, ds, right + m, dkeys, 0, width, true);
      row_sums(next - first, count, p, right + rows + m, dvalues, 0, rank, true);
    }
  }
}

// The share of one group in rows [begin, end) of dkeys and dvalues.
void backward_keys(const AttentionBackward& args, const AttentionGroup& g, const float* tiles, int64_t begin,
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
  add_key_grads(args, g, tiles, 0, g.queries, begin, std::min(end, g.prefix));
  for (int64_t i = 1; i < g.queries; ++i) {
    add_key_grads(args, g, tiles, i, 1, std::max(begin, g.prefix), std::min(end, g.prefix + i));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(attend_group);
HWY_EXPORT(split_scores);
HWY_EXPORT(split_softmax);
HWY_EXPORT(split_outputs);
HWY_EXPORT(backward_group);
HWY_EXPORT(backward_keys);

namespace {

constexpr int64_t kGroupRows = 96;  // whole tiles of 12 rows
// Floats of a group's scores where they are kept whole: at a million keys, groups get lower.
constexpr int64_t kScoresMax = int64_t{1} << 24;
// Below this many multiply-adds, three rounds of waking threads cost more than they save.
constexpr int64_t kSplitWork = int64_t{1} << 20;

// Query rows a group may have when its queries see about `keys` keys.
int64_t rows_max(int64_t keys) { return std::clamp<int64_t>(kScoresMax / keys / 12 * 12, 12, kGroupRows); }

// Appends the groups of queries [row, row + queries), whose first sees `prefix` keys.
void append_groups(const Attention& args, int64_t sequence, int64_t row, int64_t queries, int64_t prefix,
                   const int32_t* selection, std::vector<AttentionGroup>& groups) {
  const int64_t heads = args.q.size(1) / args.kv_heads, limit = rows_max(prefix + queries);
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
  constexpr int64_t kKeyGrain = 64;     // whole tiles of keys: no two threads write one element
  constexpr int64_t kColumnGrain = 16;  // one register
  const auto share = [&](int64_t n, int64_t grain) { return (n / stream.threads() + grain) / grain * grain; };
  const int64_t rescales = (g.keys() / kAttentionBlock + 1) * g.rows();
  const auto buffer =
      std::make_unique_for_overwrite<float[]>(static_cast<size_t>(g.rows() * (g.stride() + 1) + rescales));
  float* s = buffer.get();
  float* sums = s + g.rows() * g.stride();
  float* rescale = sums + g.rows();
  stream.parallel_for(g.keys(), share(g.keys(), kKeyGrain), [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(split_scores)(args, g, begin, end, s, worker);
  });
  stream.parallel_for(g.rows(), share(g.rows(), 1), [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(split_softmax)(args, g, begin, end, s, sums, rescale);
  });
  const int64_t columns = args.o.size(2);
  stream.parallel_for(columns, share(columns, kColumnGrain), [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(split_outputs)(args, g, s, sums, rescale, begin, end, worker);
  });
}

// ds and p of a round of the backward: about what a core's second-level cache holds.
constexpr int64_t kRoundFloats = int64_t{1} << 18;

// Rows of dkeys that one task takes through a round: they stay in the second-level cache.
constexpr int64_t kGradRows = 4 * kGradTile;

int64_t floats_of(const AttentionGroup& g) {
  return (g.keys() + kGradTile - 1) / kGradTile * kGradTile * 2 * g.rows();
}

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
  if (stream.on_cuda()) return launch_cuda(args, stream);
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
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t kv_heads = args.forward.kv_heads;
  fill_zero(args.dkeys, kv_heads, args.dq.size(2), stream);
  if (!args.dvalues.empty()) fill_zero(args.dvalues, kv_heads, args.d_o.size(2), stream);
  const std::vector<AttentionGroup> groups = make_groups(args.forward);
  int64_t round_floats = kRoundFloats * stream.threads();
  for (const AttentionGroup& g : groups) {
    round_floats = std::max(round_floats, floats_of(g) * stream.threads());
  }
  const auto buffer = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(round_floats));
  std::vector<float*> tiles(groups.size());
  for (size_t first = 0, last = 0; first < groups.size(); first = last) {
    int64_t used = 0;
    for (; last < groups.size() && used + floats_of(groups[last]) <= round_floats; ++last) {
      tiles[last] = buffer.get() + used;
      used += floats_of(groups[last]);
    }
    stream.parallel_for(static_cast<int64_t>(last - first), 1, [&](int64_t begin, int64_t, Worker& worker) {
      const size_t i = first + static_cast<size_t>(begin);
      HWY_DYNAMIC_DISPATCH(backward_group)(args, groups[i], tiles[i], worker);
    });
    const int64_t row = args.forward.sequences.begin(groups[first].sequence);
    const int64_t rows = groups[last - 1].row + groups[last - 1].queries - row;
    const int64_t grain = std::clamp<int64_t>(rows / (4 * stream.threads()), kGradTile, kGradRows);
    stream.parallel_for(rows, grain, [&](int64_t begin, int64_t end, Worker&) {
      for (size_t i = first; i < last; ++i) {
        HWY_DYNAMIC_DISPATCH(backward_keys)(args, groups[i], tiles[i], row + begin, row + end);
      }
    });
  }
}

void launch(const SparseMla& args, Stream& stream) {
  CHECK_OK(validate(args));
  const int64_t rank = args.o.size(2);
  attend({.q = args.q,
          .keys = args.keys,
          .values = args.keys,
          .latents = latent_row(rank, args.q.size(2) - rank),
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
