#include "kernels/testing/cuda_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/hash.h"
#include "kernels/bf16.h"
#include "kernels/graph.h"

namespace slipstream::kernels::testing {
namespace {

std::unique_ptr<Stream> create_stream() {
  absl::StatusOr<std::unique_ptr<Stream>> stream = Stream::create(Device{DeviceKind::kCuda, 0}, 0);
  if (!stream.ok()) {
    std::fprintf(stderr, "%s\n", std::string(stream.status().message()).c_str());
    std::exit(1);
  }
  return *std::move(stream);
}

using Benches = std::map<std::string, void (*)(CudaBench&)>;
Benches& benches() {
  static Benches all;
  return all;
}

}  // namespace

int add_cuda_bench(const char* name, void (*run)(CudaBench&)) {
  benches()[name] = run;
  return 0;
}

CudaBench::CudaBench() : stream_(create_stream()), arena_(*Arena::create_cuda(0, int64_t{1} << 37)) {}

Tensor CudaBench::random(DType dtype, std::initializer_list<int64_t> shape, float low, float high) {
  CHECK(dtype == DType::kF32 || dtype == DType::kBf16);
  const Tensor tensor = arena_.alloc(dtype, shape);
  const int64_t count = std::min<int64_t>(tensor.numel(), 1 << 22);
  std::vector<float> values(static_cast<size_t>(count));
  std::vector<bf16> rounded(dtype == DType::kBf16 ? values.size() : 0);
  for (size_t i = 0; i < values.size(); ++i) {
    const double unit = static_cast<double>(splitmix64(i + static_cast<size_t>(tensor.numel())) >> 11) * 0x1p-53;
    values[i] = low + (high - low) * static_cast<float>(unit);
    if (!rounded.empty()) rounded[i] = to_bf16(values[i]);
  }
  const void* from = rounded.empty() ? static_cast<const void*>(values.data()) : rounded.data();
  for (int64_t begin = 0; begin < tensor.numel(); begin += count) {
    char* const at = static_cast<char*>(tensor.raw()) + begin * size_of(dtype);
    stream_->upload(from, Tensor(at, dtype, {std::min(count, tensor.numel() - begin)}, tensor.device()));
  }
  return tensor;
}

Tensor CudaBench::upload(const void* values, DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor tensor = arena_.alloc(dtype, shape);
  stream_->upload(values, tensor);
  return tensor;
}

double CudaBench::milliseconds(absl::FunctionRef<void(int)> run, int launches) {
  constexpr int kFirst = 3;
  for (int i = 0; i < kFirst; ++i) run(i);
  stream_->synchronize();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < launches; ++i) run(kFirst + i);
  stream_->synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / launches;
}

double CudaBench::recorded_milliseconds(absl::FunctionRef<void(int)> run) {
  constexpr int kRecorded = 50;
  run(0);  // before recording: see Graph
  const Graph graph = Graph::record(*stream_, [&] {
    for (int i = 0; i < kRecorded; ++i) run(i);
  });
  return milliseconds([&](int) { graph.replay(*stream_); }) / kRecorded;
}

void CudaBench::memory_row(const std::string& name, int64_t tokens, int64_t bytes, absl::FunctionRef<void(int)> run) {
  constexpr int64_t kFewTokens = 256;
  const double ms = tokens <= kFewTokens ? recorded_milliseconds(run) : milliseconds(run);
  const double floor = static_cast<double>(bytes) / 4.3e9;
  std::printf("%-34s %6lld  %8.4f ms  floor %8.4f ms  %3.0f %%\n", name.c_str(), static_cast<long long>(tokens), ms, floor,
              100.0 * floor / ms);
}

}  // namespace slipstream::kernels::testing

// kernels_cuda_bench [OPERATOR...]: all of them, or these.
int main(int argc, char** argv) {
  using namespace slipstream::kernels::testing;  // NOLINT(google-build-using-namespace): the file's own
  for (int i = 1; i < argc; ++i) {
    if (benches().contains(argv[i])) continue;
    std::fprintf(stderr, "kernels_cuda_bench: \"%s\", expected of:", argv[i]);
    for (const auto& [name, run] : benches()) std::fprintf(stderr, " %s", name.c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  CudaBench bench;
  for (const auto& [name, run] : benches()) {
    const bool wanted = std::any_of(argv + 1, argv + argc, [&name = name](const char* word) { return name == word; });
    if (argc > 1 && !wanted) continue;
    const slipstream::kernels::ArenaScope scope(bench.arena());
    std::printf("%s\n", name.c_str());
    run(bench);
    std::fflush(stdout);
  }
  return 0;
}
