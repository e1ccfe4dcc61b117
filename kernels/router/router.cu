#include "kernels/router/router.h"

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr float kLowestChoice = -1e30f;  // below it, and NaN: see the header
constexpr int kTokens = 4;               // of a block, a warp each

// The lowest index of the largest of n values; all lanes receive it.
__device__ int warp_argmax(const float* values, int64_t n) {
  float best = -INFINITY;
  int at = 0x7fffffff;
  for (int i = threadIdx.x % kWarp; i < n; i += kWarp) {
    if (values[i] > best || at == 0x7fffffff) {
      best = values[i];
      at = i;
    }
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, best, distance);
    const int other_at = __shfl_xor_sync(0xffffffffu, at, distance);
    if (other > best || (other == best && other_at < at)) {
      best = other;
      at = other_at;
    }
  }
  return at;
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
    const int best = warp_argmax(scores, groups);
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

__global__ void route(Rows<const float> logits, const float* bias, Rows<int32_t> experts, Rows<float> weights,
                      int64_t tokens, int64_t num_experts, int64_t slots, int64_t groups, int64_t groups_kept,
                      bool normalize, float scale, bool replayed) {
  extern __shared__ float memory[];
  const int64_t t = int64_t{blockIdx.x} * kTokens + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (t >= tokens) return;  // whole warps: nothing below joins warps
  float* const choice = memory + threadIdx.x / kWarp * (num_experts + 2 * groups);
  float* const scores = choice + num_experts;
  if (!replayed) {
    for (int64_t e = lane; e < num_experts; e += kWarp) {
      const float value = sigmoid(logits[t][e]) + bias[e];
      choice[e] = value > kLowestChoice ? value : kLowestChoice;
    }
    for (int64_t g = lane; g < 2 * groups; g += kWarp) scores[g] = 0.0f;
    __syncwarp();
    if (groups > 1) limit_groups(choice, scores, num_experts, groups, groups_kept);
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int best = warp_argmax(choice, num_experts);
      __syncwarp();
      if (lane == 0) {
        experts[t][slot] = best;
        choice[best] = -INFINITY;
      }
      __syncwarp();
    }
  }
  if (lane != 0) return;
  float sum = 0.0f;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int32_t e = experts[t][slot];
    if (e < 0 || e >= num_experts) __trap();  // a replayed choice out of range
    sum += sigmoid(logits[t][e]);
  }
  const float divisor = normalize ? sum + 1e-20f : 1.0f;
  for (int64_t slot = 0; slot < slots; ++slot) {
    weights[t][slot] = sigmoid(logits[t][experts[t][slot]]) / divisor * scale;
  }
}

// One warp a token.
__global__ void route_backward(Rows<const float> logits, Rows<const int32_t> experts, Rows<const float> dweights,
                               Rows<float> dlogits, int64_t tokens, int64_t num_experts, int64_t slots, bool normalize,
                               float scale) {
  const int64_t t = int64_t{blockIdx.x} * kTokens + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (t >= tokens) return;
  for (int64_t e = lane; e < num_experts; e += kWarp) dlogits[t][e] = 0.0f;
  __syncwarp();
  if (lane != 0) return;
  const auto score = [&](int64_t slot) { return sigmoid(logits[t][experts[t][slot]]); };
  float divisor = 1.0f, mean = 0.0f;
  if (normalize) {
    divisor = 1e-20f;
    for (int64_t slot = 0; slot < slots; ++slot) divisor += score(slot);
    for (int64_t slot = 0; slot < slots; ++slot) mean += dweights[t][slot] * score(slot) / divisor;
  }
  for (int64_t slot = 0; slot < slots; ++slot) {
    const float s = score(slot);
    dlogits[t][experts[t][slot]] += scale * (dweights[t][slot] - mean) / divisor * (s * (1.0f - s));
  }
}

}  // namespace

template <>
void launch_cuda<Router>(const Router& args, Stream& stream) {
  const int64_t tokens = args.logits.size(0), num_experts = args.logits.size(1);
  if (tokens == 0) return;
  const int64_t shared = kTokens * (num_experts + 2 * args.groups) * int64_t{sizeof(float)};
  CHECK_LE(shared, 48 * 1024);  // 1,000 experts in as many groups
  route<<<static_cast<unsigned>(divide_up(tokens, kTokens)), kTokens * kWarp, static_cast<size_t>(shared),
          cuda_stream(stream)>>>(rows_of<const float>(args.logits), args.bias.f32(), rows_of<int32_t>(args.experts),
                                 rows_of<float>(args.weights), tokens, num_experts, args.experts.size(1), args.groups,
                                 args.groups_kept, args.normalize, args.scale, args.replayed);
  check_launch("router");
}

template <>
void launch_cuda<RouterBackward>(const RouterBackward& args, Stream& stream) {
  const int64_t tokens = args.logits.size(0);
  if (tokens == 0) return;
  route_backward<<<static_cast<unsigned>(divide_up(tokens, kTokens)), kTokens * kWarp, 0, cuda_stream(stream)>>>(
      rows_of<const float>(args.logits), rows_of<const int32_t>(args.experts), rows_of<const float>(args.dweights),
      rows_of<float>(args.dlogits), tokens, args.logits.size(1), args.experts.size(1), args.normalize, args.scale);
  check_launch("router_backward");
}

}  // namespace slipstream::kernels
