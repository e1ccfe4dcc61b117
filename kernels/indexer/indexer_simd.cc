#include "kernels/indexer/indexer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/indexer/indexer_simd.cc"
#include "hwy/foreach_target.h"

#include "kernels/indexer/scores-inl.h"
#include "kernels/indexer/topk-inl.h"
#include "kernels/simd/block_gemm-inl.h"

#include <algorithm>
#include <memory>

#include "hwy/cache_control.h"
#include "kernels/indexer/select_plan.h"
#include "kernels/launch_cuda.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

template <class T>
const T* row_pointer(const PagedRows& keys, int64_t b, int64_t row) {
  return static_cast<const T*>(keys.pool.raw()) + keys.offset(b, row);
}

// Packs n (1..16 * panels) rows; missing ones repeat the first, so that no key but the asked-for is read.
template <class T>
void pack_panels(const T* const* rows, int64_t n, int64_t panels, int64_t width, float* out) {
  const T* own[kBlockKeys];
  for (int64_t i = 0; i < panels * kLanes; ++i) own[i] = rows[i < n ? i : 0];
  for (int64_t p = 0; p < panels; ++p) pack_panel(own + p * kLanes, width, out + p * width * kLanes);
}

template <class Args>
QueryHeads heads_of(const Args& args, int64_t t) {
  return {.q = args.q.row(t),
          .head_stride = args.q.stride(1),
          .heads = args.q.size(1),
          .width = args.q.size(2),
          .scale = args.key_scale};
}

RunningTopK make_topk(int64_t k, Worker& worker) {
  const int64_t capacity = RunningTopK::capacity(k);
  return {.keys = worker.scratch<int32_t>(capacity), .rows = worker.scratch<int32_t>(capacity)};
}

// The output of query t: the selected key rows (all candidates when rows == nullptr) as positions.
void write_selection(const IndexerSelect& args, int64_t b, int64_t t, const int32_t* rows, int64_t count) {
  int32_t* out = args.indices.i32() + t * args.indices.stride(0);
  int32_t* const begin = out;
  const int32_t pool = static_cast<int32_t>(args.pool);
  const int32_t candidates = static_cast<int32_t>(candidates_of(args, b, t));
  if (rows == nullptr) {
    for (int32_t s = 0; s < candidates * pool; ++s) *out++ = s;
  } else if (pool == 1) {
    out = std::copy_n(rows, count, out);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      for (int32_t r = 0; r < pool; ++r) *out++ = rows[i] * pool + r;
    }
  }
  if (args.tail) {
    const int64_t position = args.sequences.cached_tokens(b) + t - args.sequences.begin(b);
    for (int32_t s = candidates * pool; s <= position; ++s) *out++ = s;
  }
  args.counts.i32()[t] = static_cast<int32_t>(out - begin);
  std::fill(out, begin + args.indices.size(1), -1);
}

// A query with what the inner loops need of it.
struct TileQuery {
  QueryHeads heads;
  const float* weights;
  int64_t candidates;
};

template <class T>
void score_unit(const IndexerSelect& args, const SelectUnit& unit, int64_t k, RunningTopK* top,
                Worker& worker) {
  const int64_t b = unit.sequence, width = args.q.size(2), key_stride = args.keys.pool.stride(1);
  TileQuery queries[kTileQueries];
  const int64_t count = unit.end - unit.begin;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = unit.begin + i;
    queries[i] = {
        .heads = heads_of(args, t), .weights = args.weights.row(t), .candidates = candidates_of(args, b, t)};
  }
  float* panels = worker.scratch<float>(kBlockKeys * width);
  const T* rows[kBlockKeys];
  float scores[kBlockKeys];
  int64_t first = 0;  // candidates grow with t, so the queries to score are the last ones
  while (queries[first].candidates <= k) ++first;
  for (int64_t row = unit.first_row; row < unit.end_row; row += kBlockKeys) {
    const int64_t present = std::min(kBlockKeys, unit.end_row - row);
    const T* keys = row_pointer<T>(args.keys, b, row);
    for (int64_t i = 0; i < present; ++i) rows[i] = keys + i * key_stride;
    pack_panels(rows, present, kBlockKeys / kLanes, width, panels);
    while (queries[first].candidates <= row) ++first;
    // The next block's cache lines are asked for while this one is scored, a share with each query: the
    // packing reads sixteen rows side by side, which the hardware does not foresee.
    const T* next = row_pointer<T>(args.keys, b, std::min(row + kBlockKeys, unit.end_row - 1));
    const int64_t share = (kBlockKeys + count - first - 1) / (count - first);
    for (int64_t i = first; i < count; ++i) {
      for (int64_t r = (i - first) * share; r < std::min((i - first + 1) * share, kBlockKeys); ++r) {
        for (int64_t c = 0; c < width; c += kLine) hwy::Prefetch(next + r * key_stride + c);
      }
      score_pair(queries[i].heads, queries[i].weights, panels, scores);
      push(top[i], k, scores, row, std::min(present, queries[i].candidates - row));
    }
  }
}

void select_unit(const IndexerSelect& args, const SelectUnit& unit, int64_t index, const Partials& partials,
                 Worker& worker) {
  const int64_t k = args.topk / args.pool;
  RunningTopK top[kTileQueries];
  if (unit.end_row > 0) {
    for (int64_t i = 0; i < unit.end - unit.begin; ++i) top[i] = make_topk(k, worker);
    if (args.keys.pool.dtype() == DType::kBf16) {
      score_unit<bf16>(args, unit, k, top, worker);
    } else {
      score_unit<float>(args, unit, k, top, worker);
    }
  }
  for (int64_t t = unit.begin; t < unit.end; ++t) {
    RunningTopK& own = top[t - unit.begin];
    if (candidates_of(args, unit.sequence, t) <= k) {
      if (unit.part == 0) write_selection(args, unit.sequence, t, nullptr, 0);
      continue;
    }
    settle(own, k);
    if (unit.parts == 1) {
      write_selection(args, unit.sequence, t, own.rows, own.count);
      continue;
    }
    const int64_t slot = index * partials.tile_queries + t - unit.begin;
    partials.counts[slot] = static_cast<int32_t>(own.count);
    std::copy_n(own.keys, own.count, partials.keys + slot * k);
    std::copy_n(own.rows, own.count, partials.rows + slot * k);
  }
}

// Second step of a split tile: the parts in ascending row order are one stream again.
void merge_unit(const IndexerSelect& args, const SelectUnit& unit, const Partials& partials, Worker& worker) {
  if (unit.parts == 1 || unit.part != 0) return;
  const int64_t k = args.topk / args.pool;
  RunningTopK top = make_topk(k, worker);
  for (int64_t t = unit.begin; t < unit.end; ++t) {
    if (candidates_of(args, unit.sequence, t) <= k) continue;
    top.count = 0;
    for (int64_t part = 0; part < unit.parts; ++part) {
      const int64_t slot = (unit.first_unit + part) * partials.tile_queries + t - unit.begin;
      append(top, k, partials.keys + slot * k, partials.rows + slot * k, partials.counts[slot]);
    }
    settle(top, k);
    write_selection(args, unit.sequence, t, top.rows, top.count);
  }
}

// The asked-for rows of query t, without the -1s: their pointers and their places in rows[t]. Returns how
// many.
template <class Args, class T>
int64_t gather_rows(const Args& args, int64_t b, int64_t t, const T** pointers, int32_t* places) {
  const int32_t* rows = args.rows.i32() + t * args.rows.stride(0);
  int64_t count = 0;
  for (int64_t s = 0; s < args.rows.size(1); ++s) {
    if (rows[s] < 0) continue;
    pointers[count] = row_pointer<T>(args.keys, b, rows[s]);
    places[count++] = static_cast<int32_t>(s);
  }
  return count;
}

template <class T>
void scores_of_queries(const IndexerScores& args, int64_t b, int64_t begin, int64_t end, Worker& worker) {
  const int64_t width = args.q.size(2), asked = args.rows.size(1);
  float* panels = worker.scratch<float>(kBlockKeys * width);
  const T** pointers = worker.scratch<const T*>(asked);
  int32_t* places = worker.scratch<int32_t>(asked);
  for (int64_t t = begin; t < end; ++t) {
    float* out = args.scores.row(t);
    std::fill_n(out, asked, 0.0f);
    const int64_t count = gather_rows(args, b, t, pointers, places);
    for (int64_t i = 0; i < count; i += kBlockKeys) {
      const int64_t n = std::min(kBlockKeys, count - i);
      float scores[kBlockKeys];
      pack_panels(pointers + i, n, kBlockKeys / kLanes, width, panels);
      score_pair(heads_of(args, t), args.weights.row(t), panels, scores);
      for (int64_t j = 0; j < n; ++j) out[places[i + j]] = scores[j];
    }
  }
}

void scores_rows(const IndexerScores& args, int64_t b, int64_t begin, int64_t end, Worker& worker) {
  if (args.keys.pool.dtype() == DType::kBf16) {
    scores_of_queries<bf16>(args, b, begin, end, worker);
  } else {
    scores_of_queries<float>(args, b, begin, end, worker);
  }
}

// slopes[head * 16 + j] = dI/d(q[head] · key j) * dscores[j] for the sixteen keys of a panel; products
// likewise (relu(q · k * scale)) when asked for.
void panel_slopes(const QueryHeads& query, const float* weights, const Lanes& dscores, const float* panel,
                  float* slopes, float* products) {
  const LanesTag d;
  for_each_head<1>(query, panel, [&](int64_t head, int, const Lanes& product) HWY_ATTR {
    const Lanes slope = mul(dscores, broadcast(weights[head] * query.scale));
    store(map([&](int64_t i) HWY_ATTR {
            return hn::IfThenElseZero(hn::Gt(product.part[i], hn::Zero(d)), slope.part[i]);
          }),
          slopes + head * kLanes);
    if (products != nullptr) store(product, products + head * kLanes);
  });
}

// dq and dweights of queries [begin, end) of sequence b, sixteen of their keys at a time.
template <class T>
void query_grads(const IndexerScoresBackward& args, int64_t b, int64_t begin, int64_t end, Worker& worker) {
  const int64_t heads = args.q.size(1), width = args.q.size(2), asked = args.rows.size(1);
  float* panel = worker.scratch<float>(kLanes * width);
  float* keys = worker.scratch<float>(kLanes * width);
  float* slopes = worker.scratch<float>(heads * kLanes);
  float* products = worker.scratch<float>(heads * kLanes);
  float* dweights = worker.scratch<float>(heads * kLanes);
  const T** pointers = worker.scratch<const T*>(asked);
  int32_t* places = worker.scratch<int32_t>(asked);
  for (int64_t t = begin; t < end; ++t) {
    float* dq = args.dq.row(t);
    for (int64_t h = 0; h < heads; ++h) std::fill_n(dq + h * args.dq.stride(1), width, 0.0f);
    std::fill_n(dweights, heads * kLanes, 0.0f);
    const int64_t count = gather_rows(args, b, t, pointers, places);
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t n = std::min(kLanes, count - i);
      float dscores[kLanes] = {};
      for (int64_t j = 0; j < n; ++j) {
        dscores[j] = args.dscores.row(t)[places[i + j]];
        for (int64_t c = 0; c < width; ++c) keys[j * width + c] = to_f32(pointers[i + j][c]);
      }
      pack_panels(pointers + i, n, 1, width, panel);
      panel_slopes(heads_of(args, t), args.weights.row(t), load(dscores), panel, slopes, products);
      block_gemm(heads, width, n, LeftFactor{slopes, kLanes, 1}, keys, width, dq, args.dq.stride(1), true);
      for (int64_t h = 0; h < heads; ++h) {
        float* sum = dweights + h * kLanes;
        store(fma(load(dscores), load(products + h * kLanes), load(sum)), sum);
      }
    }
    for (int64_t h = 0; h < heads; ++h) args.dweights.row(t)[h] = sum_lanes(load(dweights + h * kLanes));
  }
}

void query_grad_rows(const IndexerScoresBackward& args, int64_t b, int64_t begin, int64_t end,
                     Worker& worker) {
  if (args.keys.pool.dtype() == DType::kBf16) {
    query_grads<bf16>(args, b, begin, end, worker);
  } else {
    query_grads<float>(args, b, begin, end, worker);
  }
}

// dkeys of key rows [begin, end) of sequence b: one thread owns them and walks all queries, so every element
// is one chain over (t, place in rows[t], head), ascending.
template <class T>
void key_grads(const IndexerScoresBackward& args, int64_t b, int64_t begin, int64_t end, float* dkeys,
               Worker& worker) {
  const int64_t heads = args.q.size(1), width = args.q.size(2), asked = args.rows.size(1);
  float* panel = worker.scratch<float>(kLanes * width);
  float* slopes = worker.scratch<float>(heads * kLanes);
  int32_t* hits = worker.scratch<int32_t>(asked + kLanes);
  const KeysTag d;
  for (int64_t row = begin; row < end; ++row) std::fill_n(dkeys + row * args.dkeys.stride(0), width, 0.0f);
  for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); ++t) {
    const int32_t* rows = args.rows.i32() + t * args.rows.stride(0);
    int64_t count = 0;
    for (int64_t s = 0; s < asked; s += kLanesPartSize) {
      const auto present = hn::FirstN(d, static_cast<size_t>(std::min(kLanesPartSize, asked - s)));
      const KeysVec row = hn::MaskedLoad(present, d, rows + s);
      const auto own = hn::And(present, hn::And(hn::Gt(row, hn::Set(d, static_cast<int32_t>(begin - 1))),
                                                hn::Lt(row, hn::Set(d, static_cast<int32_t>(end)))));
      count +=
          static_cast<int64_t>(hn::CompressStore(hn::Iota(d, static_cast<int32_t>(s)), own, d, hits + count));
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t n = std::min(kLanes, count - i);
      const T* pointers[kLanes];
      float dscores[kLanes] = {};
      for (int64_t j = 0; j < n; ++j) {
        pointers[j] = row_pointer<T>(args.keys, b, rows[hits[i + j]]);
        dscores[j] = args.dscores.row(t)[hits[i + j]];
      }
      pack_panels(pointers, n, 1, width, panel);
      panel_slopes(heads_of(args, t), args.weights.row(t), load(dscores), panel, slopes, nullptr);
      for (int64_t j = 0; j < n; ++j) {
        block_gemm(1, width, heads, LeftFactor{slopes + j, 0, kLanes}, args.q.row(t), args.q.stride(1),
                   dkeys + rows[hits[i + j]] * args.dkeys.stride(0), 0, true);
      }
    }
  }
}

void key_grad_rows(const IndexerScoresBackward& args, int64_t b, int64_t begin, int64_t end, float* dkeys,
                   Worker& worker) {
  if (args.keys.pool.dtype() == DType::kBf16) {
    key_grads<bf16>(args, b, begin, end, dkeys, worker);
  } else {
    key_grads<float>(args, b, begin, end, dkeys, worker);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(select_unit);
HWY_EXPORT(merge_unit);
HWY_EXPORT(scores_rows);
HWY_EXPORT(query_grad_rows);
HWY_EXPORT(key_grad_rows);

namespace {

constexpr int64_t kGrainQueries = 8;    // of scores and their gradients: each is hundreds of keys
constexpr int64_t kGrainKeyRows = 256;  // of dkeys: each range looks through all rows[t]

}  // namespace

void launch(const IndexerSelect& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const SelectPlan plan(args, stream.threads());
  // Results of a split outlive the task that made them, so they cannot live in its scratch.
  Partials partials{};
  std::unique_ptr<int32_t[]> memory;
  if (plan.split()) {
    const int64_t slots = plan.units() * plan.tile_queries(), k = args.topk / args.pool;
    memory = std::make_unique_for_overwrite<int32_t[]>(static_cast<size_t>(slots * (1 + 2 * k)));
    partials = {.tile_queries = plan.tile_queries(),
                .counts = memory.get(),
                .keys = memory.get() + slots,
                .rows = memory.get() + slots * (1 + k)};
  }
  // The last queries see the most keys: longest first.
  stream.parallel_for(plan.units(), 1, [&](int64_t begin, int64_t, Worker& worker) {
    const int64_t index = plan.units() - 1 - begin;
    HWY_DYNAMIC_DISPATCH(select_unit)(args, plan.unit(index), index, partials, worker);
  });
  if (!plan.split()) return;
  stream.parallel_for(plan.units(), 1, [&](int64_t begin, int64_t, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(merge_unit)(args, plan.unit(begin), partials, worker);
  });
}

void launch(const IndexerScores& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t first = args.sequences.begin(b);
    stream.parallel_for(args.sequences.end(b) - first, kGrainQueries,
                        [&](int64_t begin, int64_t end, Worker& worker) {
                          HWY_DYNAMIC_DISPATCH(scores_rows)(args, b, first + begin, first + end, worker);
                        });
  }
}

void launch(const IndexerScoresBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  float* dkeys = args.dkeys.f32();  // of the sequence
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t first = args.sequences.begin(b), tokens = args.sequences.end(b) - first;
    stream.parallel_for(tokens, kGrainQueries, [&](int64_t begin, int64_t end, Worker& worker) {
      HWY_DYNAMIC_DISPATCH(query_grad_rows)(args, b, first + begin, first + end, worker);
    });
    stream.parallel_for(tokens / args.pool, kGrainKeyRows, [&](int64_t begin, int64_t end, Worker& worker) {
      HWY_DYNAMIC_DISPATCH(key_grad_rows)(args, b, begin, end, dkeys, worker);
    });
    dkeys += tokens / args.pool * args.dkeys.stride(0);
  }
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
