// How a key row [c ; k_rope] of multi-head latent attention is stored in fp8: for each 128 values of c (the last group may
// be shorter) e4m3 codes and one scale; k_rope in bf16. Each part begins on 16 bytes:
//   rank codes | ceil(rank / 128) scales, f32 | rope bf16 values
// A row of 512 + 64 is 656 bytes. A value of c that is read is code * scale, rounded to the dtype of the activations that
// it meets. The scale is the largest magnitude / 448, of at least 2^-100 / 448, rounded to a bf16, so that the product is
// exact in f32 and one multiplication in bf16 gives the rounded one; code = e4m3(x * (1 / scale)). The scale of a group that
// has a NaN or an infinity is NaN, and so are all its values. PagedRows of such rows have a pool [pages, kPageRows, bytes]
// f8_e4m3.
#pragma once

#include <algorithm>

#include "kernels/e4m3.h"
#include "kernels/quantize/quantize.h"

namespace slipstream::kernels {

// Kernels take it by value.
struct LatentRow {
  int rank = 0, rope = 0;
  int scales = 0, ropes = 0, bytes = 0;  // offsets in bytes of the later parts; of a whole row

  int groups() const { return (rank + static_cast<int>(kScaleColumns) - 1) / static_cast<int>(kScaleColumns); }
};

inline LatentRow latent_row(int64_t rank, int64_t rope) {
  const auto whole = [](int64_t bytes) { return static_cast<int>((bytes + 15) / 16 * 16); };
  LatentRow row{.rank = static_cast<int>(rank), .rope = static_cast<int>(rope)};
  row.scales = whole(rank);
  row.ropes = row.scales + whole(4 * row.groups());
  row.bytes = row.ropes + whole(2 * rope);
  return row;
}

// On the host: stores a row of rank + rope values; reads values [begin, end) of a stored one.
void write_latent_row(const LatentRow& layout, float* values, e4m3* row);
inline void read_latent_row(const LatentRow& layout, const e4m3* row, int64_t begin, int64_t end, float* out) {
  const float* const scales = reinterpret_cast<const float*>(row + layout.scales);
  const bf16* const ropes = reinterpret_cast<const bf16*>(row + layout.ropes);
  const int64_t rank = layout.rank, codes_end = std::min(end, rank);
  for (int64_t i = begin; i < codes_end;) {
    const float scale = scales[i / kScaleColumns];
    const int64_t group_end = std::min((i / kScaleColumns + 1) * kScaleColumns, codes_end);
    for (; i < group_end; ++i) *out++ = to_f32(row[i]) * scale;
  }
  for (int64_t i = std::max(begin, rank); i < end; ++i) *out++ = to_f32(ropes[i - rank]);
}

}  // namespace slipstream::kernels
