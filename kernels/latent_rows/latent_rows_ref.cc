#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/latent_rows/latent_rows.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status expect_latent_rows(const Operands& op, const char* name, const PagedRows& store, const Sequences& sequences,
                                const LatentRow& row) {
  RETURN_IF_ERROR(expect_tensor(op, name, store.pool, DType::kF8E4M3, {-1, kPageRows, row.bytes}));
  const bool aligned = reinterpret_cast<uintptr_t>(store.pool.raw()) % 16 == 0 && store.pool.stride(0) % 16 == 0 &&
                       store.pool.stride(1) % 16 == 0;
  RETURN_IF_ERROR(expect_that(op, aligned, "rows of fp8 latents must begin on 16 bytes"));
  return expect_pages(op, store, sequences);
}

absl::Status validate(const LatentWrite& args) {
  const Operands op("latent_write");
  RETURN_IF_ERROR(expect_activation(op, "rows", args.rows, {-1, -1}));
  RETURN_IF_ERROR(expect_sequences(op, args.sequences, args.rows.size(0)));
  const int64_t rope = args.rows.size(1) - args.rank;
  RETURN_IF_ERROR(expect_that(op, args.rank >= 1 && rope >= 0, "rank must be in 1..W"));
  return expect_latent_rows(op, "store", args.store, args.sequences, latent_row(args.rank, rope));
}

void write_latent_row(const LatentRow& layout, float* values, e4m3* row) {
  float* const scales = reinterpret_cast<float*>(row + layout.scales);
  for (int64_t group = 0; group < layout.groups(); ++group) {
    const int64_t begin = group * kScaleColumns, end = std::min<int64_t>(begin + kScaleColumns, layout.rank);
    float largest = 0x1p-100f;
    for (int64_t i = begin; i < end; ++i) {
      if (!(std::abs(values[i]) <= largest)) largest = std::isfinite(values[i]) ? std::abs(values[i]) : INFINITY;
    }
    const float scale = to_f32(to_bf16(largest / kE4m3Largest)), inverse = 1.0f / scale;
    for (int64_t i = begin; i < end; ++i) row[i] = to_e4m3(values[i] * inverse);
    scales[group] = std::isfinite(largest) ? scale : std::numeric_limits<float>::quiet_NaN();
  }
  bf16* const ropes = reinterpret_cast<bf16*>(row + layout.ropes);
  for (int64_t i = 0; i < layout.rope; ++i) ropes[i] = to_bf16(values[layout.rank + i]);
}

void reference(const LatentWrite& args) {
  CHECK_OK(validate(args));
  const Sequences& sequences = args.sequences;
  const LatentRow layout = latent_row(args.rank, args.rows.size(1) - args.rank);
  for (int64_t b = 0; b < sequences.count(); ++b) {
    for (int64_t r = sequences.begin(b); r < sequences.end(b); ++r) {
      const int64_t position = sequences.cached_tokens(b) + r - sequences.begin(b);
      write_latent_row(layout, args.rows.row(r), args.store.pool.data<e4m3>() + args.store.offset(b, position));
    }
  }
}

}  // namespace slipstream::kernels
