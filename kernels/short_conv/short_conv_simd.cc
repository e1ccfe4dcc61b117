#include "kernels/short_conv/short_conv.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/short_conv/short_conv_simd.cc"
#include <algorithm>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// out[j, c] = w[begin + c, j]: taps of neighbouring channels side by side.
void transpose_taps(const Tensor& w, int64_t begin, int64_t channels, float* out) {
  const int64_t taps = w.size(1), stride = w.stride(0);
  const float* from = w.f32() + begin * stride;
  int64_t c = 0;
  if (taps == 4 && stride == 4) {
    const LanesTag d;
    for (; c + kLanesPartSize <= channels; c += kLanesPartSize) {
      LanesVec w0, w1, w2, w3;
      hn::LoadInterleaved4(d, from + c * 4, w0, w1, w2, w3);
      hn::StoreU(w0, d, out + c);
      hn::StoreU(w1, d, out + channels + c);
      hn::StoreU(w2, d, out + 2 * channels + c);
      hn::StoreU(w3, d, out + 3 * channels + c);
    }
  }
  for (; c < channels; ++c) {
    for (int64_t j = 0; j < taps; ++j) out[j * channels + c] = from[c * stride + j];
  }
}

// The convolution's sum for sixteen channels at offset i. kTaps: the number of taps, or 0 when only `taps`
// says it.
template <int kTaps, class Chunk>
HWY_INLINE Lanes convolve(Chunk chunk, const float* const* window, const float* w, int64_t channels,
                          int64_t taps, int64_t i) {
  Lanes sum = zero_lanes();
  const int64_t count = kTaps > 0 ? kTaps : taps;
  for (int64_t j = 0; j < count; ++j)
    sum = fma(chunk.load(w + j * channels + i), chunk.load(window[j] + i), sum);
  return sum;
}

// The last `taps` inputs at a row, oldest first, as it moves down a sequence.
struct Window {
  const float** rows;
  int64_t taps;

  void push(const float* row) const {
    for (int64_t j = 0; j + 1 < taps; ++j) rows[j] = rows[j + 1];
    rows[taps - 1] = row;
  }
};

template <int kTaps>
void forward_channels(const ShortConv& args, int64_t begin, int64_t end, Worker& worker) {
  const int64_t channels = end - begin, taps = args.w.size(1), kept = taps - 1;
  float* w = worker.scratch<float>(taps * channels);
  transpose_taps(args.w, begin, channels, w);
  float* zeros = worker.scratch<float>(channels);
  std::fill(zeros, zeros + channels, 0.0f);
  const Window window{worker.scratch<const float*>(taps), taps};
  const float* x = args.x.f32() + begin;
  float* y = args.y.f32() + begin;
  const int64_t x_stride = args.x.stride(0), y_stride = args.y.stride(0);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t first = args.sequences.begin(b), rows = args.sequences.end(b) - first;
    const bool fresh = args.sequences.cached_tokens(b) == 0;
    float* tail = args.tail.empty() ? nullptr : args.tail.row(args.slots.i32()[b]) + begin;
    const int64_t tail_stride = tail == nullptr ? 0 : args.tail.stride(1);
    // Input i of the sequence, counted from its first new row.
    const auto input = [&](int64_t i) -> const float* {
      return i >= 0 ? x + (first + i) * x_stride : fresh ? zeros : tail + (kept + i) * tail_stride;
    };
    for (int64_t j = 0; j < kept; ++j) window.push(input(j - kept));
    for (int64_t i = 0; i < rows; ++i) {
      window.push(input(i));
      float* to = y + (first + i) * y_stride;
      for_lanes(channels, [&](int64_t c, auto chunk) HWY_ATTR {
        const Lanes z = convolve<kTaps>(chunk, window.rows, w, channels, taps, c);
        chunk.store(mul(z, sigmoid(z)), to + c);
      });
    }
    // Ascending: entry j takes input rows - kept + j, which is a later entry of the old tail or a new row.
    for (int64_t j = 0; tail != nullptr && j < kept; ++j) {
      const float* from = input(rows - kept + j);
      float* to = tail + j * tail_stride;
      for_lanes(channels, [&](int64_t c, auto chunk) HWY_ATTR { chunk.store(chunk.load(from + c), to + c); });
    }
  }
}

void short_conv_channels(const ShortConv& args, int64_t begin, int64_t end, Worker& worker) {
  if (args.w.size(1) == 4) {
    forward_channels<4>(args, begin, end, worker);
  } else {
    forward_channels<0>(args, begin, end, worker);
  }
}

// With dz = dy silu'(z):  dx[i] = sum_j w[j] dz[i + (taps-1) - j],  dw[j] += sum_i dz[i] x[i - (taps-1) + j].
// dz lives in a ring of `taps` rows: row i of dx is complete as soon as dz[i + taps - 1] is known.
template <int kTaps>
void backward_channels(const ShortConvBackward& args, int64_t begin, int64_t end, Worker& worker) {
  const int64_t channels = end - begin, taps = args.w.size(1), kept = taps - 1;
  float* w = worker.scratch<float>(taps * channels);
  transpose_taps(args.w, begin, channels, w);
  float* zeros = worker.scratch<float>(channels);
  std::fill(zeros, zeros + channels, 0.0f);
  float* dw = worker.scratch<float>(taps * channels);
  std::fill(dw, dw + taps * channels, 0.0f);
  float* ring = worker.scratch<float>(taps * channels);
  const Window window{worker.scratch<const float*>(taps), taps};
  const Window slopes{worker.scratch<const float*>(taps), taps};  // dz of the last rows, oldest first
  const int64_t x_stride = args.x.stride(0), dy_stride = args.dy.stride(0), dx_stride = args.dx.stride(0);
  const int64_t count = kTaps > 0 ? kTaps : taps;
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t first = args.sequences.begin(b), rows = args.sequences.end(b) - first;
    for (int64_t j = 0; j < taps; ++j) {
      window.push(zeros);
      slopes.push(zeros);
    }
    for (int64_t i = 0; i < rows + kept; ++i) {
      if (i < rows) {
        window.push(args.x.f32() + (first + i) * x_stride + begin);
        const float* dy = args.dy.f32() + (first + i) * dy_stride + begin;
        float* dz = ring + i % taps * channels;
        for_lanes(channels, [&](int64_t c, auto chunk) HWY_ATTR {
          const Lanes z = convolve<kTaps>(chunk, window.rows, w, channels, taps, c);
          const Lanes s = sigmoid(z), one = broadcast(1.0f);
          const Lanes slope = mul(chunk.load(dy + c), mul(s, fma(z, sub(one, s), one)));
          chunk.store(slope, dz + c);
          for (int64_t j = 0; j < count; ++j) {
            float* sum = dw + j * channels + c;
            chunk.store(fma(slope, chunk.load(window.rows[j] + c), chunk.load(sum)), sum);
          }
        });
        slopes.push(dz);
      } else {
        slopes.push(zeros);
      }
      if (i < kept) continue;
      float* dx = args.dx.f32() + (first + i - kept) * dx_stride + begin;
      for_lanes(channels, [&](int64_t c, auto chunk) HWY_ATTR {
        Lanes sum = zero_lanes();
        for (int64_t j = count - 1; j >= 0; --j) {
          sum = fma(chunk.load(w + j * channels + c), chunk.load(slopes.rows[count - 1 - j] + c), sum);
        }
        chunk.store(sum, dx + c);
      });
    }
  }
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t j = 0; j < taps; ++j) args.dw.row(begin + c)[j] += dw[j * channels + c];
  }
}

void short_conv_backward_channels(const ShortConvBackward& args, int64_t begin, int64_t end, Worker& worker) {
  if (args.w.size(1) == 4) {
    backward_channels<4>(args, begin, end, worker);
  } else {
    backward_channels<0>(args, begin, end, worker);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(short_conv_channels);
HWY_EXPORT(short_conv_backward_channels);

namespace {

// Threads own channels, not rows: a window may reach into the old tail, which its owner then overwrites, and
// dw is a sum over rows. At least 128 channels, so that a row is read in pieces the prefetchers follow, and
// about 10 us of work.
int64_t channel_grain(int64_t tokens) { return std::max<int64_t>(128, 16384 / (tokens + 1) / 64 * 64); }

}  // namespace

void launch(const ShortConv& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = channel_grain(args.x.size(0));
  stream.parallel_for(args.x.size(1), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(short_conv_channels)(args, begin, end, worker);
  });
}

void launch(const ShortConvBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t grain = channel_grain(args.x.size(0));
  stream.parallel_for(args.x.size(1), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(short_conv_backward_channels)(args, begin, end, worker);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
