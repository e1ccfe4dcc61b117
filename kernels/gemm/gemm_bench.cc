// Gemm against OpenBLAS (cblas_sgemm, where libopenblas.so.0 is installed) in the same process: "vs_openblas"
// is OpenBLAS's time over ours, both the best of their repeats, interleaved, each with weights rotated
// through more memory than the caches hold when the row count is that of decoding. bf16 weights are compared
// with OpenBLAS's fp32. One thread on both sides.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/pack_panels/pack_panels.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

// out [rows x columns] in the forms of a layer: y = x wᵀ, dx = dy w, dw = dyᵀ x, and y = x wᵀ with w in panels.
enum Form : int64_t { kForward, kInputGrad, kWeightGrad, kPanels };

// The system's OpenBLAS, one thread; loaded by hand so that nothing else of this repository links to it. A
// kernel forced through the environment would be an unfair comparison, and OpenBLAS reads it when it is
// loaded.
struct OpenBlas {
  void (*sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a,
                int lda, const float* b, int ldb, float beta, float* c, int ldc) = nullptr;
  std::string kernel = "no OpenBLAS";

  OpenBlas() {
    unsetenv("OPENBLAS_CORETYPE");
    void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto symbol = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      CHECK(function != nullptr);
    };
    void (*set_num_threads)(int) = nullptr;
    char* (*corename)() = nullptr;
    symbol("openblas_set_num_threads", set_num_threads);
    symbol("openblas_get_corename", corename);
    symbol("cblas_sgemm", sgemm);
    set_num_threads(1);
    kernel = corename();
  }
};

const OpenBlas& openblas() {
  static const OpenBlas library;
  return library;
}

void run_openblas(const Gemm& args) {
  constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;
  openblas().sgemm(kRowMajor, args.transpose_a ? kTranspose : kNoTranspose,
                   args.transpose_b ? kTranspose : kNoTranspose, static_cast<int>(args.c.size(0)),
                   static_cast<int>(args.c.size(1)), static_cast<int>(args.a.size(args.transpose_a ? 0 : 1)),
                   1.0f, args.a.f32(), static_cast<int>(args.a.stride(0)), args.b.f32(),
                   static_cast<int>(args.b.stride(0)), args.accumulate ? 1.0f : 0.0f, args.c.f32(),
                   static_cast<int>(args.c.stride(0)));
}

// CPU time of the calling thread, which does all the work: what else runs on the machine disturbs it least.
double now() {
  timespec time;
  CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <class F>
double seconds(F&& f) {
  const double start = now();
  f();
  return now() - start;
}

Tensor clone(testing::TensorPool& pool, const Tensor& matrix) {
  const Tensor out = pool.output(matrix.dtype(), {matrix.size(0), matrix.size(1)});
  std::memcpy(out.raw(), matrix.raw(), static_cast<size_t>(matrix.bytes()));
  return out;
}

// Args: form, dtype of the weights, tokens, outputs, inputs.
void gemm(benchmark::State& state) {
  const auto form = static_cast<Form>(state.range(0));
  const DType dtype = state.range(1) == 0 ? DType::kF32 : DType::kBf16;
  const int64_t tokens = state.range(2), outputs = state.range(3), inputs = state.range(4);
  testing::TensorPool pool(1);
  // Decoding reads every weight once a token: from memory, not from a cache that one layer fits.
  constexpr int64_t kRotatedBytes = int64_t{64} << 20;
  const int64_t copies = tokens <= 16 && outputs * inputs >= kRotatedBytes / 1024
                             ? std::max<int64_t>(kRotatedBytes / (outputs * inputs * 4), 1)
                             : 1;
  const Tensor tokens_in = pool.random(DType::kF32, {tokens, inputs});
  const Tensor tokens_out = pool.random(DType::kF32, {tokens, outputs});
  const Tensor weights = pool.random(DType::kF32, {outputs, inputs});
  const Tensor half_weights = pool.random(dtype, {outputs, inputs});
  std::vector<Gemm> ours, theirs;
  for (int64_t i = 0; i < copies; ++i) {
    const Tensor w = clone(pool, weights);
    Gemm args{.a = tokens_in, .b = w, .c = tokens_out, .bias = {}, .transpose_b = true};
    if (form == kInputGrad) args = {.a = tokens_out, .b = w, .c = tokens_in, .bias = {}};
    if (form == kWeightGrad) {
      args = {.a = tokens_out, .b = tokens_in, .c = w, .bias = {}, .transpose_a = true, .accumulate = true};
    }
    theirs.push_back(args);
    if (dtype == DType::kBf16) args.b = clone(pool, half_weights);
    if (form == kPanels) {
      args.b_panels = pool.output(dtype, {(outputs + kPanelColumns - 1) / kPanelColumns, inputs, kPanelColumns});
      launch(PackPanels{args.b, args.b_panels}, testing::single_thread_stream());
    }
    ours.push_back(args);
  }
  double best = 1e30, best_openblas = 1e30;
  size_t next = 0;
  for (auto _ : state) {
    // A batch of launches at a time: reading the clock costs as much as a small product.
    const int64_t repeats = std::max<int64_t>(10'000'000 / (tokens * outputs * inputs), 1);
    const double ours_seconds = seconds([&] {
      for (int64_t i = 0; i < repeats; ++i)
        launch(ours[next++ % ours.size()], testing::single_thread_stream());
    });
    if (openblas().sgemm != nullptr) {
      const double theirs_seconds = seconds([&] {
        for (int64_t i = 0; i < repeats; ++i) run_openblas(theirs[next++ % theirs.size()]);
      });
      best_openblas = std::min(best_openblas, theirs_seconds / static_cast<double>(repeats));
    }
    best = std::min(best, ours_seconds / static_cast<double>(repeats));
    state.SetIterationTime(ours_seconds / static_cast<double>(repeats));
  }
  const double flops = 2.0 * static_cast<double>(tokens * outputs * inputs);
  state.counters["GFLOP/s"] = flops / best * 1e-9;
  state.counters["of_fma"] = flops / best / testing::fma_flops_per_second();
  state.counters["GB/s"] = static_cast<double>(ours[0].b.bytes()) / best * 1e-9;
  if (openblas().sgemm != nullptr) state.counters["vs_openblas"] = best_openblas / best;
  state.SetLabel(openblas().kernel);
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"form", "bf16", "tokens", "outputs", "inputs"});
  for (const int64_t form : {kForward, kInputGrad, kWeightGrad, kPanels}) {
    for (const int64_t bf16 : {0, 1}) {
      if (bf16 == 1 && form == kWeightGrad) continue;
      b->Args({form, bf16, 512, 512, 512});
      for (const int64_t tokens : {1, 16, 150}) {  // a head's or a router's product: the cost of a launch
        b->Args({form, bf16, tokens, 64, 64});
        b->Args({form, bf16, tokens, 16, 48});
      }
      // A decoding step, and a training step of 1024 tokens.
      for (const int64_t tokens : {1, 4, 16, 1024}) {
        if (tokens != 1024 && form != kForward && form != kPanels) continue;
        b->Args({form, bf16, tokens, 1024, 1024});
        b->Args({form, bf16, tokens, 4096, 1024});
        b->Args({form, bf16, tokens, 1024, 4096});
      }
    }
  }
}
BENCHMARK(gemm)->Apply(shapes)->UseManualTime()->Iterations(40);

}  // namespace
}  // namespace slipstream::kernels
