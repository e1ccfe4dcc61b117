// How a ragged batch of sequences, and the rows they have stored so far, are described to operators.
#pragma once

#include "common/status.h"
#include "kernels/tensor.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

// B sequences over T rows: rows row_begin[b] .. row_begin[b+1] are new tokens of sequence b, and row r has
// position cached[b] + r - row_begin[b] in it. A sequence may have no rows.
// Kernels read the tensors on their device; host code (validation, sizes of grids) asks the functions.
struct Sequences {
  Tensor row_begin;  // [B+1] i32, ascending from 0 to T
  Tensor cached;     // [B] i32, tokens of the sequence that came before this batch
  // The same values in host memory. Absent on the CPU, where the tensors themselves are.
  Tensor host_row_begin = {}, host_cached = {};

  int64_t count() const { return cached.size(0); }
  int64_t rows() const { return begin(count()); }
  int64_t begin(int64_t b) const { return (host_row_begin.empty() ? row_begin : host_row_begin).i32()[b]; }
  int64_t end(int64_t b) const { return begin(b + 1); }
  int64_t cached_tokens(int64_t b) const { return (host_cached.empty() ? cached : host_cached).i32()[b]; }
  bool whole() const;  // no sequence has tokens before this batch
};

// Rows a page of any paged store holds. A whole number of KDA chunks, so that where a page ends a chunk ends.
constexpr int64_t kPageRows = 64;

// Rows of W values that belong to growing sequences, kept in pages of one pool:
// row p of sequence b is pool[page_table[b, p / kPageRows], p % kPageRows].
struct PagedRows {
  Tensor pool;        // [pages, kPageRows, W] f32 or bf16; latents in fp8 as bytes (latent_rows/latent_row.h)
  Tensor page_table;  // [B, pages of the longest sequence] i32; unused entries are -1

  int64_t width() const { return pool.size(2); }
  // Offset in elements of row p of sequence b from the start of the pool.
  int64_t offset(int64_t b, int64_t p) const {
    const int64_t page = page_table.i32()[b * page_table.stride(0) + p / kPageRows];
    return page * pool.stride(0) + p % kPageRows * pool.stride(1);
  }
};

// InvalidArgument unless row_begin ascends from 0 to `rows` over cached.size(0) sequences.
absl::Status expect_sequences(const Operands& op, const Sequences& sequences, int64_t rows);
// InvalidArgument unless sequences.whole().
absl::Status expect_whole(const Operands& op, const Sequences& sequences);
// InvalidArgument unless `slots` [B] i32 gives each sequence a slot of its own in 0..slot_count-1.
absl::Status expect_slots(const Operands& op, const Tensor& slots, const Sequences& sequences,
                          int64_t slot_count);
// InvalidArgument unless the pool has this width and the table has a page for every row that `sequences` reaches
// (positions 0 .. cached + new - 1, divided by `tokens_per_row` for stores that keep one row per several tokens). The
// pages themselves are looked at where the host can read them.
absl::Status expect_paged(const Operands& op, const char* name, const PagedRows& rows, const Sequences& sequences,
                          int64_t width, int64_t tokens_per_row = 1);
// What of that does not depend on what the rows hold.
absl::Status expect_pages(const Operands& op, const PagedRows& rows, const Sequences& sequences, int64_t tokens_per_row = 1);

}  // namespace slipstream::kernels
