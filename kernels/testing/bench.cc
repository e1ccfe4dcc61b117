#include "kernels/testing/bench.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/testing/bench.cc"
#include "hwy/foreach_target.h"

#include "kernels/simd/lanes-inl.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// 12 chains hide the latency of two FMA units; returns a value so that nothing is optimised away.
float fma_chains(int64_t steps) {
  Lanes acc[12];
  for (Lanes& a : acc) a = broadcast(1.0f);
  const Lanes x = broadcast(0.999f), y = broadcast(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
    for (Lanes& a : acc) a = fma(a, x, y);
  }
  Lanes sum = zero_lanes();
  for (const Lanes& a : acc) sum = add(sum, a);
  return sum_lanes(sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {
HWY_EXPORT(fma_chains);
namespace testing {
namespace {

template <class F>
double best_seconds(int repeats, F&& f) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    f();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

Stream& bench_stream() {
  static const std::unique_ptr<Stream> stream = [] {
    const char* threads = std::getenv("SLIPSTREAM_BENCH_THREADS");
    return *Stream::create_cpu(threads == nullptr ? 1 : std::atoi(threads));
  }();
  return *stream;
}

double copy_bytes_per_second() {
  static const double rate = [] {
    constexpr int64_t kBytes = int64_t{256} << 20, kPiece = 1 << 20;
    std::vector<char> from(kBytes, 1), to(kBytes, 2);
    const double seconds = best_seconds(5, [&] {
      bench_stream().parallel_for(kBytes / kPiece, 1, [&](int64_t begin, int64_t end, Worker&) {
        std::memcpy(to.data() + begin * kPiece, from.data() + begin * kPiece, static_cast<size_t>((end - begin) * kPiece));
      });
    });
    return 2.0 * kBytes / seconds;
  }();
  return rate;
}

double fma_flops_per_second() {
  static const double rate = [] {
    constexpr int64_t kSteps = 4'000'000;
    const int64_t pieces = bench_stream().threads();
    float sink = 0.0f;
    const double seconds = best_seconds(5, [&] {
      bench_stream().parallel_for(pieces, 1, [&](int64_t, int64_t, Worker& worker) {
        const float value = HWY_DYNAMIC_DISPATCH(fma_chains)(kSteps);
        if (worker.index() == 0) sink += value;
      });
    });
    benchmark::DoNotOptimize(sink);
    return 2.0 * 16 * 12 * kSteps * static_cast<double>(pieces) / seconds;
  }();
  return rate;
}

void report_bytes(benchmark::State& state, int64_t bytes) {
  const double total = static_cast<double>(bytes) * static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(total * 1e-9, benchmark::Counter::kIsRate);
  state.counters["of_copy"] = benchmark::Counter(total / copy_bytes_per_second(), benchmark::Counter::kIsRate);
}

void report_flops(benchmark::State& state, int64_t flops) {
  const double total = static_cast<double>(flops) * static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(total * 1e-9, benchmark::Counter::kIsRate);
  state.counters["of_fma"] = benchmark::Counter(total / fma_flops_per_second(), benchmark::Counter::kIsRate);
}

}  // namespace testing
}  // namespace slipstream::kernels
#endif  // HWY_ONCE
