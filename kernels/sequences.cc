#include "kernels/sequences.h"

#include <vector>

namespace slipstream::kernels {

absl::Status expect_sequences(const Operands& op, const Sequences& sequences, int64_t rows) {
  RETURN_IF_ERROR(expect_tensor(op, "cached", sequences.cached, DType::kI32, {-1}));
  const int64_t count = sequences.count();
  RETURN_IF_ERROR(expect_tensor(op, "row_begin", sequences.row_begin, DType::kI32, {count + 1}));
  if (!on_host(sequences.cached)) {
    RETURN_IF_ERROR(expect_tensor(Operands(op.op()), "host_cached", sequences.host_cached, DType::kI32, {count}));
    RETURN_IF_ERROR(expect_tensor(Operands(op.op()), "host_row_begin", sequences.host_row_begin, DType::kI32, {count + 1}));
  }
  bool ascending = sequences.begin(0) == 0;
  for (int64_t b = 0; b < count; ++b) {
    ascending = ascending && sequences.begin(b) <= sequences.end(b) && sequences.cached_tokens(b) >= 0;
  }
  return expect_that(op, ascending && sequences.rows() == rows, "row_begin must ascend from 0 to the number of rows");
}

bool Sequences::whole() const {
  bool all = true;
  for (int64_t b = 0; b < count(); ++b) all = all && cached_tokens(b) == 0;
  return all;
}

absl::Status expect_whole(const Operands& op, const Sequences& sequences) {
  return expect_that(op, sequences.whole(), "every sequence must be whole: cached == 0");
}

absl::Status expect_slots(const Operands& op, const Tensor& slots, const Sequences& sequences,
                          int64_t slot_count) {
  RETURN_IF_ERROR(expect_tensor(op, "slots", slots, DType::kI32, {sequences.count()}));
  if (!on_host(slots)) return absl::OkStatus();
  std::vector<bool> used(static_cast<size_t>(slot_count), false);
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const int32_t slot = slots.i32()[b];
    RETURN_IF_ERROR(expect_that(op, slot >= 0 && slot < slot_count, "slots: slot out of range"));
    RETURN_IF_ERROR(expect_that(op, !used[static_cast<size_t>(slot)], "slots: two sequences in one slot"));
    used[static_cast<size_t>(slot)] = true;
  }
  return absl::OkStatus();
}

absl::Status expect_paged(const Operands& op, const char* name, const PagedRows& rows, const Sequences& sequences,
                          int64_t width, int64_t tokens_per_row) {
  RETURN_IF_ERROR(expect_weight(op, name, rows.pool, {-1, kPageRows, width}));
  return expect_pages(op, rows, sequences, tokens_per_row);
}

absl::Status expect_pages(const Operands& op, const PagedRows& rows, const Sequences& sequences, int64_t tokens_per_row) {
  RETURN_IF_ERROR(expect_tensor(op, "page_table", rows.page_table, DType::kI32, {sequences.count(), -1}));
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const int64_t tokens = sequences.cached_tokens(b) + sequences.end(b) - sequences.begin(b);
    const int64_t pages = (tokens / tokens_per_row + kPageRows - 1) / kPageRows;
    RETURN_IF_ERROR(expect_that(op, pages <= rows.page_table.size(1), "page_table: too few pages for a sequence"));
    for (int64_t i = 0; i < pages && on_host(rows.page_table); ++i) {
      const int32_t page = rows.page_table.i32()[b * rows.page_table.stride(0) + i];
      RETURN_IF_ERROR(expect_that(op, page >= 0 && page < rows.pool.size(0), "page_table: page out of range"));
    }
  }
  return absl::OkStatus();
}

}  // namespace slipstream::kernels
