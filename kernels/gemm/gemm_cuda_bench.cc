// gemm_cuda_bench: bf16 products on a GPU beside cuBLAS, in turns in one process, as the card's clock follows its load. cuBLAS is
// loaded by hand so that nothing else links to it. Weights are three copies in turns: they come from memory, as in a model.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/arena.h"
#include "kernels/gemm/gemm.h"

namespace slipstream::kernels {
namespace {

constexpr int kCopies = 3, kLaunches = 15, kRounds = 2;

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

// Milliseconds a launch of `run(copy)`.
template <class Run>
double time(Stream& stream, const Run& run) {
  for (int i = 0; i < kCopies; ++i) run(i);
  stream.synchronize();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kLaunches; ++i) run(i % kCopies);
  stream.synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / kLaunches;
}

enum class Form { kForward, kInputGrad, kWeightGrad };

void bench(const char* name, Form form, int64_t m, int64_t n, int64_t k, Stream& stream, const CuBlas& peer) {
  Arena arena = *Arena::create_cuda(0, int64_t{1} << 36);
  std::vector<bf16> random(1 << 22);
  uint64_t state = 1;
  for (bf16& value : random) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = to_bf16(static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f);
  }
  const auto fill = [&](const Tensor& t) {
    for (int64_t begin = 0; begin < t.numel(); begin += static_cast<int64_t>(random.size())) {
      const int64_t count = std::min(static_cast<int64_t>(random.size()), t.numel() - begin);
      stream.upload(random.data(), Tensor(t.bf() + begin, DType::kBf16, {count}, t.device()));
    }
    return t;
  };
  std::vector<Gemm> copies;
  for (int i = 0; i < kCopies; ++i) {
    Gemm args{.a = {}, .b = {}, .c = {}, .bias = {}};
    args.transpose_a = form == Form::kWeightGrad;
    args.transpose_b = form == Form::kForward;
    args.accumulate = form == Form::kWeightGrad;
    args.a = fill(args.transpose_a ? arena.alloc(DType::kBf16, {k, m}) : arena.alloc(DType::kBf16, {m, k}));
    args.b = fill(args.transpose_b ? arena.alloc(DType::kBf16, {n, k}) : arena.alloc(DType::kBf16, {k, n}));
    args.c = arena.zeros(args.accumulate ? DType::kF32 : DType::kBf16, {m, n}, stream);
    copies.push_back(args);
  }
  for (int round = 0; round < kRounds; ++round) {
    const double ours = time(stream, [&](int i) { launch(copies[static_cast<size_t>(i)], stream); });
    const double theirs =
        peer.gemm == nullptr ? 0.0 : time(stream, [&](int i) { peer.run(copies[static_cast<size_t>(i)]); });
    const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    std::printf("%-16s %6lld x %5lld x %5lld  %8.3f ms %6.0f TFLOP/s  cuBLAS %8.3f ms  ratio %.2f\n", name,
                static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k), ours, flops / ours * 1e-9,
                theirs, theirs / ours);
  }
}

int run() {
  const absl::StatusOr<std::unique_ptr<Stream>> stream = Stream::create_cuda(0);
  if (!stream.ok()) {
    std::fprintf(stderr, "gemm_cuda_bench: %s\n", std::string(stream.status().message()).c_str());
    return 1;
  }
  const CuBlas peer((*stream)->cuda());
  bench("forward", Form::kForward, 8192, 8192, 8192, **stream, peer);
  bench("input gradient", Form::kInputGrad, 8192, 8192, 8192, **stream, peer);
  bench("weight gradient", Form::kWeightGrad, 8192, 8192, 8192, **stream, peer);
  for (const int64_t m : {1, 16, 64, 128, 256, 512, 1024, 4096, 16384}) bench("forward", Form::kForward, m, 6144, 6144, **stream, peer);
  return 0;
}

}  // namespace
}  // namespace slipstream::kernels

int main() { return slipstream::kernels::run(); }
