// How the selections of one full-indexer layer are written and read, row after row. See model/replay.h.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <numeric>
#include <vector>

#include "model/range_coder.h"

namespace slipstream::model {

// One coding step for both directions: a Writer writes the value it is given, a Reader ignores it and returns
// the one it reads. So the two sides cannot disagree about the order of steps.
struct SelectionWriter {
  static constexpr bool kReads = false;
  RangeEncoder& range;
  bool bit(BitModel& model, bool value) {
    range.bit(model, value);
    return value;
  }
  uint32_t direct(uint32_t value, int count) {
    range.direct(value, count);
    return value;
  }
};
struct SelectionReader {
  static constexpr bool kReads = true;
  RangeDecoder& range;
  bool bit(BitModel& model, bool) { return range.bit(model); }
  uint32_t direct(uint32_t, int count) { return range.direct(count); }
};

// Exp-Golomb with adaptive length and leading bits: small and typical numbers are cheap.
class NumberModel {
 public:
  template <class Coder>
  uint32_t code(Coder& coder, uint32_t value) {
    const uint32_t plus = value + 1;
    const int wanted = std::bit_width(plus) - 1;
    int length = 0;  // of what follows the leading one
    while (length < 30 && coder.bit(length_[static_cast<size_t>(length)], length < wanted)) ++length;
    uint32_t out = 1;
    const int modelled = std::min(length, 2), rest = length - modelled;
    for (int i = 0; i < modelled; ++i) {
      const size_t context = static_cast<size_t>(length) * 4 + (i == 0 ? 0 : 1 + (out & 1));
      out = out << 1 | (coder.bit(leading_[context], (plus >> (length - 1 - i) & 1) != 0) ? 1u : 0u);
    }
    if (rest > 0) out = out << rest | coder.direct(plus & ((1u << rest) - 1), rest);
    return out - 1;
  }

 private:
  std::array<BitModel, 31> length_;
  std::array<BitModel, 31 * 4> leading_;
};

class SelectionModel {
 public:
  SelectionModel(int64_t topk, int64_t pool, bool tail) : pool_(pool), most_(topk / pool), tail_(tail) {}

  // The row of position t; rows come in ascending order. positions: given to a writer (ascending, in 0..t),
  // filled by a reader. False: a reader met what no writer writes.
  template <class Coder>
  bool row(Coder& coder, int64_t t, std::vector<int32_t>& positions) {
    const int64_t pools = (t + 1) / pool_;  // candidates
    bool regular = false;
    if constexpr (!Coder::kReads) regular = to_pools(t, positions);
    regular = coder.bit(regular_, regular);
    if (!regular) {
      previous_.clear();
      previous_pools_ = pools;
      return any_positions(coder, t, positions);
    }
    if (pools <= most_) {
      chosen_.resize(static_cast<size_t>(pools));
      std::iota(chosen_.begin(), chosen_.end(), 0);
      next_.clear();
      for (const int32_t id : chosen_) next_.push_back({id, 0});
    } else if (!some_pools(coder, pools)) {
      return false;
    }
    previous_.swap(next_);
    previous_pools_ = pools;
    if constexpr (Coder::kReads) to_positions(t, positions);
    return true;
  }

 private:
  struct Pool {
    int32_t id;
    int32_t age;  // rows it has been selected for, at most 15
  };

  // Fills chosen_; false unless positions are whole pools, as many as there can be, and the tail this layer
  // adds.
  bool to_pools(int64_t t, const std::vector<int32_t>& positions) {
    const int64_t count = static_cast<int64_t>(positions.size());
    const int64_t pools = std::min((t + 1) / pool_, most_), tail_from = (t + 1) / pool_ * pool_;
    const int64_t tail = tail_ ? t + 1 - tail_from : 0;
    if (count != pools * pool_ + tail) return false;
    chosen_.clear();
    for (int64_t i = 0; i < pools; ++i) {
      const int32_t first = positions[static_cast<size_t>(i * pool_)];
      if (first % pool_ != 0 || first >= tail_from) return false;
      for (int64_t j = 1; j < pool_; ++j) {
        if (positions[static_cast<size_t>(i * pool_ + j)] != first + j) return false;
      }
      chosen_.push_back(static_cast<int32_t>(first / pool_));
    }
    for (int64_t j = 0; j < tail; ++j) {
      if (positions[static_cast<size_t>(pools * pool_ + j)] != tail_from + j) return false;
    }
    return true;
  }

  void to_positions(int64_t t, std::vector<int32_t>& positions) const {
    positions.clear();
    for (const Pool& pool : previous_) {
      for (int64_t j = 0; j < pool_; ++j) positions.push_back(static_cast<int32_t>(pool.id * pool_ + j));
    }
    if (!tail_) return;
    for (int64_t p = (t + 1) / pool_ * pool_; p <= t; ++p) positions.push_back(static_cast<int32_t>(p));
  }

  // most_ of `pools`, into next_: those of the previous row that stay, then new pools, then gaps among the
  // others.
  template <class Coder>
  bool some_pools(Coder& coder, int64_t pools) {
    next_.clear();
    added_.clear();
    size_t c = 0;  // walks over chosen_
    bool last = true;
    for (const Pool& pool : previous_) {
      bool stays = false;
      if constexpr (!Coder::kReads) {
        for (; c < chosen_.size() && chosen_[c] < pool.id; ++c) added_.push_back(chosen_[c]);
        stays = c < chosen_.size() && chosen_[c] == pool.id;
        if (stays) ++c;
      }
      const size_t age = pool.age < 3 ? static_cast<size_t>(pool.age) : pool.age < 8 ? 3 : 4;
      stays = coder.bit(stays_[age * 2 + (last ? 1 : 0)], stays);
      last = stays;
      if (stays) next_.push_back({pool.id, std::min(pool.age + 1, 15)});
    }
    if constexpr (!Coder::kReads) {
      for (; c < chosen_.size(); ++c) added_.push_back(chosen_[c]);
    }
    int64_t left = most_ - static_cast<int64_t>(next_.size());
    // Many new candidates, at the start of a piece, are better told by gaps.
    const int64_t fresh_from = pools - previous_pools_ <= kFreshMost ? previous_pools_ : pools;
    const size_t middle = next_.size();
    size_t old_added = 0;
    if constexpr (!Coder::kReads) {
      while (old_added < added_.size() && added_[old_added] < fresh_from) ++old_added;
    }
    size_t a = old_added;
    for (int64_t id = fresh_from; id < pools && left > 0; ++id) {
      bool chosen = false;
      if constexpr (!Coder::kReads) chosen = a < added_.size() && added_[a] == id;
      if (!coder.bit(fresh_, chosen)) continue;
      ++a;
      --left;
      next_.push_back({static_cast<int32_t>(id), 0});
    }
    int64_t rank = -1;  // among pools that were not in the previous row
    size_t p = 0;       // of the previous row, those below the pool at hand
    for (int64_t i = 0; i < left; ++i) {
      uint32_t gap = 0;
      if constexpr (!Coder::kReads) {
        const int32_t id = added_[static_cast<size_t>(i)];
        while (p < previous_.size() && previous_[p].id < id) ++p;
        gap = static_cast<uint32_t>(id - static_cast<int64_t>(p) - rank - 1);
      }
      rank += 1 + static_cast<int64_t>(gap_.code(coder, gap));
      while (p < previous_.size() && previous_[p].id - static_cast<int64_t>(p) <= rank) ++p;
      const int64_t id = rank + static_cast<int64_t>(p);
      if (id >= fresh_from) return false;
      next_.push_back({static_cast<int32_t>(id), 0});
    }
    if (next_.size() > middle) {
      std::sort(next_.begin(), next_.end(), [](const Pool& x, const Pool& y) { return x.id < y.id; });
    }
    return static_cast<int64_t>(next_.size()) == most_;
  }

  template <class Coder>
  bool any_positions(Coder& coder, int64_t t, std::vector<int32_t>& positions) {
    const uint32_t count = any_count_.code(coder, static_cast<uint32_t>(positions.size()));
    if (count > t + 1) return false;
    if constexpr (Coder::kReads) positions.assign(count, 0);
    int64_t last = -1;
    for (int32_t& position : positions) {
      last += 1 + static_cast<int64_t>(any_gap_.code(coder, static_cast<uint32_t>(position - last - 1)));
      if (last > t) return false;
      position = static_cast<int32_t>(last);
    }
    return true;
  }

  static constexpr int64_t kFreshMost = 8;
  int64_t pool_, most_;
  bool tail_;
  std::vector<Pool> previous_, next_;
  std::vector<int32_t> chosen_, added_;  // added: chosen and not in the previous row
  int64_t previous_pools_ = 0;
  BitModel regular_, fresh_;
  std::array<BitModel, 10> stays_;
  NumberModel gap_, any_count_, any_gap_;
};

}  // namespace slipstream::model
