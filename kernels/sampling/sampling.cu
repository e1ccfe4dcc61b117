#include "kernels/sampling/sampling.h"

#include <cooperative_groups.h>

#include "kernels/cuda/pieces.cuh"
#include "kernels/cuda/softmax_row.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

namespace cg = cooperative_groups;

// A row belongs to a cluster of blocks, each of which keeps a slice of consecutive logits in shared memory: filters look at
// the row several times, and one block alone reads from the L2 at a hundredth of its rate.
constexpr int kSlices = 8, kThreads = kSoftmaxThreads, kWarps = kThreads / kWarp;
constexpr int kStaticShared = 12288;  // at most, of the functions below

// A token's mass exp((logit - max) / temperature) in units of 2^-44: whole numbers, whose sums are the same in any order. A
// vocabulary of 2^19 sums to less than 2^64.
using Mass = unsigned long long;
constexpr float kMassUnit = 17592186044416.0f;  // 2^44
constexpr int64_t kVocabMax = 1 << 19;

// Tokens by rank: descending keys. A larger logit first, equal logits by ascending id.
using Key = unsigned long long;
__device__ Key key_of(float logit, int64_t id) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0: they are equal
  const uint32_t order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return Key{order} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

// Logits fall into bins by their distance from the largest, 1/16 of the temperature wide and one for the rest. Bins have the
// order of ranks, as subtraction and multiplication round monotonically.
constexpr int kBins = kThreads;
constexpr float kBinsPerUnit = 16.0f;
// Tokens of one bin that a filter's threshold is looked for among. More, say of equal logits, are looked for in the row.
constexpr int kCandidatesMax = 4096;
// A bin's mass is added up in three digits of 16 bits: 2^16 of these fit 32 bits, which shared memory adds by itself.
constexpr int kDigits = 3;
static_assert(kVocabMax / kSlices <= 1 << 16);

struct Shared {
  uint32_t bins[kDigits][kBins];
  int32_t candidates[kCandidatesMax];  // ids, in the first block of the cluster
  int num_candidates;
  Key lowest;       // the filter's result, in the first block
  Mass slice_mass;  // of the kept tokens
  Mass slice_kept;  // their number
  Mass slice_finite;
  int32_t slice_lowest;  // the lowest id of the largest logit
  int bin;               // where a filter ends, and what it wants of that bin
  Mass rest;
};

struct Row {
  const float* logits;  // in global memory
  int64_t vocab;
  const float* slice;  // logits [begin, begin + count), in shared memory if they fit
  int64_t begin, count;
  RowSoftmax softmax;

  static __device__ bool finite(float x) { return x > -INFINITY; }
  __device__ float mass(float x) const { return expf(softmax.exponent(x)); }
  __device__ Mass whole_mass(float x) const { return __float2ull_rn(mass(x) * kMassUnit); }
  __device__ int bin(float x) const {
    return static_cast<int>(
        fminf((softmax.max - x) * softmax.inv_temperature * kBinsPerUnit, static_cast<float>(kBins - 1)));
  }
};

__device__ __forceinline__ Mass warp_mass(Mass value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}
__device__ Mass block_mass(Mass value) {
  __shared__ Mass partial[kWarps];
  value = warp_mass(value);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  Mass sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += partial[w];
  return sum;
}
// The sum of this thread's value and those of the threads below.
__device__ __forceinline__ Mass warp_prefix(Mass value) {
  for (unsigned distance = 1; distance < kWarp; distance *= 2) {
    const Mass below = __shfl_up_sync(~0u, value, distance);
    if (threadIdx.x % kWarp >= distance) value += below;
  }
  return value;
}
__device__ Mass block_prefix(Mass value, Mass* total) {
  __shared__ Mass partial[kWarps];
  value = warp_prefix(value);
  __syncthreads();
  if (threadIdx.x % kWarp == kWarp - 1) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  *total = 0;
  for (unsigned w = 0; w < kWarps; ++w) {
    if (w < threadIdx.x / kWarp) value += partial[w];
    *total += partial[w];
  }
  return value;
}

// sums[own] += w for every lane. Few digits are common: the lanes of one add up before they meet the other warps.
__device__ __forceinline__ void add_by_digit(Mass* sums, int own, Mass w) {
  unsigned pending = __ballot_sync(~0u, w != 0);
  while (pending != 0) {
    const int leader = __ffs(static_cast<int>(pending)) - 1;
    const bool mine = own == __shfl_sync(~0u, own, leader);
    const Mass sum = warp_mass(mine ? w : 0);
    if (static_cast<int>(threadIdx.x % kWarp) == leader) atomicAdd(&sums[own], sum);
    pending &= ~__ballot_sync(~0u, mine);
  }
}

// Of the `count` tokens id_of(0), id_of(1), ...: the key of the one, going down the ranks, at which the sum of weights first
// reaches `wanted`, which is at least 1 and at most the sum of all. weight(logit, key) is 0 for tokens that do not count. A
// digit of eight bits a pass, until all of what is left is wanted.
template <class Ids, class F>
__device__ Key key_where(const Row& row, int64_t count, Mass wanted, Ids&& id_of, F&& weight) {
  __shared__ Mass sums[256];
  __shared__ Mass left;
  __shared__ Key least;
  __shared__ int digit;
  __shared__ bool whole;
  Key prefix = 0;
  if (threadIdx.x == 0) least = ~Key{0};
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int d = threadIdx.x; d < 256; d += kThreads) sums[d] = 0;
    __syncthreads();
    const Key mask = shift == 56 ? 0 : ~Key{0} << (shift + 8);
    for (int64_t base = 0; base < count; base += kThreads) {
      Mass w = 0;
      int own = 0;
      if (base + threadIdx.x < count) {
        const int64_t id = id_of(base + threadIdx.x);
        const float x = row.logits[id];
        const Key key = key_of(x, id);
        own = static_cast<int>(key >> shift & 255);
        if ((key & mask) == prefix) w = weight(x, key);
      }
      add_by_digit(sums, own, w);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Mass rest = wanted;
      int d = 255;
      for (; d > 0 && sums[d] < rest; --d) rest -= sums[d];
      digit = d;
      left = rest;
      whole = rest == sums[d];
    }
    __syncthreads();
    prefix |= Key(digit) << shift;
    wanted = left;
    if (whole) {
      for (int64_t i = threadIdx.x; i < count; i += kThreads) {
        const int64_t id = id_of(i);
        const float x = row.logits[id];
        const Key key = key_of(x, id);
        if ((key & ~Key{0} << shift) == prefix && weight(x, key) != 0) atomicMin(&least, key);
      }
      __syncthreads();
      return least;
    }
    __syncthreads();
  }
  return prefix;
}

// The lowest key a filter keeps of those from `lowest` on: weight(logit) in whole numbers, summed going down the ranks, first
// reaches wanted(total) there. All blocks of the cluster call and receive it.
template <class Weight, class Wanted>
__device__ Key filter(cg::cluster_group& cluster, Shared& shared, const Row& row, Key lowest, Weight&& weight,
                      Wanted&& wanted) {
  Shared& first = *cluster.map_shared_rank(&shared, 0);
  const auto counts = [&](float x, Key key) { return Row::finite(x) && key >= lowest; };
  for (int digit = 0; digit < kDigits; ++digit) shared.bins[digit][threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.num_candidates = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < row.count; i += kThreads) {
    const float x = row.slice[i];
    if (!counts(x, key_of(x, row.begin + i))) continue;
    const Mass w = weight(x);
    const int bin = row.bin(x);
#pragma unroll
    for (int digit = 0; digit < kDigits; ++digit) {
      const auto part = static_cast<uint32_t>(w >> digit * 16) & 0xffffu;
      if (part != 0) atomicAdd(&shared.bins[digit][bin], part);
    }
  }
  cluster.sync();
  Mass own = 0;
  for (int slice = 0; slice < kSlices; ++slice) {
    const Shared& other = *cluster.map_shared_rank(&shared, slice);
    for (int digit = 0; digit < kDigits; ++digit) own += Mass{other.bins[digit][threadIdx.x]} << digit * 16;
  }
  Mass total = 0;
  const Mass sum = block_prefix(own, &total), goal = wanted(total);
  if (sum >= goal && sum - own < goal) shared.bin = static_cast<int>(threadIdx.x), shared.rest = goal - (sum - own);
  __syncthreads();
  const int bin = shared.bin;
  const auto in_bin = [&](float x, Key key) { return counts(x, key) && row.bin(x) == bin; };
  for (int64_t i = threadIdx.x; i < row.count; i += kThreads) {
    const float x = row.slice[i];
    if (!in_bin(x, key_of(x, row.begin + i))) continue;
    const int place = atomicAdd(&first.num_candidates, 1);
    if (place < kCandidatesMax) first.candidates[place] = static_cast<int32_t>(row.begin + i);
  }
  cluster.sync();
  if (cluster.block_rank() == 0) {
    const auto of = [&](float x, Key key) { return in_bin(x, key) ? weight(x) : Mass{0}; };
    const int count = shared.num_candidates;
    const Key key = count <= kCandidatesMax
                        ? key_where(row, count, shared.rest, [&](int64_t i) { return shared.candidates[i]; }, of)
                        : key_where(row, row.vocab, shared.rest, [](int64_t i) { return i; }, of);
    if (threadIdx.x == 0) shared.lowest = key;
  }
  cluster.sync();
  return first.lowest;
}

// The token of this slice at which the sum of kept masses, which is `passed` before the slice, first exceeds `target`. It
// is there. Only one thread receives it; the others -1.
template <class F>
__device__ int32_t draw(const Row& row, Mass passed, Mass target, F&& kept_mass) {
  __shared__ Mass pieces[kWarps];
  // Pieces of consecutive tokens, one a warp.
  const int64_t length = (row.count + kWarps - 1) / kWarps;
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t end = min((warp + 1) * length, row.count);
  Mass sum = 0;
  for (int64_t i = warp * length + lane; i < end; i += kWarp) sum += kept_mass(row.slice[i], row.begin + i);
  sum = warp_mass(sum);
  if (lane == 0) pieces[warp] = sum;
  __syncthreads();
  for (unsigned w = 0; w < warp; ++w) passed += pieces[w];
  if (passed > target || passed + sum <= target) return -1;  // another warp's
  for (int64_t base = warp * length;; base += kWarp) {
    const int64_t i = base + lane;
    const Mass reached = passed + warp_prefix(i < end ? kept_mass(row.slice[i], row.begin + i) : 0);
    const unsigned beyond = __ballot_sync(~0u, reached > target);
    if (beyond != 0) return lane == __ffs(static_cast<int>(beyond)) - 1u ? static_cast<int32_t>(row.begin + i) : -1;
    passed = __shfl_sync(~0u, reached, kWarp - 1);
  }
}

struct DeviceRow {
  SamplingRow parameters;
  float uniform;
};

struct Outputs {
  int32_t* tokens;
  float* logprobs;
  int32_t* truncated;
  __device__ void put(int64_t t, const Row& row, int32_t token, bool drops) const {
    tokens[t] = token;
    logprobs[t] = token < 0 ? NAN : row.softmax.logprob(row.logits[token]);
    truncated[t] = drops ? 1 : 0;
  }
};

// Which shared memory: the fixed part, parts of the slice's blocks of columns, then the slice, unless it is too long.
inline __host__ __device__ int64_t slice_blocks(int64_t vocab) { return (column_blocks(vocab) + kSlices - 1) / kSlices; }
inline __host__ __device__ int64_t slice_offset(int64_t vocab) {
  const int64_t bytes = int64_t{sizeof(Shared)} + slice_blocks(vocab) * int64_t{sizeof(RowPart)};
  return (bytes + 15) / 16 * 16;
}

template <bool kKeepsSlice>
__global__ void __cluster_dims__(kSlices, 1, 1) __launch_bounds__(kThreads)
    sample(Rows<const float> logits, const DeviceRow* rows, int64_t vocab, bool pairs, Outputs out) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  RowPart* const parts = reinterpret_cast<RowPart*>(memory + sizeof(Shared));
  float* const kept_slice = reinterpret_cast<float*>(memory + slice_offset(vocab));
  cg::cluster_group cluster = cg::this_cluster();
  const int64_t t = blockIdx.x / kSlices, slice = cluster.block_rank(), blocks = slice_blocks(vocab);
  const SamplingRow parameters = rows[t].parameters;
  const float inv_temperature = parameters.temperature == 0.0f ? 1.0f : 1.0f / parameters.temperature;
  Row row = {logits[t], vocab, nullptr, min(slice * blocks * kSoftmaxColumns, vocab), 0, {}};
  row.count = min(row.begin + blocks * kSoftmaxColumns, vocab) - row.begin;
  row.slice = kKeepsSlice ? kept_slice : row.logits + row.begin;

  // The slice's logits and the parts of its blocks of columns; then the softmax, in every block of the cluster.
  Mass finite = 0;
  for (int64_t base = 0; base < blocks; base += kThreads / 4) {
    const int64_t block = base + threadIdx.x / 4;
    if (__all_sync(~0u, block >= blocks)) break;
    float v[kSoftmaxColumns / 4];
    load_block(row.logits, vocab, slice * blocks + block, pairs, v);
    const RowPart part = part_of_block(v, inv_temperature * kLog2E);
    if (block >= blocks) continue;
    if (threadIdx.x % 4 == 0) parts[block] = part;
#pragma unroll
    for (int i = 0; i < kSoftmaxColumns / 4; ++i) {
      finite += Row::finite(v[i]);
      if (kKeepsSlice) {
        kept_slice[block * kSoftmaxColumns + threadIdx.x % 4 * 2 + i / 2 * 8 + i % 2] = v[i];
      }
    }
  }
  finite = block_mass(finite);
  if (threadIdx.x == 0) shared.slice_finite = finite, shared.slice_lowest = 0x7fffffff;
  cluster.sync();
  const auto of_all = [&](auto member) {  // the sum over the cluster
    Mass sum = 0;
    for (int s = 0; s < kSlices; ++s) sum += cluster.map_shared_rank(&shared, s)->*member;
    return sum;
  };
  row.softmax = softmax_of_blocks(column_blocks(vocab), inv_temperature, [&](int64_t block) {
    return cluster.map_shared_rank(parts, static_cast<unsigned>(block / blocks))[block % blocks];
  });
  finite = of_all(&Shared::slice_finite);

  if (row.softmax.log_sum != row.softmax.log_sum) {
    if (slice == 0 && threadIdx.x == 0) out.put(t, row, -1, false);
  } else if (parameters.temperature == 0.0f) {
    for (int64_t i = threadIdx.x; i < row.count; i += kThreads) {
      if (row.slice[i] != row.softmax.max) continue;
      atomicMin(&shared.slice_lowest, static_cast<int32_t>(row.begin + i));
      break;
    }
    cluster.sync();
    if (slice == 0 && threadIdx.x == 0) {
      int32_t token = 0x7fffffff;
      for (int s = 0; s < kSlices; ++s) token = min(token, cluster.map_shared_rank(&shared, s)->slice_lowest);
      out.put(t, row, token, true);
    }
  } else {
    Key lowest = 0;  // rank of the last token that top-k and top-p keep
    const Mass top_k = static_cast<Mass>(parameters.top_k);
    if (top_k > 0 && top_k < finite) {
      lowest = filter(cluster, shared, row, 0, [](float) { return Mass{1}; }, [&](Mass) { return top_k; });
    }
    if (parameters.top_p < 1.0f) {
      lowest = filter(
          cluster, shared, row, lowest, [&](float x) { return row.whole_mass(x); },
          [&](Mass total) {
            const Mass wanted = __double2ull_ru(static_cast<double>(parameters.top_p) * static_cast<double>(total));
            return max(Mass{1}, min(wanted, total));
          });
    }
    const auto kept_mass = [&](float x, int64_t id) {
      const bool keeps = Row::finite(x) && key_of(x, id) >= lowest && row.mass(x) >= parameters.min_p;
      return keeps ? row.whole_mass(x) : Mass{0};
    };
    Mass mass = 0, kept = 0;
    for (int64_t i = threadIdx.x; i < row.count; i += kThreads) {
      const float x = row.slice[i];
      if (!Row::finite(x) || key_of(x, row.begin + i) < lowest || row.mass(x) < parameters.min_p) continue;
      mass += row.whole_mass(x);
      ++kept;
    }
    mass = block_mass(mass);
    kept = block_mass(kept);
    if (threadIdx.x == 0) shared.slice_mass = mass, shared.slice_kept = kept;
    cluster.sync();
    const Mass total = of_all(&Shared::slice_mass);
    const bool drops = of_all(&Shared::slice_kept) < finite;
    // floor(uniform * total), exactly: passed > target then says passed > uniform * total.
    const Mass numerator = static_cast<Mass>(rows[t].uniform * 16777216.0f);
    const Mass target = __umul64hi(numerator, total) << 40 | (numerator * total) >> 24;
    Mass passed = 0;
    for (int s = 0; s < slice; ++s) passed += cluster.map_shared_rank(&shared, s)->slice_mass;
    if (passed <= target && passed + mass > target) {
      const int32_t token = draw(row, passed, target, kept_mass);
      if (token >= 0) out.put(t, row, token, drops);
    }
  }
  cluster.sync();  // no block leaves while others may read its shared memory
}

}  // namespace

template <>
void launch_cuda<Sampling>(const Sampling& args, Stream& stream) {
  const int64_t rows = args.logits.size(0), vocab = args.logits.size(1);
  if (rows == 0) return;
  CHECK_LE(vocab, kVocabMax);
  const ArenaScope scope(stream.workspace());
  std::vector<DeviceRow> host;
  for (int64_t t = 0; t < rows; ++t) {
    host.push_back({args.rows[t], uniform_at(args.rows[t].seed, args.rows[t].counter)});
  }
  const Tensor device = stream.workspace().alloc(DType::kF8E4M3, {rows * int64_t{sizeof(DeviceRow)}});
  stream.upload(host.data(), device);
  const int64_t fixed = slice_offset(vocab), with_slice = fixed + slice_blocks(vocab) * kSoftmaxColumns * 4;
  const bool keeps = with_slice <= kSharedMax - kStaticShared;
  const auto kernel = keeps ? sample<true> : sample<false>;
  const int bytes = static_cast<int>(keeps ? with_slice : fixed);
  allow_shared(kernel, bytes);
  kernel<<<static_cast<unsigned>(rows * kSlices), kThreads, static_cast<size_t>(bytes), cuda_stream(stream)>>>(
      rows_of<const float>(args.logits), static_cast<const DeviceRow*>(device.raw()), vocab, reads_pairs(args.logits),
      {args.tokens.i32(), args.logprob.f32(), args.truncated.i32()});
  check_launch("sampling");
}

}  // namespace slipstream::kernels
