#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/mhc/mhc.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kStreamsMax = 8;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

absl::Status expect_streams(const Operands& op, const char* name, const Tensor& x) {
  RETURN_IF_ERROR(expect_activation(op, name, x, {-1, -1, -1}));
  RETURN_IF_ERROR(expect_that(op, x.size(1) >= 1 && x.size(1) <= kStreamsMax, "streams must be in 1..8"));
  return expect_that(op, x.size(2) >= 1, "the width of a stream must be >= 1");
}

// What MhcMix and its backward both read.
template <class Args>
absl::Status expect_mix(const Operands& op, const Args& args) {
  RETURN_IF_ERROR(expect_streams(op, "x", args.x));
  const int64_t tokens = args.x.size(0), n = args.x.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "zr", args.zr, DType::kF32, {tokens, (2 + n) * n}));
  RETURN_IF_ERROR(expect_tensor(op, "base", args.base, DType::kF32, {(2 + n) * n}));
  RETURN_IF_ERROR(expect_tensor(op, "scale", args.scale, DType::kF32, {3}));
  RETURN_IF_ERROR(expect_that(op, args.eps > 0.0f, "eps must be > 0"));
  RETURN_IF_ERROR(expect_that(op, args.iterations >= 1, "iterations must be >= 1"));
  return expect_tensor(op, "inv_rms", args.inv_rms, DType::kF32, {tokens});
}

// What MhcMerge and its backward both read.
template <class Args>
absl::Status expect_merge(const Operands& op, const Args& args) {
  RETURN_IF_ERROR(expect_streams(op, "x", args.x));
  const int64_t tokens = args.x.size(0), n = args.x.size(1), width = args.x.size(2);
  RETURN_IF_ERROR(expect_activation(op, "y", args.y, {tokens, width}));
  RETURN_IF_ERROR(expect_tensor(op, "post", args.post, DType::kF32, {tokens, n}));
  return expect_tensor(op, "comb", args.comb, DType::kF32, {tokens, n, n});
}

float& element(const Tensor& matrices, int64_t t, int64_t i, int64_t j) {
  return matrices.row(t, i)[j];
}

// The part of z that column e belongs to: 0 pre, 1 post, 2 comb.
int64_t part_of(int64_t e, int64_t n) { return std::min<int64_t>(e / n, 2); }

using Matrix = std::vector<double>;  // n x n, row-major

// Where element b of row (or column) a is.
size_t element_of(int64_t a, int64_t b, int64_t n, bool rows) {
  return static_cast<size_t>(rows ? a * n + b : b * n + a);
}

// Divides each row (or column) by its sum + eps; returns the divisors.
std::vector<double> normalize(Matrix& m, int64_t n, double eps, bool rows) {
  std::vector<double> divisors;
  for (int64_t a = 0; a < n; ++a) {
    double sum = eps;
    for (int64_t b = 0; b < n; ++b) sum += m[element_of(a, b, n, rows)];
    for (int64_t b = 0; b < n; ++b) m[element_of(a, b, n, rows)] /= sum;
    divisors.push_back(sum);
  }
  return divisors;
}

void normalize_backward(const Matrix& normalized, const std::vector<double>& divisors, int64_t n, bool rows,
                        Matrix& d) {
  for (int64_t a = 0; a < n; ++a) {
    double dot = 0.0;
    for (int64_t b = 0; b < n; ++b) {
      const size_t at = element_of(a, b, n, rows);
      dot += d[at] * normalized[at];
    }
    for (int64_t b = 0; b < n; ++b) {
      double& value = d[element_of(a, b, n, rows)];
      value = (value - dot) / divisors[static_cast<size_t>(a)];
    }
  }
}

// Every matrix the iterations pass through: the softmax, then the result of each normalisation, columns
// first.
struct Sinkhorn {
  Matrix softmax;
  std::vector<Matrix> normalized;
  std::vector<std::vector<double>> divisors;
};

Sinkhorn sinkhorn(const Matrix& logits, int64_t n, double eps, int64_t iterations) {
  Sinkhorn result;
  Matrix m = logits;
  for (int64_t i = 0; i < n; ++i) {
    double* row = m.data() + i * n;
    const double largest = *std::max_element(row, row + n);
    double sum = 0.0;
    for (int64_t j = 0; j < n; ++j) sum += std::exp(row[j] - largest);
    for (int64_t j = 0; j < n; ++j) row[j] = std::exp(row[j] - largest) / sum;
  }
  result.softmax = m;
  for (double& value : m) value += eps;
  for (int64_t step = 0; step < 2 * iterations - 1; ++step) {
    result.divisors.push_back(normalize(m, n, eps, /*rows=*/step % 2 == 1));
    result.normalized.push_back(m);
  }
  return result;
}

// The gradient of the logits from that of the result.
Matrix sinkhorn_backward(const Sinkhorn& forward, int64_t n, Matrix d) {
  for (size_t step = forward.normalized.size(); step-- > 0;) {
    normalize_backward(forward.normalized[step], forward.divisors[step], n, /*rows=*/step % 2 == 1, d);
  }
  const std::vector<double> ones(static_cast<size_t>(n), 1.0);
  normalize_backward(forward.softmax, ones, n, /*rows=*/true, d);
  for (size_t at = 0; at < d.size(); ++at) d[at] *= forward.softmax[at];
  return d;
}

// The logits of one token: z scale + base, [(2+n)n].
template <class Args>
std::vector<double> logits_of(const Args& args, int64_t t, double inv_rms) {
  const int64_t n = args.x.size(1);
  std::vector<double> logits;
  for (int64_t e = 0; e < (2 + n) * n; ++e) {
    logits.push_back(args.zr.row(t)[e] * inv_rms * args.scale.f32()[part_of(e, n)] + args.base.f32()[e]);
  }
  return logits;
}

Matrix comb_of(const std::vector<double>& logits, int64_t n) {
  return Matrix(logits.begin() + 2 * n, logits.end());
}

}  // namespace

absl::Status validate(const MhcMix& args) {
  const Operands op("mhc_mix");
  RETURN_IF_ERROR(expect_mix(op, args));
  const int64_t tokens = args.x.size(0), n = args.x.size(1), width = args.x.size(2);
  RETURN_IF_ERROR(expect_that(op, args.norm_eps > 0.0f, "norm_eps must be > 0"));
  RETURN_IF_ERROR(expect_tensor(op, "post", args.post, DType::kF32, {tokens, n}));
  RETURN_IF_ERROR(expect_tensor(op, "comb", args.comb, DType::kF32, {tokens, n, n}));
  RETURN_IF_ERROR(expect_activation(op, "u", args.u, {tokens, width}));
  if (!args.w.empty()) RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {width}));
  if (!args.y.empty() || !args.w.empty() || !args.u_inv.empty()) RETURN_IF_ERROR(expect_activation(op, "y", args.y, {tokens, width}));
  if (!args.u_inv.empty()) RETURN_IF_ERROR(expect_tensor(op, "u_inv", args.u_inv, DType::kF32, {tokens}));
  return absl::OkStatus();
}

absl::Status validate(const MhcMixBackward& args) {
  const Operands op("mhc_mix_backward");
  RETURN_IF_ERROR(expect_mix(op, args));
  const int64_t tokens = args.x.size(0), n = args.x.size(1), width = args.x.size(2);
  RETURN_IF_ERROR(expect_activation(op, "du", args.du, {tokens, width}));
  RETURN_IF_ERROR(expect_tensor(op, "dpost", args.dpost, DType::kF32, {tokens, n}));
  RETURN_IF_ERROR(expect_tensor(op, "dcomb", args.dcomb, DType::kF32, {tokens, n, n}));
  RETURN_IF_ERROR(expect_activation(op, "dx", args.dx, {tokens, n, width}));
  RETURN_IF_ERROR(expect_tensor(op, "dzr", args.dzr, DType::kF32, {tokens, (2 + n) * n}));
  RETURN_IF_ERROR(expect_supported(op, on_host(args.x) || args.iterations <= kMhcIterationsCuda,
                                   "more than 200 iterations on CUDA"));
  RETURN_IF_ERROR(expect_tensor(op, "dbase", args.dbase, DType::kF32, {(2 + n) * n}));
  return expect_tensor(op, "dscale", args.dscale, DType::kF32, {3});
}

absl::Status validate(const MhcMerge& args) {
  const Operands op("mhc_merge");
  RETURN_IF_ERROR(expect_merge(op, args));
  const int64_t tokens = args.x.size(0), n = args.x.size(1), width = args.x.size(2);
  return expect_activation(op, "out", args.out, {tokens, n, width});
}

absl::Status validate(const MhcMergeBackward& args) {
  const Operands op("mhc_merge_backward");
  RETURN_IF_ERROR(expect_merge(op, args));
  const int64_t tokens = args.x.size(0), n = args.x.size(1), width = args.x.size(2);
  RETURN_IF_ERROR(expect_activation(op, "dout", args.dout, {tokens, n, width}));
  RETURN_IF_ERROR(expect_activation(op, "dx", args.dx, {tokens, n, width}));
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {tokens, width}));
  RETURN_IF_ERROR(expect_tensor(op, "dpost", args.dpost, DType::kF32, {tokens, n}));
  return expect_tensor(op, "dcomb", args.dcomb, DType::kF32, {tokens, n, n});
}

absl::Status validate(const MhcExpand& args) {
  const Operands op("mhc_expand");
  RETURN_IF_ERROR(expect_streams(op, "out", args.out));
  return expect_activation(op, "x", args.x, {args.out.size(0), args.out.size(2)});
}

absl::Status validate(const MhcMean& args) {
  const Operands op("mhc_mean");
  RETURN_IF_ERROR(expect_streams(op, "x", args.x));
  return expect_activation(op, "out", args.out, {args.x.size(0), args.x.size(2)});
}

absl::Status validate(const MhcExpandBackward& args) {
  const Operands op("mhc_expand_backward");
  RETURN_IF_ERROR(expect_streams(op, "dout", args.dout));
  return expect_activation(op, "dx", args.dx, {args.dout.size(0), args.dout.size(2)});
}

absl::Status validate(const MhcMeanBackward& args) {
  const Operands op("mhc_mean_backward");
  RETURN_IF_ERROR(expect_streams(op, "dx", args.dx));
  return expect_activation(op, "dout", args.dout, {args.dx.size(0), args.dx.size(2)});
}

void reference(const MhcMix& args) {
  CHECK_OK(validate(args));
  const int64_t n = args.x.size(1), width = args.x.size(2);
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    double square_sum = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t h = 0; h < width; ++h)
        square_sum += double{args.x.row(t, i)[h]} * args.x.row(t, i)[h];
    }
    const double inv_rms = 1.0 / std::sqrt(square_sum / static_cast<double>(n * width) + args.norm_eps);
    args.inv_rms.f32()[t] = static_cast<float>(inv_rms);
    const std::vector<double> logits = logits_of(args, t, inv_rms);
    for (int64_t h = 0; h < width; ++h) {
      double u = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        u += (sigmoid(logits[static_cast<size_t>(i)]) + args.eps) * args.x.row(t, i)[h];
      }
      args.u.row(t)[h] = static_cast<float>(u);
    }
    const Matrix comb = sinkhorn(comb_of(logits, n), n, args.eps, args.iterations).normalized.back();
    for (int64_t i = 0; i < n; ++i) {
      args.post.row(t)[i] = static_cast<float>(2.0 * sigmoid(logits[static_cast<size_t>(n + i)]));
      for (int64_t j = 0; j < n; ++j) {
        element(args.comb, t, i, j) = static_cast<float>(comb[static_cast<size_t>(i * n + j)]);
      }
    }
  }
  if (!args.y.empty()) reference(RmsNorm{.x = args.u, .w = args.w, .y = args.y, .inv_rms = args.u_inv, .eps = args.norm_eps});
}

void reference(const MhcMixBackward& args) {
  CHECK_OK(validate(args));
  const int64_t n = args.x.size(1), width = args.x.size(2), columns = (2 + n) * n;
  std::vector<double> dbase(static_cast<size_t>(columns), 0.0), dscale(3, 0.0);
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    const double inv_rms = args.inv_rms.f32()[t];
    const std::vector<double> logits = logits_of(args, t, inv_rms);
    std::vector<double> dlogits;
    for (int64_t i = 0; i < n; ++i) {
      double dpre = 0.0;
      for (int64_t h = 0; h < width; ++h) dpre += double{args.du.row(t)[h]} * args.x.row(t, i)[h];
      const double pre = sigmoid(logits[static_cast<size_t>(i)]);
      dlogits.push_back(dpre * pre * (1.0 - pre));
    }
    for (int64_t i = 0; i < n; ++i) {
      const double half_post = sigmoid(logits[static_cast<size_t>(n + i)]);
      dlogits.push_back(2.0 * args.dpost.row(t)[i] * half_post * (1.0 - half_post));
    }
    Matrix dcomb;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) dcomb.push_back(element(args.dcomb, t, i, j));
    }
    const Sinkhorn forward = sinkhorn(comb_of(logits, n), n, args.eps, args.iterations);
    for (const double d : sinkhorn_backward(forward, n, dcomb)) dlogits.push_back(d);

    double dinv_rms = 0.0;
    for (int64_t e = 0; e < columns; ++e) {
      const double d = dlogits[static_cast<size_t>(e)], zr = args.zr.row(t)[e];
      const int64_t part = part_of(e, n);
      const double dz = d * args.scale.f32()[part];
      dbase[static_cast<size_t>(e)] += d;
      dscale[static_cast<size_t>(part)] += d * zr * inv_rms;
      dinv_rms += dz * zr;
      args.dzr.row(t)[e] = static_cast<float>(dz * inv_rms);
    }
    // d inv_rms / d x = -inv_rms^3 x / (n H).
    const double along_x = -dinv_rms * inv_rms * inv_rms * inv_rms / static_cast<double>(n * width);
    for (int64_t i = 0; i < n; ++i) {
      const double pre = sigmoid(logits[static_cast<size_t>(i)]) + args.eps;
      for (int64_t h = 0; h < width; ++h) {
        float& dx = args.dx.row(t, i)[h];
        dx = static_cast<float>(dx + pre * args.du.row(t)[h] + along_x * args.x.row(t, i)[h]);
      }
    }
  }
  for (int64_t e = 0; e < columns; ++e)
    args.dbase.f32()[e] += static_cast<float>(dbase[static_cast<size_t>(e)]);
  for (int64_t p = 0; p < 3; ++p) args.dscale.f32()[p] += static_cast<float>(dscale[static_cast<size_t>(p)]);
}

void reference(const MhcMerge& args) {
  CHECK_OK(validate(args));
  const int64_t n = args.x.size(1);
  std::vector<double> out(static_cast<size_t>(n));  // of one column: out may be x
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    for (int64_t h = 0; h < args.x.size(2); ++h) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = double{args.post.row(t)[j]} * args.y.row(t)[h];
        for (int64_t i = 0; i < n; ++i)
          sum += double{element(args.comb, t, i, j)} * args.x.row(t, i)[h];
        out[static_cast<size_t>(j)] = sum;
      }
      for (int64_t j = 0; j < n; ++j)
        args.out.row(t, j)[h] = static_cast<float>(out[static_cast<size_t>(j)]);
    }
  }
}

void reference(const MhcMergeBackward& args) {
  CHECK_OK(validate(args));
  const int64_t n = args.x.size(1), width = args.x.size(2);
  std::vector<double> dout(static_cast<size_t>(n));  // of one column: dx may be dout
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    for (int64_t j = 0; j < n; ++j) {
      double dpost = 0.0;
      for (int64_t h = 0; h < width; ++h) dpost += double{args.dout.row(t, j)[h]} * args.y.row(t)[h];
      args.dpost.row(t)[j] = static_cast<float>(dpost);
      for (int64_t i = 0; i < n; ++i) {
        double dcomb = 0.0;
        for (int64_t h = 0; h < width; ++h) {
          dcomb += double{args.dout.row(t, j)[h]} * args.x.row(t, i)[h];
        }
        element(args.dcomb, t, i, j) = static_cast<float>(dcomb);
      }
    }
    for (int64_t h = 0; h < width; ++h) {
      double dy = 0.0;
      for (int64_t j = 0; j < n; ++j) dout[static_cast<size_t>(j)] = args.dout.row(t, j)[h];
      for (int64_t j = 0; j < n; ++j) dy += args.post.row(t)[j] * dout[static_cast<size_t>(j)];
      args.dy.row(t)[h] = static_cast<float>(dy);
      for (int64_t i = 0; i < n; ++i) {
        double dx = 0.0;
        for (int64_t j = 0; j < n; ++j) dx += element(args.comb, t, i, j) * dout[static_cast<size_t>(j)];
        args.dx.row(t, i)[h] = static_cast<float>(dx);
      }
    }
  }
}

void reference(const MhcExpand& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.out.size(0); ++t) {
    for (int64_t i = 0; i < args.out.size(1); ++i) {
      for (int64_t h = 0; h < args.out.size(2); ++h) args.out.row(t, i)[h] = args.x.row(t)[h];
    }
  }
}

void reference(const MhcMean& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    for (int64_t h = 0; h < args.x.size(2); ++h) {
      double sum = 0.0;
      for (int64_t i = 0; i < args.x.size(1); ++i) sum += args.x.row(t, i)[h];
      args.out.row(t)[h] = static_cast<float>(sum / static_cast<double>(args.x.size(1)));
    }
  }
}

void reference(const MhcExpandBackward& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.dout.size(0); ++t) {
    for (int64_t h = 0; h < args.dout.size(2); ++h) {
      double sum = 0.0;
      for (int64_t i = 0; i < args.dout.size(1); ++i) sum += args.dout.row(t, i)[h];
      args.dx.row(t)[h] = static_cast<float>(sum);
    }
  }
}

void reference(const MhcMeanBackward& args) {
  CHECK_OK(validate(args));
  for (int64_t t = 0; t < args.dx.size(0); ++t) {
    for (int64_t i = 0; i < args.dx.size(1); ++i) {
      for (int64_t h = 0; h < args.dx.size(2); ++h) {
        args.dx.row(t, i)[h] = args.dout.row(t)[h] / static_cast<float>(args.dx.size(1));
      }
    }
  }
}

}  // namespace slipstream::kernels
