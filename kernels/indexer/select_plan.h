// How IndexerSelect is cut into work: tiles of queries that share packed keys, and parts of long key ranges.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/indexer/indexer.h"

namespace slipstream::kernels {

// Queries that share one packing of the keys, which costs about as much as scoring one query of eight heads.
constexpr int64_t kTileQueries = 32;
// Keys packed at a time: two panels of sixteen, half a page.
constexpr int64_t kBlockKeys = 32;
static_assert(kPageRows % kBlockKeys == 0);

// What one thread scores: some queries of one sequence against key rows [first_row, end_row).
struct SelectUnit {
  int64_t sequence;
  int64_t begin, end;          // queries
  int64_t first_row, end_row;  // end_row <= candidates of the last query
  int64_t part, parts;         // this unit's place among those of the same queries
  int64_t first_unit;          // index of part 0 of these queries
};

// Candidates of the query in row t of the batch.
inline int64_t candidates_of(const IndexerSelect& args, int64_t b, int64_t t) {
  return (args.sequences.cached_tokens(b) + t - args.sequences.begin(b) + 1) / args.pool;
}

// Units in the order of the queries. Scores of different keys are independent and the selection is exact, so
// the split over keys (at most rows_max a unit) changes nothing but who does the work.
class SelectPlan {
 public:
  SelectPlan(const IndexerSelect& args, int threads) : args_(args) {
    int64_t rows = 0;
    for_each_tile([&](int64_t, int64_t begin, int64_t end, int64_t tile_rows) {
      rows += tile_rows;
      tile_queries_ = std::max(tile_queries_, end - begin);
    });
    // Four units a thread even out the ends; below a thousand keys a split costs more than it gains.
    if (threads > 1) rows_max_ = std::max<int64_t>(1024, rows / (4 * threads) / kPageRows * kPageRows);
    for_each_tile([&](int64_t, int64_t, int64_t, int64_t tile_rows) {
      units_ += parts_of(tile_rows);
      split_ = split_ || parts_of(tile_rows) > 1;
    });
  }

  int64_t units() const { return units_; }
  bool split() const { return split_; }
  int64_t tile_queries() const { return tile_queries_; }  // of the largest tile

  SelectUnit unit(int64_t index) const {
    SelectUnit out{};
    int64_t first = 0;
    for_each_tile([&](int64_t b, int64_t begin, int64_t end, int64_t tile_rows) {
      const int64_t parts = parts_of(tile_rows);
      if (index >= first && index < first + parts) {
        const int64_t part = index - first;
        out = {.sequence = b,
               .begin = begin,
               .end = end,
               .first_row = part * rows_max_,
               .end_row = part + 1 == parts ? tile_rows : (part + 1) * rows_max_,
               .part = part,
               .parts = parts,
               .first_unit = first};
      }
      first += parts;
    });
    return out;
  }

 private:
  // each(sequence, first query, end query, rows to score: 0 when every candidate is selected anyway).
  template <class Each>
  void for_each_tile(Each&& each) const {
    for (int64_t b = 0; b < args_.sequences.count(); ++b) {
      for (int64_t t = args_.sequences.begin(b); t < args_.sequences.end(b); t += kTileQueries) {
        const int64_t end = std::min(t + kTileQueries, args_.sequences.end(b));
        const int64_t rows = candidates_of(args_, b, end - 1);
        each(b, t, end, rows > args_.topk / args_.pool ? rows : 0);
      }
    }
  }
  int64_t parts_of(int64_t rows) const { return rows == 0 ? 1 : (rows + rows_max_ - 1) / rows_max_; }

  const IndexerSelect& args_;
  int64_t rows_max_ = int64_t{1} << 40;
  int64_t units_ = 0;
  int64_t tile_queries_ = 0;
  bool split_ = false;
};

// What the units of a split tile leave behind: the best k rows of each query among the unit's.
struct Partials {
  int64_t tile_queries;
  int32_t* counts;  // [units, tile_queries]
  int32_t* keys;    // [units, tile_queries, k]
  int32_t* rows;    // [units, tile_queries, k]
};

}  // namespace slipstream::kernels
