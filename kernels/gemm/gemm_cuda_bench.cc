// bf16 products on a GPU beside cuBLAS, in turns. cuBLAS is loaded by hand so that nothing else links to it. Weights are three copies in turns: they come from memory, as in a model.
#include <dlfcn.h>

#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "common/check.h"
#include "kernels/gemm/gemm.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

using testing::CudaBench;

constexpr int kCopies = 3, kRounds = 2;

struct CuBlas {
  int (*create)(void** handle) = nullptr;
  int (*set_stream)(void* handle, void* stream) = nullptr;
  int (*gemm)(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha, const void* a, int a_type,
              int lda, const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc, int compute,
              int algorithm) = nullptr;
  void* handle = nullptr;

  explicit CuBlas(void* stream) {
    void* library = nullptr;
    for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) return;
    const auto symbol = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      CHECK(function != nullptr);
    };
    symbol("cublasCreate_v2", create);
    symbol("cublasSetStream_v2", set_stream);
    symbol("cublasGemmEx", gemm);
    CHECK_EQ(create(&handle), 0);
    CHECK_EQ(set_stream(handle, stream), 0);
  }

  // Its matrices are stored by columns: ours are its transposes, and so c = a b becomes cᵀ = bᵀ aᵀ.
  void run(const Gemm& args) const {
    constexpr int kBf16 = 14, kF32 = 0, kCompute32F = 68, kDefault = -1;
    const float one = 1.0f, beta = args.accumulate ? 1.0f : 0.0f;
    const auto m = static_cast<int>(args.c.size(0)), n = static_cast<int>(args.c.size(1)),
               k = static_cast<int>(args.a.size(args.transpose_a ? 0 : 1));
    CHECK_EQ(gemm(handle, args.transpose_b, args.transpose_a, n, m, k, &one, args.b.raw(), kBf16, args.transpose_b ? k : n,
                  args.a.raw(), kBf16, args.transpose_a ? m : k, &beta, args.c.raw(),
                  args.c.dtype() == DType::kF32 ? kF32 : kBf16, n, kCompute32F, kDefault),
             0);
  }
};

enum class Form { kForward, kInputGrad, kWeightGrad };

void compare(const char* name, Form form, int64_t m, int64_t n, int64_t k, CudaBench& bench, const CuBlas& peer) {
  const ArenaScope scope(bench.arena());
  std::vector<Gemm> copies;
  for (int i = 0; i < kCopies; ++i) {
    Gemm args{.a = {}, .b = {}, .c = {}, .bias = {}};
    args.transpose_a = form == Form::kWeightGrad;
    args.transpose_b = form == Form::kForward;
    args.accumulate = form == Form::kWeightGrad;
    args.a = args.transpose_a ? bench.random(DType::kBf16, {k, m}) : bench.random(DType::kBf16, {m, k});
    args.b = args.transpose_b ? bench.random(DType::kBf16, {n, k}) : bench.random(DType::kBf16, {k, n});
    args.c = bench.arena().zeros(args.accumulate ? DType::kF32 : DType::kBf16, {m, n}, bench.stream());
    copies.push_back(args);
  }
  for (int round = 0; round < kRounds; ++round) {
    const double ours = bench.milliseconds([&](int i) { launch(copies[static_cast<size_t>(i % kCopies)], bench.stream()); });
    const double theirs =
        peer.gemm == nullptr ? 0.0 : bench.milliseconds([&](int i) { peer.run(copies[static_cast<size_t>(i % kCopies)]); });
    const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    std::printf("%-16s %6lld x %5lld x %5lld  %8.3f ms %6.0f TFLOP/s  cuBLAS %8.3f ms  ratio %.2f\n", name,
                static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k), ours, flops / ours * 1e-9,
                theirs, theirs / ours);
  }
}

// A decode step's products that are no plain matrix by a few rows, against the time of reading their weights.
void decode_products(CudaBench& bench) {
  const ArenaScope scope(bench.arena());
  constexpr int64_t kExperts = 288, kUsed = 8, kHeads = 64;
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{2048, 4096}, {4096, 2048}}) {
    const ArenaScope shape(bench.arena());
    const Tensor w = bench.random(DType::kBf16, {kExperts, n, k});
    for (const int64_t tokens : {1, 2, 4}) {
      const int64_t rows = tokens * kUsed;
      const Tensor x = bench.random(DType::kBf16, {rows, k}), y = bench.arena().zeros(DType::kBf16, {rows, n}, bench.stream());
      std::vector<Tensor> begins;
      for (int64_t copy = 0; copy < kCopies; ++copy) {
        std::vector<int32_t> begin = {0};
        for (int64_t e = 0; e < kExperts; ++e) begin.push_back(begin.back() + (e % kCopies == copy && e / kCopies < rows ? 1 : 0));
        begins.push_back(bench.upload(begin.data(), DType::kI32, {kExperts + 1}));
      }
      bench.memory_row("experts " + std::to_string(n) + " x " + std::to_string(k), tokens, rows * n * k * 2, [&](int i) {
        launch(GroupedGemm{.x = x, .w = w, .row_begin = begins[static_cast<size_t>(i % kCopies)], .y = y, .transpose_w = true}, bench.stream());
      });
    }
  }
  for (const int64_t tokens : {1, 8, 32}) {
    const Tensor w = bench.random(DType::kBf16, {kCopies * kHeads, 192, 512}), q = bench.random(DType::kBf16, {tokens, kHeads, 192});
    const Tensor c = bench.arena().zeros(DType::kBf16, {tokens, kHeads, 512}, bench.stream());
    bench.memory_row("64 heads' 512 x 192", tokens, kHeads * 192 * 512 * 2, [&](int i) {
      const int64_t copy = i % kCopies * kHeads;
      launch(Gemm{.a = q.transpose01(), .b = w.slice(0, copy, copy + kHeads), .c = c.transpose01(), .bias = {}}, bench.stream());
    });
  }
  for (const int64_t tokens : {1, 16, 32, 128}) {
    const Tensor x = bench.random(DType::kBf16, {tokens, 16384}), w = bench.random(DType::kF32, {kCopies * 64, 24, 16384});
    const Tensor c = bench.arena().zeros(DType::kF32, {tokens, 24}, bench.stream());
    bench.memory_row("mixes 24 x 16384", tokens, 24 * 16384 * 4, [&](int i) {
      const int64_t copy = i % (kCopies * 64);
      launch(Gemm{.a = x, .b = w.slice(0, copy, copy + 1).view({24, 16384}), .c = c, .bias = {}, .transpose_b = true}, bench.stream());
    });
  }
}

CUDA_BENCH(gemm) {
  decode_products(bench);
  const CuBlas peer(bench.stream().cuda());
  compare("forward", Form::kForward, 8192, 8192, 8192, bench, peer);
  compare("input gradient", Form::kInputGrad, 8192, 8192, 8192, bench, peer);
  compare("weight gradient", Form::kWeightGrad, 8192, 8192, 8192, bench, peer);
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{128, 4096}, {1536, 4096}, {4096, 4096}, {4096, 8192}, {8192, 4096}, {12288, 4096}, {4096, 12288}}) {
    for (const int64_t m : {1, 16, 32}) compare("forward", Form::kForward, m, n, k, bench, peer);
  }
  for (const int64_t m : {1, 16, 64, 128, 256, 512, 1024, 4096, 16384}) compare("forward", Form::kForward, m, 6144, 6144, bench, peer);
}

}  // namespace
}  // namespace slipstream::kernels
