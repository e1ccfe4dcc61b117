// scaled_gemm_cuda_bench: products of e4m3 factors on a GPU, dense ones beside cuBLASLt in turns, and the
// quantising of activations and weights. cuBLASLt is loaded by hand so that nothing else links to it. Dense
// weights are three copies in turns: they come from memory, as in a model; experts' are larger than the L2.
// Two rounds: under load the card lowers its clock.
#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "common/check.h"
#include "common/hash.h"
#include "kernels/quantize/quantize.h"
#include "kernels/scaled_gemm/scaled_gemm.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

using testing::CudaBench;

constexpr double kPeak = 1979e12,
                 kBandwidth = 4.8e12;  // e4m3 operations and bytes a second, by the datasheet
constexpr int kCopies = 3, kRounds = 2;

int64_t blocks(int64_t n) { return (n + 127) / 128; }

struct Factor {
  Tensor codes, scales;
};
// Of one random matrix; experts' are the same values, in memory of their own.
Factor factor(CudaBench& bench, int64_t experts, int64_t rows, int64_t k, int64_t block_rows) {
  const int64_t scale_rows = (rows + block_rows - 1) / block_rows;
  const Factor f{bench.arena().alloc(DType::kF8E4M3, {experts, rows, k}),
                 bench.arena().alloc(DType::kF32, {experts, scale_rows, blocks(k)})};
  const ArenaScope scope(bench.arena());
  const Tensor x = bench.random(DType::kBf16, {rows, k});
  for (int64_t e = 0; e < experts; ++e)
    launch(Quantize{x, f.codes[e], f.scales[e], block_rows}, bench.stream());
  bench.stream().synchronize();
  return f;
}

// The same product by cuBLASLt, scales of the same kinds; it wants a's in another order, which changes no
// time.
class CuBlasLt {
 public:
  explicit CuBlasLt(CudaBench& bench)
      : bench_(bench), library_(dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    CHECK_EQ(call<decltype(cublasLtCreate)>("cublasLtCreate")(&handle_), CUBLAS_STATUS_SUCCESS);
    workspace_ = bench.arena().alloc(DType::kF8E4M3, {kWorkspaceBytes});
  }
  // 0: not to be had.
  double milliseconds(const ScaledGemm& args, const Factor& weights) {
    if (library_ == nullptr) return 0.0;
    const int64_t m = args.c.size(0), n = args.c.size(1), k = args.a.size(1);
    // Its matrices are stored by columns: ours are its transposes, and so c = a bᵀ becomes cᵀ = b aᵀ.
    cublasLtMatmulDesc_t product;
    call<decltype(cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate")(&product, CUBLAS_COMPUTE_32F,
                                                                         CUDA_R_32F);
    const auto set = [&](cublasLtMatmulDescAttributes_t name, auto value) {
      auto* const f = call<decltype(cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute");
      CHECK_EQ(f(product, name, &value, sizeof(value)), CUBLAS_STATUS_SUCCESS);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, args.a_scales.raw());
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, weights.scales.raw());
    const auto layout = [&](cudaDataType_t type, int64_t rows, int64_t columns) {
      cublasLtMatrixLayout_t made;
      call<decltype(cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate")(
          &made, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows);
      return made;
    };
    const cublasLtMatrixLayout_t a = layout(CUDA_R_8F_E4M3, k, n), b = layout(CUDA_R_8F_E4M3, k, m),
                                 c = layout(CUDA_R_16BF, n, m);
    cublasLtMatmulPreference_t preference;
    call<decltype(cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate")(&preference);
    const size_t workspace = kWorkspaceBytes;
    call<decltype(cublasLtMatmulPreferenceSetAttribute)>("cublasLtMatmulPreferenceSetAttribute")(
        preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace));
    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    call<decltype(cublasLtMatmulAlgoGetHeuristic)>("cublasLtMatmulAlgoGetHeuristic")(
        handle_, product, a, b, c, c, preference, 1, &best, &found);
    if (found == 0) return 0.0;
    auto* const run = call<decltype(cublasLtMatmul)>("cublasLtMatmul");
    const float one = 1.0f, zero = 0.0f;
    return bench_.milliseconds([&](int i) {
      CHECK_EQ(run(handle_, product, &one, weights.codes[i % kCopies].raw(), a, args.a.raw(), b, &zero,
                   args.c.raw(), c, args.c.raw(), c, &best.algo, workspace_.raw(), kWorkspaceBytes,
                   static_cast<cudaStream_t>(bench_.stream().cuda())),
               CUBLAS_STATUS_SUCCESS);
    });
  }

 private:
  static constexpr int64_t kWorkspaceBytes = 32 << 20;
  template <class F>
  F* call(const char* name) {
    void* const symbol = dlsym(library_, name);
    CHECK(symbol != nullptr);
    return reinterpret_cast<F*>(symbol);
  }
  CudaBench& bench_;
  void* library_;
  cublasLtHandle_t handle_ = nullptr;
  Tensor workspace_;
};

void print(const char* name, int64_t m, int64_t n, int64_t k, double ms, double bytes) {
  const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const double floor = std::max(flops / kPeak, bytes / kBandwidth) * 1e3;
  std::printf("%-14s %6lld x %5lld x %5lld  %8.4f ms %6.0f TFLOP/s %6.0f GB/s  %3.0f %% of the floor", name,
              static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k), ms,
              flops / ms * 1e-9, bytes / ms * 1e-6, floor / ms * 100.0);
}

double bytes_of(int64_t experts, int64_t m, int64_t n, int64_t k) {
  return static_cast<double>(experts * n * k + m * k + 2 * m * n);
}

void dense(CudaBench& bench, CuBlasLt& peer, int64_t m, int64_t n, int64_t k) {
  const ArenaScope scope(bench.arena());
  const Factor a = factor(bench, 1, m, k, 1), b = factor(bench, kCopies, n, k, 128);
  ScaledGemm args{.a = a.codes[0],
                  .a_scales = a.scales[0],
                  .b = {},
                  .b_scales = {},
                  .c = bench.arena().alloc(DType::kBf16, {m, n})};
  for (int round = 0; round < kRounds; ++round) {
    const double ms = bench.milliseconds([&](int i) {
      args.b = b.codes[i % kCopies], args.b_scales = b.scales[i % kCopies];
      launch(args, bench.stream());
    });
    print("dense", m, n, k, ms, bytes_of(1, m, n, k));
    const double theirs = peer.milliseconds(args, b);
    std::printf("  cuBLASLt %8.4f ms  ratio %.2f\n", theirs, theirs / ms);
  }
}

// Rows dealt to the experts at random.
void grouped(CudaBench& bench, const char* name, int64_t experts, int64_t n, int64_t k, const Factor& w,
             int64_t rows) {
  const ArenaScope scope(bench.arena());
  std::vector<int32_t> begin(static_cast<size_t>(experts + 1), 0);
  for (int64_t i = 0; i < rows; ++i)
    ++begin[static_cast<size_t>(splitmix64(static_cast<uint64_t>(i + rows)) %
                                static_cast<uint64_t>(experts)) +
            1];
  int64_t used = 0;
  for (size_t e = 0; e < static_cast<size_t>(experts); ++e) {
    used += begin[e + 1] > 0 ? 1 : 0;
    begin[e + 1] += begin[e];
  }
  const Factor a = factor(bench, 1, rows, k, 1);
  const ScaledGemm args{.a = a.codes[0],
                        .a_scales = a.scales[0],
                        .b = w.codes,
                        .b_scales = w.scales,
                        .row_begin = bench.upload(begin.data(), DType::kI32, {experts + 1}),
                        .c = bench.arena().alloc(DType::kBf16, {rows, n})};
  for (int round = 0; round < kRounds; ++round) {
    print(name, rows, n, k, bench.milliseconds([&](int) { launch(args, bench.stream()); }, 7),
          bytes_of(used, rows, n, k));
    std::printf("\n");
  }
}

void quantizing(CudaBench& bench, int64_t rows, int64_t k, int64_t block_rows) {
  const ArenaScope scope(bench.arena());
  const Tensor x = bench.random(DType::kBf16, {rows, k}),
               codes = bench.arena().alloc(DType::kF8E4M3, {rows, k});
  const Tensor scales = bench.arena().alloc(DType::kF32, {(rows + block_rows - 1) / block_rows, blocks(k)});
  const double ms = bench.milliseconds([&](int) {
    launch(Quantize{x, codes, scales, block_rows}, bench.stream());
  });
  const double bytes = 3.0 * static_cast<double>(rows * k);
  std::printf("quantize, blocks of %3lld rows %6lld x %5lld  %8.4f ms %6.0f GB/s  %3.0f %% of the floor\n",
              static_cast<long long>(block_rows), static_cast<long long>(rows), static_cast<long long>(k), ms,
              bytes / ms * 1e-6, bytes / kBandwidth * 1e3 / ms * 100.0);
}

CUDA_BENCH(scaled_gemm) {
  CuBlasLt peer(bench);
  dense(bench, peer, 4096, 6144, 16384);
  for (const int64_t m : {1, 16, 64, 128, 256, 512, 1024, 4096}) dense(bench, peer, m, 6144, 6144);
  for (const int64_t rows : {64, 16384, 131072}) quantizing(bench, rows, 6144, 1);
  quantizing(bench, 16384, 6144, 128);
  struct Experts {
    const char* name;
    int64_t count, n, k;
  };
  for (const Experts& e :
       {Experts{"GLM-5 gate_up", 256, 4096, 6144}, Experts{"Flash gate_up", 288, 4096, 4096}}) {
    const ArenaScope scope(bench.arena());
    const Factor w = factor(bench, e.count, e.n, e.k, 128);
    for (const int64_t rows : {512, 2048, 8192, 32768, 131072})
      grouped(bench, e.name, e.count, e.n, e.k, w, rows);
  }
}

}  // namespace
}  // namespace slipstream::kernels
