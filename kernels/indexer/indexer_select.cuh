// From ranks to selections: a block a query. Keys of 32 bits of rank, then the position with lower ones
// first, are all different, so "the k largest" needs no word about ties. A window of keys that holds the k-th
// is found; one pass over the row marks in a map of bits what is above the window, and lists what is inside
// in shared memory, where digits settle the list. The map's order is the selection's.
// Windows of long rows come from a sample, which is right for all but strange rows; whether it was, the pass
// tells. Else a histogram of the row's first digit gives it, and of further ones while too many are inside.
#pragma once

#include "kernels/indexer/indexer_round.cuh"

namespace slipstream::kernels {

constexpr int kRankBits = 12, kListBits = 8;  // of a digit, for rows and for lists
constexpr int kRankBins = 1 << kRankBits, kListBins = 1 << kListBits;
constexpr int kListed = 4096;  // keys that a list holds

// kAhead: loads of sixteen bytes that a thread has in flight.
template <int kThreads_, bool kSampled_>
struct SelectShape {
  static constexpr int kThreads = kThreads_, kAhead = kThreads == 1024 ? 8 : 4;
  static constexpr bool kSampled = kSampled_;
};

struct SelectShared {
  uint64_t list[kListed];
  int bins[kRankBins];
  int totals[kRankBins / kListBins];  // of kListBins bins
  int warps[kWarp];
  int digit, above, inside;  // of a search
  int marked, listed;
};

// Keys of [low, low + 2^shift) are undecided: the `wanted` largest of the `inside` many are chosen, and all
// keys above.
struct Cut {
  uint64_t low;
  int shift, wanted, inside;
};

// By a warp: which of kListBins bins, from the largest digit down, has the wanted-th key.
__device__ inline void find_in_bins(SelectShared& s, int first_bin, int above, int wanted) {
  constexpr int kOwn = kListBins / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int last = first_bin + kListBins - 1 - kOwn * lane;  // down to last - kOwn + 1
  int counts[kOwn], own = 0;
  for (int i = 0; i < kOwn; i += 4) {
    const int4 four = *reinterpret_cast<const int4*>(&s.bins[last - i - 3]);
    counts[i] = four.w, counts[i + 1] = four.z, counts[i + 2] = four.y, counts[i + 3] = four.x;
  }
  for (int i = 0; i < kOwn; ++i) own += counts[i];
  int before = own;
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(~0u, before, static_cast<unsigned>(step));
    if (lane >= step) before += below;
  }
  before += above - own;
  for (int i = 0; i < kOwn; ++i) {
    if (before < wanted && wanted <= before + counts[i])
      s.digit = last - i, s.above = before, s.inside = counts[i];
    before += counts[i];
  }
}

// The bin of the wanted-th key, once all are counted: in digit, above (keys in larger bins) and inside.
template <int kBits>
__device__ void find_digit(SelectShared& s, int wanted) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();
  if constexpr (kBits == kListBits) {
    if (warp == 0) find_in_bins(s, 0, 0, wanted);
  } else {
    constexpr int kGroups = kRankBins / kListBins;
    static_assert(kBits == kRankBits && kGroups <= 16);  // at least that many warps
    if (warp < kGroups) {
      int own = 0;
      for (int i = lane; i < kListBins; i += kWarp) own += s.bins[warp * kListBins + i];
      own = __reduce_add_sync(~0u, own);
      if (lane == 0) s.totals[warp] = own;
    }
    __syncthreads();
    if (warp < kGroups) {
      const int above = __reduce_add_sync(~0u, lane > warp && lane < kGroups ? s.totals[lane] : 0);
      if (above < wanted && wanted <= above + s.totals[warp])
        find_in_bins(s, warp * kListBins, above, wanted);
    }
  }
  __syncthreads();
}

template <int kBits>
__device__ void clear_bins(SelectShared& s) {
  for (int i = 4 * static_cast<int>(threadIdx.x); i < 1 << kBits; i += 4 * static_cast<int>(blockDim.x))
    *reinterpret_cast<int4*>(&s.bins[i]) = int4{0, 0, 0, 0};
  __syncthreads();
}

// One more digit. each_digit(shift, f) calls f((key >> shift) % 2^kBits) for the keys inside the cut, by all
// threads together.
template <int kBits, class EachDigit>
__device__ void narrow(SelectShared& s, Cut& cut, const EachDigit& each_digit) {
  const int shift = max(cut.shift - kBits, 0);
  clear_bins<kBits>(s);
  each_digit(shift, [&](unsigned digit) { atomicAdd(&s.bins[digit], 1); });  // counts: any order
  find_digit<kBits>(s, cut.wanted);
  const uint64_t top = cut.low >> (shift + kBits) << kBits;
  cut = {(top | static_cast<unsigned>(s.digit)) << shift, shift, cut.wanted - s.above, s.inside};
}

// The ranks of a row: f(first position, four ranks) by all threads of warps, which have 128 together. Those
// from n on are 0: with their positions they come after all others.
template <class Shape, class F>
__device__ __forceinline__ void for_ranks(const uint32_t* ranks, int n, F&& f) {
  constexpr int kStep = 4 * Shape::kThreads;
  const int lane = 4 * (static_cast<int>(threadIdx.x) % kWarp);
  for (int base = 4 * static_cast<int>(threadIdx.x) - lane; base < n; base += Shape::kAhead * kStep) {
    uint4 four[Shape::kAhead];
#pragma unroll
    for (int i = 0; i < Shape::kAhead; ++i) {
      const int first = base + i * kStep + lane;
      four[i] = first < n ? *reinterpret_cast<const uint4*>(ranks + first) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < Shape::kAhead; ++i) {
      if (base + i * kStep >= n) break;
      const int first = base + i * kStep + lane;
      uint32_t values[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
      if (first + 4 > n) {
        for (int j = 1; j < 4; ++j) values[j] = first + j < n ? values[j] : 0;
      }
      f(first, values);
    }
  }
}
constexpr int kUnit = 4 * kWarp;  // ranks that a warp has together

// Keys of a row: their low part is `last` less the position.
struct KeyForm {
  int position_bits;
  uint64_t last;
  __device__ explicit KeyForm(int n) {
    position_bits = 32 - __clz(n + kUnit);
    last = (uint64_t{1} << position_bits) - 1;
  }
  __device__ uint64_t key(uint32_t rank, int position) const {
    return uint64_t{rank} << position_bits | (last - static_cast<unsigned>(position));
  }
  __device__ unsigned position(uint64_t key) const { return static_cast<unsigned>(last - (key & last)); }
};

// Marks keys above [low, high] in `chosen`, and lists those inside, less low: in any order, the first
// kListed.
template <class Shape>
__device__ void split_row(const uint32_t* ranks, int n, const KeyForm& form, uint64_t low, uint64_t high,
                          SelectShared& s, uint32_t* chosen) {
  const auto low_rank = static_cast<uint32_t>(low >> form.position_bits),
             high_rank = static_cast<uint32_t>(high >> form.position_bits);
  const bool whole_ranks = (low & form.last) == 0 && (high & form.last) == form.last;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (threadIdx.x == 0) s.marked = s.listed = 0;
  __syncthreads();
  int marked = 0;
  for_ranks<Shape>(ranks, n, [&](int first, const uint32_t(&four)[4]) {
    uint32_t marks = 0, inside = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (four[i] > high_rank) marks |= 1u << i;
      if (four[i] >= low_rank) inside |= 1u << i;
    }
    inside &= ~marks;
    if (!whole_ranks) {
      for (int i = 0; i < 4; ++i) {
        if ((inside >> i & 1) == 0) continue;
        const uint64_t key = form.key(four[i], first + i);
        if (key > high) marks |= 1u << i;
        if (key > high || key < low) inside &= ~(1u << i);
      }
    }
    marked += __popc(marks);
    // Eight lanes have a word of the map.
    uint32_t word = marks << lane % 8 * 4;
    for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
    if (lane % 8 == 0) chosen[first / 32] = word;
    if (!__any_sync(~0u, inside != 0)) return;
    // A place in the list for all of the warp's at once.
    int before = 0, total = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t lanes = __ballot_sync(~0u, inside >> i & 1);
      before += __popc(lanes & ((1u << lane) - 1));
      total += __popc(lanes);
    }
    int at = lane == 0 ? atomicAdd(&s.listed, total) : 0;
    at = __shfl_sync(~0u, at, 0) + before;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((inside >> i & 1) == 0) continue;
      if (at < kListed) s.list[at] = form.key(four[i], first + i) - low;
      ++at;
    }
  });
  marked = __reduce_add_sync(~0u, marked);
  if (lane == 0) atomicAdd(&s.marked, marked);
  __syncthreads();
}

// Guesses ranks [low, high] for the k-th of n from every eighth sixteen.
__device__ inline void guess_window(const uint32_t* ranks, int n, int k, SelectShared& s, uint32_t& low,
                                    uint32_t& high) {
  constexpr int kChunk = 16, kStride = 128;
  const int chunks = n / kStride;
  clear_bins<kRankBits>(s);
  for (int i = static_cast<int>(threadIdx.x); i < chunks * (kChunk / 4); i += static_cast<int>(blockDim.x)) {
    const uint4 four =
        *reinterpret_cast<const uint4*>(ranks + i / (kChunk / 4) * kStride + i % (kChunk / 4) * 4);
    const uint32_t values[4] = {four.x, four.y, four.z, four.w};
    for (const uint32_t rank : values) atomicAdd(&s.bins[rank >> (32 - kRankBits)], 1);
  }
  // Five standard deviations: how many of the k largest a sample has is about binomial.
  const int sampled = chunks * kChunk;
  const float expected = static_cast<float>(k) * static_cast<float>(sampled) / static_cast<float>(n);
  const int margin = static_cast<int>(5.0f * sqrtf(expected)) + 1;
  const int least = static_cast<int>(expected) - margin, most = static_cast<int>(expected) + margin;
  low = 0, high = ~0u;
  if (least >= 1) {
    find_digit<kRankBits>(s, least);
    high = (static_cast<uint32_t>(s.digit) + 1 << (32 - kRankBits)) - 1;
  }
  if (most <= sampled) {
    find_digit<kRankBits>(s, most);
    low = static_cast<uint32_t>(s.digit) << (32 - kRankBits);
  }
}

// Writes a map of bits, the positions of the k < n largest: whole units of a warp.
template <class Shape>
__device__ void mark_largest(const uint32_t* ranks, int n, int k, SelectShared& s, uint32_t* chosen) {
  const KeyForm form(n);
  uint64_t low = 0, high = 0;
  bool found = false;
  if constexpr (Shape::kSampled) {
    uint32_t low_rank, high_rank;
    guess_window(ranks, n, k, s, low_rank, high_rank);
    low = uint64_t{low_rank} << form.position_bits;
    high = (uint64_t{high_rank} + 1 << form.position_bits) - 1;
    split_row<Shape>(ranks, n, form, low, high, s, chosen);
    found = s.listed <= kListed && s.marked < k && k <= s.marked + s.listed;
  }
  if (!found) {
    Cut cut{.low = 0, .shift = 32 + form.position_bits, .wanted = k, .inside = n};
    narrow<kRankBits>(s, cut, [&](int, auto&& count) {
      for_ranks<Shape>(ranks, n, [&](int, const uint32_t(&four)[4]) {
        for (const uint32_t rank : four) count(rank >> (32 - kRankBits));
      });
    });
    while (cut.inside > kListed) {
      narrow<kRankBits>(s, cut, [&](int shift, auto&& count) {
        for_ranks<Shape>(ranks, n, [&](int first, const uint32_t(&four)[4]) {
          for (int i = 0; i < 4; ++i) {
            const uint64_t key = form.key(four[i], first + i);
            if (key >> cut.shift == cut.low >> cut.shift)
              count(static_cast<unsigned>(key >> shift) % kRankBins);
          }
        });
      });
    }
    low = cut.low, high = low + (uint64_t{1} << cut.shift) - 1;
    split_row<Shape>(ranks, n, form, low, high, s, chosen);
  }
  const int listed = s.listed;
  const auto for_list = [&](auto&& f) {
    for (int i = static_cast<int>(threadIdx.x); i < listed; i += Shape::kThreads) f(s.list[i]);
  };
  Cut cut{.low = 0,
          .shift = 64 - __clzll(static_cast<int64_t>(high - low)),
          .wanted = k - s.marked,
          .inside = listed};
  while (cut.inside > cut.wanted) {
    narrow<kListBits>(s, cut, [&](int shift, auto&& count) {
      for_list([&](uint64_t key) {
        if (key >> cut.shift == cut.low >> cut.shift) count(static_cast<unsigned>(key >> shift) % kListBins);
      });
    });
  }
  for_list([&](uint64_t key) {
    if (key < cut.low) return;
    const unsigned position = form.position(key + low);
    atomicOr(&chosen[position / 32], 1u << position % 32);
  });
  __syncthreads();
}

// `map_words` of dynamic shared memory, a bit a position, or as many a block in `maps` where that is too
// small.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kThreads == 1024 ? 1 : 3)
    select_rows(const SelectRound round, int pool, bool tail, Rows<int32_t> indices, int width,
                int32_t* counts, int map_words, uint32_t* maps) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& s = *reinterpret_cast<SelectShared*>(memory);
  const int place = static_cast<int>(blockIdx.x) / round.queries,
            row = static_cast<int>(blockIdx.x) % round.queries;
  const QueryPiece piece = round.pieces[place];
  if (piece.sequence < 0 || row >= piece.count) return;
  const int t = piece.first + row, position = piece.position + row, thread = static_cast<int>(threadIdx.x);
  const int candidates = (position + 1) / pool;
  int32_t* const out = indices[t];
  const int chosen_count = min(candidates, round.topk_rows);
  if (candidates <= round.topk_rows) {
    for (int i = thread; i < candidates * pool; i += Shape::kThreads) out[i] = i;
  } else {
    uint32_t* const chosen = maps != nullptr ? maps + static_cast<int64_t>(blockIdx.x) * map_words
                                             : reinterpret_cast<uint32_t*>(memory + sizeof(s));
    const int words = (candidates + 31) / 32, own = (words + Shape::kThreads - 1) / Shape::kThreads;
    mark_largest<Shape>(round.row(place, row), candidates, round.topk_rows, s, chosen);
    int count = 0;
    for (int i = thread * own; i < min(words, (thread + 1) * own); ++i) count += __popc(chosen[i]);
    int at = block_scan(count, s.warps).before;
    for (int i = thread * own; i < min(words, (thread + 1) * own); ++i) {
      for (uint32_t left = chosen[i]; left != 0; left &= left - 1, ++at) {
        const int key_row = i * 32 + __ffs(static_cast<int>(left)) - 1;
        for (int r = 0; r < pool; ++r) out[at * pool + r] = key_row * pool + r;
      }
    }
  }
  int count = chosen_count * pool;
  const int open = tail ? position + 1 - candidates * pool : 0;
  for (int i = thread; i < open; i += Shape::kThreads) out[count + i] = candidates * pool + i;
  count += open;
  for (int i = count + thread; i < width; i += Shape::kThreads) out[i] = -1;
  if (thread == 0) counts[t] = count;
}

}  // namespace slipstream::kernels
