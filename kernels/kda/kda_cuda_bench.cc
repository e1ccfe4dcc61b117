// KDA on a GPU at the shape of GLM-5.3-Flash, 64 heads x 128, in bf16: prefill of one and of many
// sequences, training's forward and backward, decode with the chunk's rows beside the state. Floors are the
// bytes of five bf16 tensors a token (q, k, v, decays, o), or of the state read and written once a token,
// at 4.3 TB/s.
#include <cstdio>
#include <list>
#include <string>
#include <vector>

#include "kernels/kda/kda.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

using testing::CudaBench;

constexpr int64_t kHeads = 64, kWidth = 128;
constexpr double kBytesPerMs = 4.3e9;

void print(const std::string& name, double ms, double floor_ms) {
  std::printf("%-34s %9.4f ms   floor %7.4f ms   %5.1f %%\n", name.c_str(), ms, floor_ms,
              100.0 * floor_ms / ms);
}

class Inputs {
 public:
  Inputs(CudaBench& bench, int64_t tokens) : bench_(bench) {
    const auto rows = [&](DType dtype, float low, float high) {
      return bench.random(dtype, {tokens, kHeads, kWidth}, low, high);
    };
    whole_ = {.q = rows(DType::kBf16, -0.15f, 0.15f),
              .k = rows(DType::kBf16, -0.15f, 0.15f),
              .v = rows(DType::kBf16, -1.0f, 1.0f),
              .log_decay = rows(DType::kF32, -0.5f, 0.0f),
              .beta = bench.random(DType::kF32, {tokens, kHeads}, 0.0f, 1.0f),
              .sequences = {},
              .cache = {},
              .slots = {},
              .o = bench.arena().alloc(DType::kBf16, {tokens, kHeads, kWidth}),
              .span_states = {},
              .r = {}};
  }

  // `count` sequences with `fresh` new rows each.
  Kda call(int64_t count, int64_t fresh, int64_t cached) {
    Kda args = whole_;
    for (const auto member : {&Kda::q, &Kda::k, &Kda::v, &Kda::log_decay, &Kda::beta, &Kda::o})
      args.*member = (whole_.*member).slice(0, 0, count * fresh);
    auto& begin = hosts_.emplace_back();
    for (int64_t b = 0; b <= count; ++b) begin.push_back(static_cast<int32_t>(b * fresh));
    auto& before = hosts_.emplace_back(static_cast<size_t>(count), static_cast<int32_t>(cached));
    args.sequences = {.row_begin = bench_.upload(begin.data(), DType::kI32, {count + 1}),
                      .cached = bench_.upload(before.data(), DType::kI32, {count}),
                      .host_row_begin = Tensor(begin.data(), DType::kI32, {count + 1}),
                      .host_cached = Tensor(before.data(), DType::kI32, {count})};
    return args;
  }

 private:
  CudaBench& bench_;
  Kda whole_;
  std::list<std::vector<int32_t>> hosts_;
};

void prefill(CudaBench& bench, Inputs& inputs, int64_t count, int64_t length) {
  const ArenaScope scope(bench.arena());
  const Kda args = inputs.call(count, length, 0);
  const double ms = bench.milliseconds([&](int) { launch(args, bench.stream()); });
  print("forward " + std::to_string(count) + " x " + std::to_string(length), ms,
        static_cast<double>(count * length * kHeads * kWidth * 10) / kBytesPerMs);
}

void training(CudaBench& bench, Inputs& inputs, int64_t length) {
  const ArenaScope scope(bench.arena());
  Kda args = inputs.call(1, length, 0);
  const auto rows = [&](DType dtype) { return bench.arena().alloc(dtype, {length, kHeads, kWidth}); };
  args.span_states = bench.arena().alloc(DType::kF32, {kda_spans(length), kHeads, kWidth, kWidth});
  args.r = rows(DType::kF32);
  const KdaBackward backward{.q = args.q,
                             .k = args.k,
                             .log_decay = args.log_decay,
                             .beta = args.beta,
                             .sequences = args.sequences,
                             .span_states = args.span_states,
                             .r = args.r,
                             .d_o = bench.random(DType::kBf16, {length, kHeads, kWidth}),
                             .dq = rows(DType::kBf16),
                             .dk = rows(DType::kBf16),
                             .dlog_decay = rows(DType::kF32),
                             .dv = rows(DType::kBf16),
                             .dbeta = bench.arena().alloc(DType::kF32, {length, kHeads})};
  const double forward = bench.milliseconds([&](int) { launch(args, bench.stream()); }, 5);
  const double both = bench.milliseconds(
      [&](int) {
        launch(args, bench.stream());
        launch(backward, bench.stream());
      },
      3);
  const double floor = static_cast<double>(length * kHeads * kWidth * 10) / kBytesPerMs;
  print("training forward " + std::to_string(length), forward, floor);
  print("forward + backward " + std::to_string(length), both, 3.0 * floor);
}

// Every row of the chunk in turn.
void decode(CudaBench& bench, Inputs& inputs, int64_t batch) {
  const ArenaScope scope(bench.arena());
  const int64_t groups = batch < 64 ? 64 / batch : 1;  // of slots, so that states come from memory
  const int64_t slots = batch * groups;
  const auto rows = [&](float low, float high) {
    return bench.random(DType::kF32, {slots, kKdaChunk, kHeads, kWidth}, low, high);
  };
  const KdaState cache{.state = bench.random(DType::kF32, {slots, kHeads, kWidth, kWidth}),
                       .chunk_k = rows(-0.15f, 0.15f),
                       .chunk_g = rows(0.5f, 1.0f),
                       .chunk_u = rows(-1.0f, 1.0f)};
  std::vector<Kda> calls;
  std::vector<Tensor> slot_lists;
  for (int64_t group = 0; group < groups; ++group) {
    std::vector<int32_t> list;
    for (int64_t b = 0; b < batch; ++b) list.push_back(static_cast<int32_t>(group * batch + b));
    slot_lists.push_back(bench.upload(list.data(), DType::kI32, {batch}));
  }
  for (int64_t position = 0; position < kKdaChunk; ++position) {
    calls.push_back(inputs.call(batch, 1, 1024 + position));
    calls.back().cache = cache;
  }
  const double ms = bench.milliseconds(
      [&](int i) {
        Kda& args = calls[static_cast<size_t>(i) % calls.size()];
        args.slots = slot_lists[static_cast<size_t>(i) % slot_lists.size()];
        launch(args, bench.stream());
      },
      160);
  print("decode, batch " + std::to_string(batch), ms,
        static_cast<double>(batch * kHeads * kWidth * kWidth * 8) / kBytesPerMs);
}

CUDA_BENCH(kda) {
  Inputs inputs(bench, 65536);
  for (const int64_t batch : {1, 64, 256}) decode(bench, inputs, batch);
  for (const int64_t length : {4096, 16384, 65536}) prefill(bench, inputs, 1, length);
  prefill(bench, inputs, 8, 1024);
  prefill(bench, inputs, 64, 256);
  for (const int64_t length : {4096, 16384}) training(bench, inputs, length);
}

}  // namespace
}  // namespace slipstream::kernels
