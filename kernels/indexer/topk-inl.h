// RunningTopK: the k largest of a stream of scores, equal scores to the earlier one, NaN after every number.
//
// Scores arrive in ascending row order and are kept in that order. Those above `floor` are appended, a vector
// compare and a compress; when the buffer is full it is settled back to the best k: their least key is found
// by bisection over counts (about eleven vector passes over the buffer, at most 32), and one stable compress keeps
// them. Because order is kept, ties need no positions in the comparison, and the result needs no sort. All of
// it is exact, so the result does not depend on how the stream was cut or how often it was settled.
//
// Included by files that go through hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_INDEXER_TOPK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_INDEXER_TOPK_INL_H_
#undef SLIPSTREAM_KERNELS_INDEXER_TOPK_INL_H_
#else
#define SLIPSTREAM_KERNELS_INDEXER_TOPK_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// The most scores of one push().
constexpr int64_t kPushMax = 32;

// Keys are the scores as integers of the same order; below them all stands NaN, and below NaN "no key".
constexpr int32_t kNoKey = std::numeric_limits<int32_t>::min();
constexpr int32_t kNanKey = kNoKey + 1;

using KeysTag = hn::RebindToSigned<LanesTag>;
using KeysVec = hn::Vec<KeysTag>;

HWY_INLINE KeysVec order_keys(LanesVec scores) {
  const KeysTag d;
  const KeysVec bits = hn::BitCast(d, hn::Add(scores, hn::Zero(LanesTag())));  // -0 + 0 = 0
  const KeysVec flipped = hn::Xor(bits, hn::And(hn::ShiftRight<31>(bits), hn::Set(d, 0x7fffffff)));
  return hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(scores)), hn::Set(d, kNanKey), flipped);
}

struct RunningTopK {
  int32_t* keys;           // [capacity(k)]
  int32_t* rows;           // [capacity(k)], ascending
  int64_t count = 0;       // kept so far
  int32_t floor = kNoKey;  // keys up to here can no longer be among the best

  // Room to double before settling; one vector more, because keep() writes whole vectors.
  static int64_t capacity(int64_t k) { return 2 * k + kPushMax + kLanes; }
};

// Writes the chosen lanes at `at` and returns how many they are. Whole vectors are stored, rubbish after the
// chosen lanes included.
HWY_INLINE int64_t keep(KeysVec key, KeysVec row, hn::Mask<KeysTag> stays, RunningTopK& top, int64_t at) {
  const KeysTag d;
  hn::StoreU(hn::Compress(key, stays), d, top.keys + at);
  hn::StoreU(hn::Compress(row, stays), d, top.rows + at);
  return static_cast<int64_t>(hn::CountTrue(d, stays));
}

// Keys above `than` among keys[0, count); the vector after them is kNoKey.
HWY_INLINE int64_t count_above(const int32_t* keys, int64_t count, int32_t than) {
  const KeysTag d;
  const KeysVec bound = hn::Set(d, than);
  size_t above = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int64_t part = 0; part < kLanes; part += kLanesPartSize) {
      above += hn::CountTrue(d, hn::Gt(hn::LoadU(d, keys + i + part), bound));
    }
  }
  return static_cast<int64_t>(above);
}

// A value v with count(keys > v) <= k <= count(keys >= v); 1 <= k <= count.
inline int32_t cut_of(const int32_t* keys, int64_t count, int64_t k) {
  const KeysTag d;
  KeysVec least = hn::Set(d, std::numeric_limits<int32_t>::max()), most = hn::Set(d, kNoKey);
  for (int64_t i = 0; i < count; i += kLanesPartSize) {
    const KeysVec v = hn::LoadU(d, keys + i);
    least = hn::IfThenElse(hn::Eq(v, hn::Set(d, kNoKey)), least, hn::Min(least, v));
    most = hn::Max(most, v);
  }
  // Interpolating between the counts takes as many passes as halving: scores crowd in ways that a line misses.
  int64_t low = hn::GetLane(hn::MinOfLanes(d, least)), high = hn::GetLane(hn::MaxOfLanes(d, most));
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    const int64_t at_least = count_above(keys, count, static_cast<int32_t>(middle - 1));
    if (at_least == k) return static_cast<int32_t>(middle);
    if (at_least > k) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return static_cast<int32_t>(low);
}

// Drops all but the best k.
inline void settle(RunningTopK& top, int64_t k) {
  if (top.count <= k) return;
  const KeysTag d;
  for (int64_t i = 0; i < kLanes; ++i) top.keys[top.count + i] = kNoKey;
  const int32_t cut = cut_of(top.keys, top.count, k);
  int64_t equals_left =
      k - count_above(top.keys, top.count, cut);  // keys equal to the cut that may stay: the first
  int64_t kept = 0;
  for (int64_t i = 0; i < top.count; i += kLanesPartSize) {
    const KeysVec key = hn::LoadU(d, top.keys + i), row = hn::LoadU(d, top.rows + i);
    const auto above = hn::Gt(key, hn::Set(d, cut));
    auto stays = above;
    if (equals_left > 0) {
      const auto equal = hn::Eq(key, hn::Set(d, cut));
      const int64_t equals = static_cast<int64_t>(hn::CountTrue(d, equal));
      if (equals <= equals_left) {
        stays = hn::Or(above, equal);
        equals_left -= equals;
      } else {  // once a settle: the vector in which the ties run out
        const auto before = hn::FirstN(d, [&] {
          size_t lane = 0;
          for (; equals_left > 0; ++lane) equals_left -= top.keys[i + static_cast<int64_t>(lane)] == cut;
          return lane;
        }());
        stays = hn::Or(above, hn::And(equal, before));
      }
    }
    kept += keep(key, row, stays, top, kept);
  }
  top.count = kept;
  top.floor = cut;
}

// Scores of rows first .. first+n-1 (n <= kPushMax), later than all rows so far; scores[kPushMax] is read
// whole.
HWY_INLINE void push(RunningTopK& top, int64_t k, const float* scores, int64_t first, int64_t n) {
  constexpr int64_t kVectors = kPushMax / kLanesPartSize;
  const KeysTag d;
  if (top.count + kPushMax + kLanes > RunningTopK::capacity(k)) settle(top, k);
  // All comparisons first: most pushes of a long stream keep nothing, and one branch a push is predicted
  // better.
  KeysVec key[kVectors];
  hn::Mask<KeysTag> stays[kVectors];
  bool none = true;
  for (int64_t i = 0; i < kVectors; ++i) {
    key[i] = order_keys(hn::LoadU(LanesTag(), scores + i * kLanesPartSize));
    const int64_t own = std::clamp<int64_t>(n - i * kLanesPartSize, 0, kLanesPartSize);
    stays[i] = hn::And(hn::Gt(key[i], hn::Set(d, top.floor)), hn::FirstN(d, static_cast<size_t>(own)));
    none = none && hn::AllFalse(d, stays[i]);
  }
  if (none) return;
  for (int64_t i = 0; i < kVectors; ++i) {
    const KeysVec row = hn::Iota(d, static_cast<int32_t>(first + i * kLanesPartSize));
    top.count += keep(key[i], row, stays[i], top, top.count);
  }
}

// Appends what another stream, of later rows, has kept.
inline void append(RunningTopK& top, int64_t k, const int32_t* keys, const int32_t* rows, int64_t n) {
  for (int64_t i = 0; i < n; i += kPushMax) {
    if (top.count + kPushMax + kLanes > RunningTopK::capacity(k)) settle(top, k);
    const int64_t piece = std::min(kPushMax, n - i);
    std::copy_n(keys + i, piece, top.keys + top.count);
    std::copy_n(rows + i, piece, top.rows + top.count);
    top.count += piece;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
