// From ranks to selections: a block a query. Keys of 32 bits of rank, then the position with lower ones
// first, are all different, so "the k largest" needs no word about ties. Digits from the top, counted in a
// histogram, narrow down where the k-th largest lies, until those of the digit's keys fit shared memory: the
// first digit will do unless scores bunch. The row is read once to count and once to mark, in a map of bits,
// what is certainly chosen and to list what is undecided; the list is settled in shared memory, and the map's
// order is the selection's.
#pragma once

#include "kernels/indexer/indexer_round.cuh"

namespace slipstream::kernels {

constexpr int kDigitBits = 12, kDigits = 1 << kDigitBits;

template <int kThreads_>
struct SelectShape {
  static constexpr int kThreads = kThreads_, kListed = 8 * kThreads;
};

template <class Shape>
struct SelectShared {
  uint64_t list[Shape::kListed];
  int histogram[kDigits];
  int warps[Shape::kThreads / kWarp];
  int digit, above, inside, listed;
};

// Keys of [low, low + 2^shift) are undecided: the `wanted` largest of the `inside` many are chosen, and all
// keys above.
struct Cut {
  uint64_t low;
  int shift, wanted, inside;
};

// One more digit. each_digit(shift, f) calls f((key >> shift) % kDigits) for the keys inside the cut, by all
// threads together.
template <class Shape, class EachDigit>
__device__ void narrow(SelectShared<Shape>& s, Cut& cut, const EachDigit& each_digit) {
  const int thread = static_cast<int>(threadIdx.x), shift = max(cut.shift - kDigitBits, 0);
  for (int i = thread; i < kDigits; i += Shape::kThreads) s.histogram[i] = 0;
  __syncthreads();
  each_digit(shift, [&](unsigned digit) { atomicAdd(&s.histogram[digit], 1); });  // counts: any order
  __syncthreads();
  // Largest digits first.
  constexpr int kOwn = kDigits / Shape::kThreads;
  const int highest = kDigits - 1 - kOwn * thread;
  int own = 0;
  for (int j = 0; j < kOwn; ++j) own += s.histogram[highest - j];
  const Scan scan = block_scan<Shape::kThreads>(own, s.warps);
  if (scan.before < cut.wanted && cut.wanted <= scan.before + own) {
    int above = scan.before, digit = highest;
    while (above + s.histogram[digit] < cut.wanted) above += s.histogram[digit--];
    s.digit = digit, s.above = above, s.inside = s.histogram[digit];
  }
  __syncthreads();
  const uint64_t top = cut.low >> (shift + kDigitBits) << kDigitBits;
  cut = {(top | static_cast<unsigned>(s.digit)) << shift, shift, cut.wanted - s.above, s.inside};
  __syncthreads();
}

// The ranks of a row, sixteen bytes at a time: f(first, four ranks) by all threads; those from n on are
// anything.
template <class Shape, class F>
__device__ __forceinline__ void for_ranks(const uint32_t* ranks, int n, F&& f) {
  constexpr int kAhead = 4, kStep = 4 * Shape::kThreads;
  for (int base = 4 * static_cast<int>(threadIdx.x); base < n; base += kAhead * kStep) {
    uint4 four[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * kStep < n) four[i] = *reinterpret_cast<const uint4*>(ranks + base + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t values[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
      if (base + i * kStep < n) f(base + i * kStep, values);
    }
  }
}

// Marks the k < n largest in `chosen`, a bit a position: zeros before.
template <class Shape>
__device__ void mark_largest(const uint32_t* ranks, int n, int k, SelectShared<Shape>& s, uint32_t* chosen) {
  const int position_bits = 32 - __clz(n - 1);
  const uint64_t last = (uint64_t{1} << position_bits) - 1;  // less its position is a key's low part
  Cut cut{.low = 0, .shift = 32 + position_bits, .wanted = k, .inside = n};
  narrow(s, cut, [&](int, auto&& count) {  // the first digit is the rank's
    for_ranks<Shape>(ranks, n, [&](int first, const uint32_t(&four)[4]) {
      for (int i = 0; i < 4; ++i) {
        if (first + i < n) count(four[i] >> (32 - kDigitBits));
      }
    });
  });
  // above(first, marks): bits of four ranks above the cut; inside(key).
  const auto compare = [&](auto&& above, auto&& inside) {
    const uint64_t high = cut.low + (uint64_t{1} << cut.shift) - 1;
    const auto low_rank = static_cast<uint32_t>(cut.low >> position_bits),
               high_rank = static_cast<uint32_t>(high >> position_bits);
    for_ranks<Shape>(ranks, n, [&](int first, const uint32_t(&four)[4]) {
      uint32_t marks = 0;
      for (int i = 0; i < 4; ++i) {
        if (four[i] < low_rank || first + i >= n) continue;
        const uint64_t key = uint64_t{four[i]} << position_bits | (last - static_cast<unsigned>(first + i));
        if (four[i] > high_rank || key > high) {
          marks |= 1u << i;
        } else if (key >= cut.low) {
          inside(key);
        }
      }
      if (marks != 0) above(first, marks);
    });
  };
  const auto digit_of = [](uint64_t key, int shift) { return static_cast<unsigned>(key >> shift) % kDigits; };
  while (cut.inside > Shape::kListed) {
    narrow(s, cut, [&](int shift, auto&& count) {
      compare([](int, uint32_t) {}, [&](uint64_t key) { count(digit_of(key, shift)); });
    });
  }
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
  compare([&](int first, uint32_t marks) { atomicOr(&chosen[first / 32], marks << first % 32); },
          [&](uint64_t key) { s.list[atomicAdd(&s.listed, 1)] = key; });  // in any order
  __syncthreads();
  const int listed = cut.inside;
  const auto for_list = [&](auto&& f) {
    for (int i = static_cast<int>(threadIdx.x); i < listed; i += Shape::kThreads) f(s.list[i]);
  };
  while (cut.inside > cut.wanted) {
    narrow(s, cut, [&](int shift, auto&& count) {
      for_list([&](uint64_t key) {
        if (key >> cut.shift == cut.low >> cut.shift) count(digit_of(key, shift));
      });
    });
  }
  for_list([&](uint64_t key) {
    if (key < cut.low) return;
    const auto position = static_cast<unsigned>(last - (key & last));
    atomicOr(&chosen[position / 32], 1u << position % 32);
  });
  __syncthreads();
}

// `map_words` of dynamic shared memory, a bit a position, or as many a block in `maps` where that is too
// small.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2048 / Shape::kThreads)
    select_rows(const SelectRound round, int pool, bool tail, Rows<int32_t> indices, int width,
                int32_t* counts, int map_words, uint32_t* maps) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& s = *reinterpret_cast<SelectShared<Shape>*>(memory);
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
    for (int i = thread; i < words; i += Shape::kThreads) chosen[i] = 0;
    mark_largest(round.row(place, row), candidates, round.topk_rows, s, chosen);
    int count = 0;
    for (int i = thread * own; i < min(words, (thread + 1) * own); ++i) count += __popc(chosen[i]);
    int at = block_scan<Shape::kThreads>(count, s.warps).before;
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
