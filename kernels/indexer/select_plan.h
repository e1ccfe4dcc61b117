// How IndexerSelect is cut into work: tiles of queries that share packed keys, and parts of long key ranges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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
// the split over keys changes nothing but who does the work.
class SelectPlan {
 public:
  SelectPlan(const IndexerSelect& args, int threads) {
    int64_t rows = 0;
    for_each_tile(args, [&](int64_t, int64_t begin, int64_t end, int64_t tile_rows) {
      rows += tile_rows;
      tile_queries_ = std::max(tile_queries_, end - begin);
    });
    // Four units a thread even out the ends; below a thousand keys a split costs more than it gains.
    const int64_t rows_max =
        threads > 1 ? std::max<int64_t>(1024, rows / (4 * threads) / kPageRows * kPageRows) : int64_t{1} << 40;
    for_each_tile(args, [&](int64_t b, int64_t begin, int64_t end, int64_t tile_rows) {
      const int64_t parts = tile_rows == 0 ? 1 : (tile_rows + rows_max - 1) / rows_max, first = units();
      split_ = split_ || parts > 1;
      for (int64_t part = 0; part < parts; ++part) {
        units_.push_back({.sequence = b,
                          .begin = begin,
                          .end = end,
                          .first_row = part * rows_max,
                          .end_row = part + 1 == parts ? tile_rows : (part + 1) * rows_max,
                          .part = part,
                          .parts = parts,
                          .first_unit = first});
      }
    });
  }

  int64_t units() const { return static_cast<int64_t>(units_.size()); }
  const SelectUnit& unit(int64_t index) const { return units_[static_cast<size_t>(index)]; }
  bool split() const { return split_; }
  int64_t tile_queries() const { return tile_queries_; }  // of the largest tile

 private:
  // each(sequence, first query, end query, rows to score: 0 when every candidate is selected anyway).
  template <class Each>
  static void for_each_tile(const IndexerSelect& args, Each&& each) {
    for (int64_t b = 0; b < args.sequences.count(); ++b) {
      for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); t += kTileQueries) {
        const int64_t end = std::min(t + kTileQueries, args.sequences.end(b));
        const int64_t rows = candidates_of(args, b, end - 1);
        each(b, t, end, rows > args.topk / args.pool ? rows : 0);
      }
    }
  }

  std::vector<SelectUnit> units_;
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
