#include <cmath>
#include <vector>

#include "kernels/short_conv/short_conv.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// x[i, c] of sequence b, counted from its first new row; before that the tail, or zero. The tail is read as
// it was before the call: reference() updates it afterwards.
double input_at(const ShortConv& args, int64_t b, int64_t i, int64_t c) {
  if (i >= 0) return args.x.row(args.sequences.begin(b) + i)[c];
  if (args.sequences.cached_tokens(b) == 0) return 0.0;
  const int64_t kept = args.tail.size(1), slot = args.slots.i32()[b];
  return args.tail.row(slot)[(kept + i) * args.tail.stride(1) + c];
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

}  // namespace

absl::Status validate(const ShortConv& args) {
  const Operands op("short_conv");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  const int64_t tokens = args.x.size(0), channels = args.x.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {channels, -1}));
  RETURN_IF_ERROR(expect_that(op, args.w.size(1) >= 1, "w: expected at least one tap"));
  RETURN_IF_ERROR(expect_sequences(op, args.sequences, tokens));
  RETURN_IF_ERROR(expect_activation(op, "y", args.y, {tokens, channels}));
  RETURN_IF_ERROR(
      expect_that(op, args.tail.empty() == args.slots.empty(), "tail and slots: expected both or neither"));
  if (args.tail.empty()) {
    return expect_that(op, args.sequences.whole(), "tail: needed where a sequence has cached tokens");
  }
  RETURN_IF_ERROR(expect_tensor(op, "tail", args.tail, DType::kF32, {-1, args.w.size(1) - 1, channels}));
  return expect_slots(op, args.slots, args.sequences, args.tail.size(0));
}

absl::Status validate(const ShortConvBackward& args) {
  const Operands op("short_conv_backward");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  const int64_t tokens = args.x.size(0), channels = args.x.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {channels, -1}));
  RETURN_IF_ERROR(expect_that(op, args.w.size(1) >= 1, "w: expected at least one tap"));
  RETURN_IF_ERROR(expect_sequences(op, args.sequences, tokens));
  RETURN_IF_ERROR(expect_whole(op, args.sequences));
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {tokens, channels}));
  RETURN_IF_ERROR(expect_activation(op, "dx", args.dx, {tokens, channels}));
  return expect_tensor(op, "dw", args.dw, DType::kF32, {channels, args.w.size(1)});
}

void reference(const ShortConv& args) {
  CHECK_OK(validate(args));
  const int64_t channels = args.x.size(1), taps = args.w.size(1);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t begin = args.sequences.begin(b), rows = args.sequences.end(b) - begin;
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t i = 0; i < rows; ++i) {
        double z = 0.0;
        for (int64_t j = 0; j < taps; ++j) z += args.w.row(c)[j] * input_at(args, b, i - (taps - 1) + j, c);
        args.y.row(begin + i)[c] = static_cast<float>(z * sigmoid(z));
      }
      if (args.tail.empty()) continue;
      std::vector<double> last(static_cast<size_t>(taps - 1));
      for (int64_t j = 0; j < taps - 1; ++j) {
        last[static_cast<size_t>(j)] = input_at(args, b, rows - (taps - 1) + j, c);
      }
      for (int64_t j = 0; j < taps - 1; ++j) {
        args.tail.row(args.slots.i32()[b])[j * args.tail.stride(1) + c] =
            static_cast<float>(last[static_cast<size_t>(j)]);
      }
    }
  }
}

void reference(const ShortConvBackward& args) {
  CHECK_OK(validate(args));
  const int64_t channels = args.x.size(1), taps = args.w.size(1);
  for (int64_t c = 0; c < channels; ++c) {
    const float* w = args.w.row(c);
    std::vector<double> dw(static_cast<size_t>(taps), 0.0);
    for (int64_t b = 0; b < args.sequences.count(); ++b) {
      const int64_t begin = args.sequences.begin(b), rows = args.sequences.end(b) - begin;
      std::vector<double> dx(static_cast<size_t>(rows), 0.0);
      for (int64_t i = 0; i < rows; ++i) {
        const auto from = [&](int64_t j) { return i - (taps - 1) + j; };
        double z = 0.0;
        for (int64_t j = 0; j < taps; ++j)
          z += from(j) < 0 ? 0.0 : double{w[j]} * args.x.row(begin + from(j))[c];
        const double s = sigmoid(z);
        const double dz = args.dy.row(begin + i)[c] * s * (1.0 + z * (1.0 - s));
        for (int64_t j = 0; j < taps; ++j) {
          if (from(j) < 0) continue;
          dw[static_cast<size_t>(j)] += dz * args.x.row(begin + from(j))[c];
          dx[static_cast<size_t>(from(j))] += dz * w[j];
        }
      }
      for (int64_t i = 0; i < rows; ++i)
        args.dx.row(begin + i)[c] = static_cast<float>(dx[static_cast<size_t>(i)]);
    }
    for (int64_t j = 0; j < taps; ++j) args.dw.row(c)[j] += static_cast<float>(dw[static_cast<size_t>(j)]);
  }
}

}  // namespace slipstream::kernels
