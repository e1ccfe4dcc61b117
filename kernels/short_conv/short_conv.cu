#include "kernels/short_conv/short_conv.h"

#include <type_traits>

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int kTapsMax = 8;
constexpr int kChannels = 128;  // a block's

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

constexpr int kRows = 16;  // of a block

// A thread walks down the rows of one channel: the inputs that the next row needs stay in registers.
template <int kTaps, class X>
__global__ void short_conv(Rows<const X> x, Rows<const float> w, DeviceSequences sequences, Tail tail, Rows<X> y,
                           int64_t rows, int64_t channels) {
  const int64_t c = int64_t{blockIdx.y} * kChannels + threadIdx.x;
  if (c >= channels) return;
  const int64_t first = int64_t{blockIdx.x} * kRows, end = min(first + kRows, rows);
  float weights[kTaps], window[kTaps];  // the window's last is the row's own input
#pragma unroll
  for (int j = 0; j < kTaps; ++j) weights[j] = w[c][j];
  int b = sequence_of(sequences.row_begin, sequences.count, first);
  int64_t sequence_end = first;  // so that the first row fills the window
  for (int64_t row = first; row < end; ++row) {
    if (row >= sequence_end) {
      if (row > first) b = sequence_of(sequences.row_begin, sequences.count, row);
      const Inputs<X> inputs = inputs_of(x, tail, sequences, b, kTaps);
      sequence_end = sequences.row_begin[b + 1];
#pragma unroll
      for (int j = 0; j < kTaps - 1; ++j) window[j] = inputs.at(row - inputs.begin - (kTaps - 1) + j, c);
    }
    window[kTaps - 1] = load(x[row] + c);
    float z = 0.0f;  // the chain of Inputs::convolve
#pragma unroll
    for (int j = 0; j < kTaps; ++j) z = fmaf(weights[j], window[j], z);
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) window[j] = window[j + 1];
    store(y[row] + c, z * sigmoid(z));
  }
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

// The gradient before the SiLU, of row begin + i.
template <class X>
__device__ float dz_at(const Inputs<X>& inputs, const float* w, Rows<const X> dy, int64_t i, int64_t c) {
  const float z = inputs.convolve(w, i, c), s = sigmoid(z);
  return load(dy[inputs.begin + i] + c) * (s * fmaf(z, 1.0f - s, 1.0f));
}

template <class X>
__global__ void short_conv_backward(Rows<const X> x, Rows<const float> w, DeviceSequences sequences, Rows<const X> dy,
                                    Rows<X> dx, int64_t channels, int64_t taps) {
  const int64_t row = blockIdx.x, c = int64_t{blockIdx.y} * kChannels + threadIdx.x;
  if (c >= channels) return;
  const int b = sequence_of(sequences.row_begin, sequences.count, row);
  const Inputs<X> inputs = inputs_of(x, Tail{}, sequences, b, taps);
  const int64_t i = row - inputs.begin, rows = sequences.row_begin[b + 1] - inputs.begin;
  float sum = 0.0f;
  for (int64_t later = 0; later < taps && i + later < rows; ++later) {
    sum = fmaf(dz_at(inputs, w[c], dy, i + later, c), w[c][taps - 1 - later], sum);
  }
  store(dx[row] + c, sum);
}

template <class X>
void backward(const ShortConvBackward& args, Stream& stream) {
  const int64_t rows = args.x.size(0), channels = args.x.size(1), taps = args.w.size(1);
  const Rows<const X> x = rows_of<const X>(args.x), dy = rows_of<const X>(args.dy);
  const Rows<const float> w = rows_of<const float>(args.w);
  const DeviceSequences sequences = on_device(args.sequences);
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(divide_up(channels, kChannels)));
  short_conv_backward<X><<<grid, kChannels, 0, cuda_stream(stream)>>>(x, w, sequences, dy, rows_of<X>(args.dx), channels,
                                                                    taps);
  CHECK(args.dw.dense());
  add_column_sums([=] __device__(int64_t row, int64_t column) {
    const int64_t c = column / taps, j = column % taps;
    const int b = sequence_of(sequences.row_begin, sequences.count, row);
    const Inputs<X> inputs = inputs_of(x, Tail{}, sequences, b, taps);
    const int64_t i = row - inputs.begin, from = i - (taps - 1) + j;
    return from < 0 ? 0.0f : dz_at(inputs, w[c], dy, i, c) * inputs.at(from, c);
  }, rows, channels * taps, args.dw.f32(), stream);
}

}  // namespace

template <>
void launch_cuda<ShortConv>(const ShortConv& args, Stream& stream) {
  const int64_t rows = args.x.size(0), channels = args.x.size(1), taps = args.w.size(1);
  CHECK_LE(taps, kTapsMax);
  const bool kept = !args.tail.empty();
  const Tail tail = {data_of<float>(args.tail), kept ? args.tail.stride(0) : 0, kept ? args.tail.stride(1) : 0,
                     data_of<const int32_t>(args.slots)};
  const unsigned blocks = static_cast<unsigned>(divide_up(channels, kChannels));
  with_type(args.x.dtype(), [&](auto element) {
    using X = decltype(element);
    const Rows<const X> x = rows_of<const X>(args.x);
    const DeviceSequences sequences = on_device(args.sequences);
    if (rows > 0) {
      const dim3 grid(static_cast<unsigned>(divide_up(rows, kRows)), blocks);
      with_taps(taps, [&](auto count) {
        short_conv<decltype(count)::value, X><<<grid, kChannels, 0, cuda_stream(stream)>>>(
            x, rows_of<const float>(args.w), sequences, tail, rows_of<X>(args.y), rows, channels);
      });
    }
    if (kept && taps > 1 && sequences.count > 0) {
      keep_tail<X><<<dim3(static_cast<unsigned>(sequences.count), blocks), kChannels, 0, cuda_stream(stream)>>>(
          x, sequences, tail, channels, taps);
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
