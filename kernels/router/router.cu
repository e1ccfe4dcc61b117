#include "kernels/router/router.h"

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr float kLowestChoice = -1e30f;  // below it, and NaN: see the header
constexpr int kTokens = 4;               // of a block, a warp each

// A value's place in the order of floats, above 0. No choice is NaN or -0.
__device__ __forceinline__ unsigned ordered(float value) {
  const unsigned bits = __float_as_uint(value);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// The largest of a lane's values, every 32nd of n, and the lowest index that has it.
struct Best {
  unsigned key = 0;
  int at = 0x7fffffff;
  __device__ __forceinline__ Best(const float* values, int n) {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x) % kWarp; i < n; i += kWarp) {
      const unsigned other = ordered(values[i]);
      if (other > key) key = other, at = i;
    }
  }
};
// The lowest index of the largest of all lanes' values; all lanes receive it.
__device__ __forceinline__ int warp_best(const Best& mine) {
  const unsigned key = __reduce_max_sync(0xffffffffu, mine.key);
  return __reduce_min_sync(0xffffffffu, mine.key == key ? mine.at : 0x7fffffff);
}

// Makes the experts of all but the `kept` best groups ineligible. scores: two values a group, its score and, from 0 to 1,
// whether it is kept.
__device__ void limit_groups(float* choice, float* scores, int64_t experts, int64_t groups, int64_t kept) {
  const int lane = threadIdx.x % kWarp;
  const int64_t size = experts / groups;
  for (int64_t g = lane; g < groups; g += kWarp) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      const float value = choice[e];
      second = fmaxf(second, fminf(first, value));
      first = fmaxf(first, value);
    }
    scores[g] = first + second;
  }
  __syncwarp();
  for (int64_t i = 0; i < kept; ++i) {
    const int best = warp_best(Best(scores, static_cast<int>(groups)));
    __syncwarp();
    if (lane == 0) {
      scores[best] = -INFINITY;
      scores[groups + best] = 1.0f;
    }
    __syncwarp();
  }
  for (int64_t e = lane; e < experts; e += kWarp) {
    if (scores[groups + e / size] == 0.0f) choice[e] = -INFINITY;
  }
  __syncwarp();
}

// Slots are a warp's lanes, 32 at a time: f(slot, expert), where expert is -1 and slot none where slots have ended.
template <class F>
__device__ __forceinline__ void for_slots(const int32_t* chosen, int slots, F&& f) {
  for (int base = 0; base < slots; base += kWarp) {
    const int slot = base + static_cast<int>(threadIdx.x) % kWarp;
    f(slot, slot < slots ? chosen[slot] : -1);
  }
}
// sum plus every slot's value, ascending.
__device__ __forceinline__ float add_slots(float value, int slot, int slots, float sum) {
  const int base = slot - static_cast<int>(threadIdx.x) % kWarp, many = min(kWarp, slots - base);
  for (int lane = 0; lane < many; ++lane) sum += __shfl_sync(0xffffffffu, value, lane);
  return sum;
}

// One warp a token. Its shared memory: choices of all experts, scores and marks of groups, the experts chosen.
__global__ void route(Rows<const float> logits, const float* bias, Rows<int32_t> experts, Rows<float> weights,
                      int64_t tokens, int num_experts, int slots, int64_t groups, int64_t groups_kept, bool normalize,
                      float scale, bool replayed) {
  extern __shared__ float memory[];
  const int64_t t = int64_t{blockIdx.x} * kTokens + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (t >= tokens) return;  // whole warps: nothing below joins warps
  float* const choice = memory + threadIdx.x / kWarp * (num_experts + 2 * groups + slots);
  float* const scores = choice + num_experts;
  int32_t* const chosen = reinterpret_cast<int32_t*>(scores + 2 * groups);
  if (replayed) {
    for (int slot = lane; slot < slots; slot += kWarp) chosen[slot] = experts[t][slot];
  } else {
#pragma unroll 4
    for (int e = lane; e < num_experts; e += kWarp) {
      const float value = sigmoid(logits[t][e]) + bias[e];
      choice[e] = value > kLowestChoice ? value : kLowestChoice;
    }
    if (groups > 1) {
      for (int64_t g = lane; g < 2 * groups; g += kWarp) scores[g] = 0.0f;
      __syncwarp();
      limit_groups(choice, scores, num_experts, groups, groups_kept);
    }
    Best mine(choice, num_experts);  // of what this lane wrote
    for (int slot = 0; slot < slots; ++slot) {
      const int best = warp_best(mine);
      if (lane == best % kWarp) {
        chosen[slot] = best;
        choice[best] = -INFINITY;
        mine = Best(choice, num_experts);
      }
    }
    __syncwarp();
    for (int slot = lane; slot < slots; slot += kWarp) experts[t][slot] = chosen[slot];
  }
  float sum = 0.0f;
  for_slots(chosen, slots, [&](int slot, int e) {
    if (slot < slots && (e < 0 || e >= num_experts)) __trap();  // a replayed choice out of range
    sum = add_slots(e < 0 ? 0.0f : sigmoid(logits[t][e]), slot, slots, sum);
  });
  const float divisor = normalize ? sum + 1e-20f : 1.0f;
  for_slots(chosen, slots, [&](int slot, int e) {
    if (e >= 0) weights[t][slot] = sigmoid(logits[t][e]) / divisor * scale;
  });
}

// One warp a token, whose row of dlogits is made in shared memory.
__global__ void route_backward(Rows<const float> logits, Rows<const int32_t> experts, Rows<const float> dweights,
                               Rows<float> dlogits, int64_t tokens, int num_experts, int slots, bool normalize, float scale) {
  extern __shared__ float memory[];
  const int64_t t = int64_t{blockIdx.x} * kTokens + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (t >= tokens) return;
  float* const row = memory + threadIdx.x / kWarp * num_experts;
  for (int e = lane; e < num_experts; e += kWarp) row[e] = 0.0f;
  const int32_t* const chosen = experts[t];
  const auto score = [&](int e) { return e < 0 ? 0.0f : sigmoid(logits[t][e]); };
  float divisor = 1.0f, mean = 0.0f;
  if (normalize) {
    divisor = 1e-20f;
    for_slots(chosen, slots, [&](int slot, int e) { divisor = add_slots(score(e), slot, slots, divisor); });
    for_slots(chosen, slots, [&](int slot, int e) {
      mean = add_slots(e < 0 ? 0.0f : dweights[t][slot] * score(e) / divisor, slot, slots, mean);
    });
  }
  for_slots(chosen, slots, [&](int slot, int e) {
    const float s = score(e);
    const float share = e < 0 ? 0.0f : scale * (dweights[t][slot] - mean) / divisor * (s * (1.0f - s));
    for (int turn = 0; turn < kWarp; ++turn) {  // replayed experts may repeat
      __syncwarp();
      if (turn == lane && e >= 0) row[e] += share;
    }
  });
  __syncwarp();
  for (int e = lane; e < num_experts; e += kWarp) dlogits[t][e] = row[e];
}

}  // namespace

template <>
void launch_cuda<Router>(const Router& args, Stream& stream) {
  const int64_t tokens = args.logits.size(0), num_experts = args.logits.size(1);
  if (tokens == 0) return;
  const int64_t slots = args.experts.size(1);
  const int64_t shared = kTokens * (num_experts + 2 * args.groups + slots) * int64_t{sizeof(float)};
  CHECK_LE(shared, 48 * 1024);  // 1,000 experts in as many groups
  route<<<static_cast<unsigned>(divide_up(tokens, kTokens)), kTokens * kWarp, static_cast<size_t>(shared),
          cuda_stream(stream)>>>(rows_of<const float>(args.logits), args.bias.f32(), rows_of<int32_t>(args.experts),
                                 rows_of<float>(args.weights), tokens, static_cast<int>(num_experts),
                                 static_cast<int>(slots), args.groups, args.groups_kept, args.normalize, args.scale,
                                 args.replayed);
  check_launch("router");
}

template <>
void launch_cuda<RouterBackward>(const RouterBackward& args, Stream& stream) {
  const int64_t tokens = args.logits.size(0), num_experts = args.logits.size(1);
  if (tokens == 0) return;
  const int64_t shared = kTokens * num_experts * int64_t{sizeof(float)};
  CHECK_LE(shared, 48 * 1024);
  route_backward<<<static_cast<unsigned>(divide_up(tokens, kTokens)), kTokens * kWarp, static_cast<size_t>(shared),
                   cuda_stream(stream)>>>(rows_of<const float>(args.logits), rows_of<const int32_t>(args.experts),
                                          rows_of<const float>(args.dweights), rows_of<float>(args.dlogits), tokens,
                                          static_cast<int>(num_experts), static_cast<int>(args.experts.size(1)),
                                          args.normalize, args.scale);
  check_launch("router_backward");
}

}  // namespace slipstream::kernels
