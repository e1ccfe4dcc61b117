#include "kernels/short_conv/short_conv.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/pieces.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int kTapsMax = 8;
constexpr int kThreads = 128, kChannels = kThreads;  // a block's

// The inputs of one sequence by their offset from its first row in this batch; what came before is in the tail.
template <class X>
struct Inputs {
  Rows<const X> x;
  const float* tail;  // of the sequence's slot; null: nothing came before
  int64_t tail_stride, begin, taps;
  __device__ float at(int64_t i, int64_t c) const {
    if (i >= 0) return load(x[begin + i] + c);
    return tail == nullptr ? 0.0f : tail[(taps - 1 + i) * tail_stride + c];
  }
  // Before the SiLU: one chain over ascending taps.
  __device__ float convolve(const float* w, int64_t i, int64_t c) const {
    float z = 0.0f;
    for (int64_t j = 0; j < taps; ++j) z = fmaf(w[j], at(i - (taps - 1) + j, c), z);
    return z;
  }
};

struct Tail {
  float* data;
  int64_t slot_stride, row_stride;
  const int32_t* slots;
};

template <class X>
__device__ Inputs<X> inputs_of(Rows<const X> x, const Tail& tail, const DeviceSequences& sequences, int b, int64_t taps) {
  const bool continued = tail.data != nullptr && sequences.cached[b] > 0;
  return {x, continued ? tail.data + tail.slots[b] * tail.slot_stride : nullptr, tail.row_stride, sequences.row_begin[b],
          taps};
}

// The logistic function as exact as X is: of bf16's two instructions for the exponential and the reciprocal each.
template <class X>
__device__ __forceinline__ float sigmoid_for(float x) {
  if constexpr (std::is_same_v<X, float>) {
    return sigmoid(x);
  } else {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + fast_exp2(x * -1.44269504088896341f)));
    return y;
  }
}

// kWide consecutive channels, by one access where there are several: rows are then aligned to 16 bytes.
template <int kWide, class X>
struct alignas(kWide == 1 ? sizeof(X) : kWide * sizeof(X)) Channels {
  X values[kWide];

  __device__ __forceinline__ static Channels at(const X* p) { return *reinterpret_cast<const Channels*>(p); }
  __device__ __forceinline__ void floats(float (&to)[kWide]) const {
#pragma unroll
    for (int i = 0; i < kWide; ++i) to[i] = load(values + i);
  }
};
template <int kWide, class X>
__device__ __forceinline__ void store_channels(X* to, const float (&from)[kWide]) {
  if constexpr (kWide % 2 == 0 && std::is_same_v<X, bf16>) {
    Channels<kWide / 2, uint32_t> packed;
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) packed.values[i] = pack_bf16(from[2 * i], from[2 * i + 1]);
    *reinterpret_cast<Channels<kWide / 2, uint32_t>*>(to) = packed;
  } else {
    Channels<kWide, X> kept;
#pragma unroll
    for (int i = 0; i < kWide; ++i) store(kept.values + i, from[i]);
    *reinterpret_cast<Channels<kWide, X>*>(to) = kept;
  }
}

template <int kTaps, int kWide>
__device__ __forceinline__ void load_weights(Rows<const float> w, int64_t c, float (&weights)[kTaps][kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    using Own = Channels<kWide == 1 || kTaps != 4 ? 1 : 4, float>;
#pragma unroll
    for (int j = 0; j < kTaps; j += sizeof(Own) / 4) {
      const Own own = Own::at(w[c + i] + j);
#pragma unroll
      for (int n = 0; n < static_cast<int>(sizeof(Own) / 4); ++n) weights[j + n][i] = own.values[n];
    }
  }
}
// Before the SiLU, channel i of the row whose window starts at `window`: the chain of Inputs::convolve().
template <int kTaps, int kWide>
__device__ __forceinline__ float convolve(const float (&weights)[kTaps][kWide], const float (*window)[kWide], int i) {
  float z = 0.0f;
#pragma unroll
  for (int j = 0; j < kTaps; ++j) z = fmaf(weights[j][i], window[j][i], z);
  return z;
}
// What comes before row i of the sequence.
template <int kTaps, int kWide, class X>
__device__ __forceinline__ void load_before(const Inputs<X>& inputs, int64_t i, int64_t c, float (*window)[kWide]) {
#pragma unroll
  for (int j = 0; j < kTaps - 1; ++j) {
    const int64_t from = i - (kTaps - 1) + j;
    if (from >= 0) {
      Channels<kWide, X>::at(inputs.x[inputs.begin + from] + c).floats(window[j]);
    } else if (inputs.tail != nullptr) {
      Channels<kWide, float>::at(inputs.tail + (kTaps - 1 + from) * inputs.tail_stride + c).floats(window[j]);
    } else {
#pragma unroll
      for (int d = 0; d < kWide; ++d) window[j][d] = 0.0f;
    }
  }
}

// A thread walks down `block_rows` rows of its channels, kAhead at a time: the inputs before them stay in registers. With
// kKeep every sequence has one row, and a block that row: it also moves the tail on.
constexpr int kAhead = 4;

template <int kTaps, int kWide, bool kKeep, class X>
__global__ void __launch_bounds__(kThreads) short_conv(Rows<const X> x, Rows<const float> w, DeviceSequences sequences,
                                                       Tail tail, Rows<X> y, int64_t rows, int64_t channels,
                                                       int64_t block_rows) {
  const int64_t c = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWide;
  if (c >= channels) return;
  const int64_t first = int64_t{blockIdx.y} * block_rows, end = min(first + block_rows, rows);
  float weights[kTaps][kWide];
  load_weights(w, c, weights);
  float inputs_of_rows[kTaps - 1 + kAhead][kWide];  // row base + n has its own at kTaps - 1 + n
  int b = kKeep ? static_cast<int>(first) : sequence_of(sequences.row_begin, sequences.count, first);
  int64_t sequence_end = first;  // so that the first row fills the window
  Channels<kWide, X> next[kAhead];
#pragma unroll
  for (int n = 0; n < kAhead; ++n) next[n] = Channels<kWide, X>::at(x[min(first + n, end - 1)] + c);
  for (int64_t base = first; base < end; base += kAhead) {
    Channels<kWide, X> ahead[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      ahead[n] = next[n];
      if (!kKeep) next[n] = Channels<kWide, X>::at(x[min(base + kAhead + n, end - 1)] + c);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int64_t row = base + n;
      if (row >= end) break;
      if (row >= sequence_end) {
        if (row > first) b = sequence_of(sequences.row_begin, sequences.count, row);
        const Inputs<X> inputs = inputs_of(x, tail, sequences, b, kTaps);
        sequence_end = sequences.row_begin[b + 1];
        load_before<kTaps>(inputs, row - inputs.begin, c, inputs_of_rows + n);
      }
      ahead[n].floats(inputs_of_rows[kTaps - 1 + n]);
      float out[kWide];
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const float z = convolve(weights, inputs_of_rows + n, i);
        out[i] = z * sigmoid_for<X>(z);
      }
      store_channels(y[row] + c, out);
    }
    if constexpr (kKeep) {
      break;
    } else {
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) inputs_of_rows[j][i] = inputs_of_rows[kAhead + j][i];
      }
    }
  }
  if constexpr (kKeep) {
    float* const to = tail.data + tail.slots[b] * tail.slot_stride + c;
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) {
      store_channels(to + j * tail.row_stride, inputs_of_rows[j + 1]);
    }
  }
}

// Of `rows` rows in as many sequences.
bool one_row_each(const Sequences& sequences) {
  for (int64_t b = 0; b < sequences.count(); ++b) {
    if (sequences.end(b) - sequences.begin(b) != 1) return false;
  }
  return true;
}

// Calls f with the number of taps as a constant.
template <int kTaps = 1, class F>
void with_taps(int64_t taps, F&& f) {
  if constexpr (kTaps <= kTapsMax) {
    if (taps == kTaps) return f(std::integral_constant<int, kTaps>());
    with_taps<kTaps + 1>(taps, f);
  }
}

// One block a sequence and 128 channels: its last inputs, read before any is written.
template <class X>
__global__ void keep_tail(Rows<const X> x, DeviceSequences sequences, Tail tail, int64_t channels, int64_t taps) {
  const int b = static_cast<int>(blockIdx.x);
  const int64_t c = int64_t{blockIdx.y} * kChannels + threadIdx.x;
  if (c >= channels) return;
  const Inputs<X> inputs = inputs_of(x, tail, sequences, b, taps);
  const int64_t rows = sequences.row_begin[b + 1] - inputs.begin;
  float last[kTapsMax];
  for (int64_t j = 0; j < taps - 1; ++j) last[j] = inputs.at(rows - (taps - 1) + j, c);
  float* const to = tail.data + tail.slots[b] * tail.slot_stride + c;
  for (int64_t j = 0; j < taps - 1; ++j) to[j * tail.row_stride] = last[j];
}

// A thread walks down a block's rows of its channels, and a window further where the sequence goes on: dx of a row needs
// the gradients before the SiLU, dz, of the rows that read it. dw of the block's rows goes to `partial`.
template <int kTaps, int kWide, class X>
__global__ void __launch_bounds__(kThreads) short_conv_backward(Rows<const X> x, Rows<const float> w,
                                                                DeviceSequences sequences, Rows<const X> dy, Rows<X> dx,
                                                                float* partial, int64_t rows, int64_t channels,
                                                                int64_t block_rows) {
  const int64_t c = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWide;
  if (c >= channels) return;
  const int64_t first = int64_t{blockIdx.y} * block_rows, end = min(first + block_rows, rows);
  float weights[kTaps][kWide], dw[kTaps][kWide] = {};
  load_weights(w, c, weights);
  float window[kTaps - 1 + kAhead][kWide], dz[kTaps - 1 + kAhead][kWide];  // row base + n at kTaps - 1 + n
  for (int64_t run = first; run < end;) {  // the block's rows of one sequence
    const Inputs<X> inputs =
        inputs_of(x, Tail{}, sequences, sequence_of(sequences.row_begin, sequences.count, run), kTaps);
    const int64_t sequence_end = sequences.row_begin[sequence_of(sequences.row_begin, sequences.count, run) + 1];
    const int64_t run_end = min(end, sequence_end);
    load_before<kTaps>(inputs, run - inputs.begin, c, window);
    for (int64_t base = run; base < run_end + kTaps - 1; base += kAhead) {
      Channels<kWide, X> ahead[kAhead], gradients[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int64_t row = min(base + n, sequence_end - 1);
        ahead[n] = Channels<kWide, X>::at(x[row] + c);
        gradients[n] = Channels<kWide, X>::at(dy[row] + c);
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int64_t row = base + n, emitted = row - (kTaps - 1);
        ahead[n].floats(window[kTaps - 1 + n]);
        float gradient[kWide], sums[kWide];
        gradients[n].floats(gradient);
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          const float z = convolve(weights, window + n, i), s = sigmoid_for<X>(z);
          const float own = row < sequence_end ? gradient[i] * (s * fmaf(z, 1.0f - s, 1.0f)) : 0.0f;
          dz[kTaps - 1 + n][i] = own;
#pragma unroll
          for (int j = 0; j < kTaps; ++j) dw[j][i] = fmaf(row < run_end ? own : 0.0f, window[n + j][i], dw[j][i]);
          float sum = 0.0f;
#pragma unroll
          for (int later = 0; later < kTaps; ++later) sum = fmaf(dz[n + later][i], weights[kTaps - 1 - later][i], sum);
          sums[i] = sum;
        }
        if (emitted >= run && emitted < run_end) store_channels(dx[emitted] + c, sums);
      }
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
          window[j][i] = window[kAhead + j][i];
          dz[j][i] = dz[kAhead + j][i];
        }
      }
    }
    run = run_end;
  }
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) partial[(blockIdx.y * channels + c + i) * kTaps + j] = dw[j][i];
  }
}

// Pieces of rows whose dw is summed one after the other.
constexpr int64_t kBackwardRows = 64, kBackwardPieces = 64;

template <class X>
void backward(const ShortConvBackward& args, Stream& stream) {
  const int64_t rows = args.x.size(0), channels = args.x.size(1), taps = args.w.size(1);
  CHECK(args.dw.dense());
  const int64_t piece = std::max(kBackwardRows, divide_up(rows, kBackwardPieces)), pieces = divide_up(rows, piece);
  const ArenaScope scope(stream.workspace());
  float* const partial = stream.workspace().alloc(DType::kF32, {pieces, channels * taps}).f32();
  const bool wide = aligned_16(args.x) && aligned_16(args.dy) && aligned_16(args.dx) && (taps != 4 || fours(args.w));
  with_taps(taps, [&](auto count) {
    const auto run = [&](auto channels_each) {
      constexpr int kTaps = decltype(count)::value, kWide = decltype(channels_each)::value;
      const dim3 grid(static_cast<unsigned>(divide_up(channels, kThreads * kWide)), static_cast<unsigned>(pieces));
      short_conv_backward<kTaps, kWide, X><<<grid, kThreads, 0, cuda_stream(stream)>>>(
          rows_of<const X>(args.x), rows_of<const float>(args.w), on_device(args.sequences), rows_of<const X>(args.dy),
          rows_of<X>(args.dx), partial, rows, channels, piece);
    };
    wide ? run(std::integral_constant<int, 4>()) : run(std::integral_constant<int, 1>());
  });
  const int64_t columns = channels * taps;
  add_column_sums([=] __device__(int64_t row, int64_t column) { return partial[row * columns + column]; }, pieces, columns,
                  args.dw.f32(), stream);
}

}  // namespace

template <>
void launch_cuda<ShortConv>(const ShortConv& args, Stream& stream) {
  const int64_t rows = args.x.size(0), channels = args.x.size(1), taps = args.w.size(1);
  CHECK_LE(taps, kTapsMax);
  const bool kept = !args.tail.empty();
  const Tail tail = {data_of<float>(args.tail), kept ? args.tail.stride(0) : 0, kept ? args.tail.stride(1) : 0,
                     data_of<const int32_t>(args.slots)};
  with_type(args.x.dtype(), [&](auto element) {
    using X = decltype(element);
    constexpr int kWide = 16 / sizeof(X);
    const Rows<const X> x = rows_of<const X>(args.x);
    const DeviceSequences sequences = on_device(args.sequences);
    const bool wide = aligned_16(args.x) && aligned_16(args.y) && (taps != 4 || fours(args.w)) && fours(args.tail);
    // One row a block where a batch has few: a block takes its rows one after the other.
    const int64_t block_rows = rows >= 4096 ? 32 : rows >= 1024 ? 8 : 1;
    const bool one_each = kept && taps > 1 && block_rows == 1 && rows == sequences.count && one_row_each(args.sequences);
    if (rows > 0) {
      const auto run = [&](auto count, auto channels_each, auto keep) {
        const dim3 grid(static_cast<unsigned>(divide_up(channels, kThreads * decltype(channels_each)::value)),
                        static_cast<unsigned>(divide_up(rows, block_rows)));
        short_conv<decltype(count)::value, decltype(channels_each)::value, decltype(keep)::value, X>
            <<<grid, kThreads, 0, cuda_stream(stream)>>>(x, rows_of<const float>(args.w), sequences, tail,
                                                         rows_of<X>(args.y), rows, channels, block_rows);
      };
      with_taps(taps, [&](auto count) {
        const auto width = [&](auto keep) {
          wide ? run(count, std::integral_constant<int, kWide>(), keep) : run(count, std::integral_constant<int, 1>(), keep);
        };
        one_each ? width(std::true_type()) : width(std::false_type());
      });
    }
    if (kept && taps > 1 && sequences.count > 0 && !one_each) {
      const dim3 grid(static_cast<unsigned>(sequences.count), static_cast<unsigned>(divide_up(channels, kChannels)));
      keep_tail<X><<<grid, kChannels, 0, cuda_stream(stream)>>>(x, sequences, tail, channels, taps);
    }
  });
  check_launch("short_conv");
}

template <>
void launch_cuda<ShortConvBackward>(const ShortConvBackward& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  CHECK_LE(args.w.size(1), kTapsMax);
  with_type(args.x.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
  check_launch("short_conv_backward");
}

}  // namespace slipstream::kernels
