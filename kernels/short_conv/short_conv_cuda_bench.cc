// The convolution in front of KDA at the width of GLM-5.3-Flash, 3 x 64 x 128 channels and 4 taps, in
// bf16. The floor is each input read and each output written once, at 4.3 TB/s.
#include <cstdio>
#include <vector>

#include "kernels/short_conv/short_conv.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kChannels = 24576, kTaps = 4;

void print(const char* name, int64_t rows, double ms, double bytes) {
  std::printf("%-10s %6lld x %lld  %8.4f ms %6.0f GB/s  %5.1f %%\n", name, static_cast<long long>(rows),
              static_cast<long long>(kChannels), ms, bytes / ms * 1e-6, bytes / ms * 1e-6 / 43.0);
}

// One sequence of `rows` rows, or as many sequences with one each.
void forward(testing::CudaBench& bench, int64_t rows, bool decode) {
  const ArenaScope scope(bench.arena());
  const int64_t count = decode ? rows : 1;
  std::vector<int32_t> begin, cached(static_cast<size_t>(count), decode ? 100 : 0), slots;
  for (int64_t b = 0; b <= count; ++b) begin.push_back(static_cast<int32_t>(decode ? b : b * rows));
  for (int64_t b = 0; b < count; ++b) slots.push_back(static_cast<int32_t>(b));
  const ShortConv args{
      .x = bench.random(DType::kBf16, {rows, kChannels}),
      .w = bench.random(DType::kF32, {kChannels, kTaps}),
      .sequences = {.row_begin = bench.upload(begin.data(), DType::kI32, {count + 1}),
                    .cached = bench.upload(cached.data(), DType::kI32, {count}),
                    .host_row_begin = Tensor(begin.data(), DType::kI32, {count + 1}),
                    .host_cached = Tensor(cached.data(), DType::kI32, {count})},
      .tail = decode ? bench.random(DType::kF32, {count, kTaps - 1, kChannels}) : Tensor(),
      .slots = decode ? bench.upload(slots.data(), DType::kI32, {count}) : Tensor(),
      .y = bench.arena().alloc(DType::kBf16, {rows, kChannels})};
  const double ms = bench.milliseconds([&](int) { launch(args, bench.stream()); }, decode ? 100 : 20);
  print(decode ? "decode" : "forward", rows, ms, static_cast<double>(rows * kChannels * (decode ? 4 + 24 : 4)));
}

void backward(testing::CudaBench& bench, int64_t rows) {
  const ArenaScope scope(bench.arena());
  std::vector<int32_t> begin = {0, static_cast<int32_t>(rows)}, cached = {0};
  const ShortConvBackward args{
      .x = bench.random(DType::kBf16, {rows, kChannels}),
      .w = bench.random(DType::kF32, {kChannels, kTaps}),
      .sequences = {.row_begin = bench.upload(begin.data(), DType::kI32, {2}),
                    .cached = bench.upload(cached.data(), DType::kI32, {1}),
                    .host_row_begin = Tensor(begin.data(), DType::kI32, {2}),
                    .host_cached = Tensor(cached.data(), DType::kI32, {1})},
      .dy = bench.random(DType::kBf16, {rows, kChannels}),
      .dx = bench.arena().alloc(DType::kBf16, {rows, kChannels}),
      .dw = bench.arena().zeros(DType::kF32, {kChannels, kTaps}, bench.stream())};
  const double ms = bench.milliseconds([&](int) { launch(args, bench.stream()); }, 3);
  print("backward", rows, ms, static_cast<double>(rows * kChannels * 6));
}

CUDA_BENCH(short_conv) {
  for (const int64_t rows : {1, 64, 256}) forward(bench, rows, /*decode=*/true);
  for (const int64_t rows : {4096, 16384}) forward(bench, rows, /*decode=*/false);
  backward(bench, 16384);
}

}  // namespace
}  // namespace slipstream::kernels
