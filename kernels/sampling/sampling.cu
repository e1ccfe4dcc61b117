#include "kernels/sampling/sampling.h"

#include "kernels/cuda/softmax_row.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

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

struct Row {
  const float* logits;
  int64_t vocab;
  RowSoftmax softmax;
  __device__ bool finite(int64_t i) const { return logits[i] > -INFINITY; }
  __device__ float mass(int64_t i) const { return expf(softmax.exponent(logits[i])); }
  __device__ Mass whole_mass(int64_t i) const { return __float2ull_rn(mass(i) * kMassUnit); }
};

__device__ Mass block_mass(Mass value) {
  __shared__ Mass partial[kSoftmaxThreads / kWarp];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  Mass sum = 0;
  for (int w = 0; w < kSoftmaxThreads / kWarp; ++w) sum += partial[w];
  return sum;
}

// sums[own] += w for every lane. Few digits are common: the lanes of one add up before they meet the other warps.
__device__ __forceinline__ void add_by_digit(Mass* sums, int own, Mass w) {
  unsigned pending = __ballot_sync(0xffffffffu, w != 0);
  while (pending != 0) {
    const int leader = __ffs(static_cast<int>(pending)) - 1;
    const bool mine = own == __shfl_sync(0xffffffffu, own, leader);
    Mass sum = mine ? w : 0;
    for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (static_cast<int>(threadIdx.x % kWarp) == leader) atomicAdd(&sums[own], sum);
    pending &= ~__ballot_sync(0xffffffffu, mine);
  }
}

// The key of the token, going down the ranks, at which the sum of weight(i) over keys >= lowest first reaches `wanted`, which
// is at least 1 and at most the sum of all: a digit of eight bits a pass.
template <class F>
__device__ Key key_where(const Row& row, Key lowest, Mass wanted, F&& weight) {
  __shared__ Mass sums[256];
  __shared__ Mass left;
  __shared__ int digit;
  Key prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int d = threadIdx.x; d < 256; d += kSoftmaxThreads) sums[d] = 0;
    __syncthreads();
    const Key mask = shift == 56 ? 0 : ~Key{0} << (shift + 8);
    for (int64_t base = 0; base < row.vocab; base += kSoftmaxThreads) {
      const int64_t i = base + threadIdx.x;
      Mass w = 0;
      int own = 0;
      if (i < row.vocab && row.finite(i)) {
        const Key key = key_of(row.logits[i], i);
        own = static_cast<int>(key >> shift & 255);
        if (key >= lowest && (key & mask) == prefix) w = weight(i);
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
    }
    __syncthreads();
    prefix |= Key(digit) << shift;
    wanted = left;
    __syncthreads();
  }
  return prefix;
}

constexpr int kPieces = kSoftmaxThreads;

// The first token, by id, at which the sum of kept masses exceeds uniform (of 24 bits) times their total.
template <class F>
__device__ int32_t draw(const Row& row, float uniform, F&& kept_mass) {
  __shared__ Mass pieces[kPieces];
  __shared__ int32_t token;
  // Pieces of consecutive tokens, a warp each in turn.
  const int64_t length = (row.vocab + kPieces - 1) / kPieces;
  const int lane = threadIdx.x % kWarp;
  for (int piece = threadIdx.x / kWarp; piece < kPieces; piece += kSoftmaxThreads / kWarp) {
    const int64_t end = min((piece + 1) * length, row.vocab);
    Mass sum = 0;
    for (int64_t i = piece * length + lane; i < end; i += kWarp) sum += kept_mass(i);
    for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0) pieces[piece] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    Mass total = 0;
    for (int piece = 0; piece < kPieces; ++piece) total += pieces[piece];
    // floor(uniform * total), exactly: passed > target then says passed > uniform * total.
    const Mass numerator = static_cast<Mass>(uniform * 16777216.0f);
    const Mass target = __umul64hi(numerator, total) << 40 | (numerator * total) >> 24;
    Mass passed = 0;
    int piece = 0;
    while (piece < kPieces - 1 && passed + pieces[piece] <= target) passed += pieces[piece++];
    int64_t i = piece * length;
    while (i < row.vocab - 1 && passed + kept_mass(i) <= target) passed += kept_mass(i++);
    token = static_cast<int32_t>(i);
  }
  __syncthreads();
  return token;
}

__device__ int32_t lowest_id_of(const Row& row) {
  __shared__ int32_t lowest;
  if (threadIdx.x == 0) lowest = 0x7fffffff;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < row.vocab; i += kSoftmaxThreads) {
    if (row.logits[i] == row.softmax.max) {
      atomicMin(&lowest, static_cast<int32_t>(i));
      break;
    }
  }
  __syncthreads();
  return lowest;
}

struct DeviceRow {
  SamplingRow parameters;
  float uniform;
};

__global__ void __launch_bounds__(kSoftmaxThreads) sample(Rows<const float> logits, const DeviceRow* rows,
                                                          int32_t* tokens, float* logprobs, int32_t* truncated,
                                                          int64_t vocab) {
  const int64_t t = blockIdx.x;
  const SamplingRow parameters = rows[t].parameters;
  const float inv_temperature = parameters.temperature == 0.0f ? 1.0f : 1.0f / parameters.temperature;
  const Row row = {logits[t], vocab, softmax_of(logits[t], vocab, inv_temperature, /*entropy=*/false)};
  int32_t token = -1;
  bool drops = false;
  if (row.softmax.log_sum == row.softmax.log_sum) {
    if (parameters.temperature == 0.0f) {
      token = lowest_id_of(row);
      drops = true;
    } else {
      Key lowest = 0;  // rank of the last token that top-k and top-p keep
      Mass finite = 0;
      for (int64_t i = threadIdx.x; i < vocab; i += kSoftmaxThreads) finite += row.finite(i);
      finite = block_mass(finite);
      if (parameters.top_k > 0 && static_cast<Mass>(parameters.top_k) < finite) {
        lowest = key_where(row, 0, static_cast<Mass>(parameters.top_k), [](int64_t) { return Mass{1}; });
      }
      if (parameters.top_p < 1.0f) {
        Mass total = 0;
        for (int64_t i = threadIdx.x; i < vocab; i += kSoftmaxThreads) {
          if (row.finite(i) && key_of(row.logits[i], i) >= lowest) total += row.whole_mass(i);
        }
        total = block_mass(total);
        const Mass wanted = __double2ull_ru(static_cast<double>(parameters.top_p) * static_cast<double>(total));
        lowest = key_where(row, lowest, max(Mass{1}, min(wanted, total)), [&](int64_t i) { return row.whole_mass(i); });
      }
      const auto kept = [&](int64_t i) {
        return row.finite(i) && key_of(row.logits[i], i) >= lowest && row.mass(i) >= parameters.min_p;
      };
      for (int64_t i = threadIdx.x; i < vocab; i += kSoftmaxThreads) drops = drops || (row.finite(i) && !kept(i));
      drops = __syncthreads_or(drops);
      token = draw(row, rows[t].uniform, [&](int64_t i) { return kept(i) ? row.whole_mass(i) : Mass{0}; });
    }
  }
  if (threadIdx.x != 0) return;
  tokens[t] = token;
  logprobs[t] = token < 0 ? NAN : row.softmax.logprob(row.logits[token]);
  truncated[t] = drops ? 1 : 0;
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
  sample<<<static_cast<unsigned>(rows), kSoftmaxThreads, 0, cuda_stream(stream)>>>(
      rows_of<const float>(args.logits), static_cast<const DeviceRow*>(device.raw()), args.tokens.i32(),
      args.logprob.f32(), args.truncated.i32(), vocab);
  check_launch("sampling");
}

}  // namespace slipstream::kernels
