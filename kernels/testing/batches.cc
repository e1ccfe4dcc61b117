#include "kernels/testing/batches.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "kernels/copy/copy.h"

namespace slipstream::kernels::testing {

Sequences make_sequences(TensorPool& pool, const std::vector<Length>& lengths) {
  std::vector<int32_t> begin = {0}, cached;
  for (const Length& length : lengths) {
    begin.push_back(begin.back() + static_cast<int32_t>(length.fresh));
    cached.push_back(static_cast<int32_t>(length.cached));
  }
  const int64_t count = static_cast<int64_t>(lengths.size());
  return {.row_begin = pool.ints({count + 1}, begin), .cached = pool.ints({count}, cached)};
}

Sequences even_sequences(TensorPool& pool, int64_t count, Length length) {
  return make_sequences(pool, std::vector<Length>(static_cast<size_t>(count), length));
}

Sequences sequences_of(TensorPool& pool, const std::vector<int32_t>& fresh, std::vector<int32_t> cached) {
  cached.resize(fresh.size(), 0);
  std::vector<Length> lengths;
  for (size_t b = 0; b < fresh.size(); ++b) lengths.push_back({cached[b], fresh[b]});
  return make_sequences(pool, lengths);
}

Sequences sequences_of_pieces(TensorPool& pool, const std::vector<Piece>& pieces) {
  std::vector<Length> lengths;
  for (const Piece& piece : pieces) lengths.push_back({piece.begin, piece.end - piece.begin});
  return make_sequences(pool, lengths);
}

Tensor pages_in_turn(TensorPool& pool, int64_t count, int64_t columns) {
  std::vector<int32_t> table;
  for (int64_t i = 0; i < count * columns; ++i) {
    table.push_back(static_cast<int32_t>(i % columns * count + i / columns));
  }
  return pool.ints({count, columns}, table);
}

int64_t first_row(const Lengths& lengths, int64_t sequence) {
  return std::accumulate(lengths.begin(), lengths.begin() + sequence, int64_t{0});
}

std::vector<Piece> whole_sequences(const Lengths& lengths) {
  std::vector<Piece> pieces;
  for (size_t b = 0; b < lengths.size(); ++b) pieces.push_back({static_cast<int64_t>(b), 0, lengths[b]});
  return pieces;
}

void copy_pieces(const Tensor& whole, const Lengths& lengths, const std::vector<Piece>& pieces, const Tensor& to) {
  int64_t row = 0;
  for (const Piece& piece : pieces) {
    const int64_t from = first_row(lengths, piece.sequence), count = piece.end - piece.begin;
    reference(Copy{whole.slice(0, from + piece.begin, from + piece.end), to.slice(0, row, row + count)});
    row += count;
  }
}

PagedRows store_pieces(TensorPool& pool, const Tensor& rows, const Lengths& lengths, const std::vector<Piece>& pieces,
                       uint64_t seed) {
  int64_t pages = 0, columns = 0;
  for (const Piece& piece : pieces) {
    const int64_t count = (piece.end + kPageRows - 1) / kPageRows;
    pages += count;
    columns = std::max(columns, count);
  }
  std::vector<int32_t> order(static_cast<size_t>(pages + 2));
  std::iota(order.begin(), order.end(), 0);
  TensorPool dice(seed);
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[static_cast<size_t>(dice.uniform() * static_cast<float>(i))]);
  }
  const int64_t count = static_cast<int64_t>(pieces.size());
  const std::vector<int32_t> unused(static_cast<size_t>(count * columns), -1);
  PagedRows store{.pool = pool.output(rows.dtype(), {pages + 2, kPageRows, rows.size(1)}),
                  .page_table = pool.ints({count, columns}, unused)};
  const int64_t size = size_of(rows.dtype()), bytes = rows.size(1) * size;
  size_t next_page = 0;
  for (int64_t b = 0; b < count; ++b) {
    const Piece& piece = pieces[static_cast<size_t>(b)];
    const char* from = static_cast<const char*>(rows.raw()) + first_row(lengths, piece.sequence) * bytes;
    for (int64_t p = 0; p < piece.end; ++p) {
      if (p % kPageRows == 0) store.page_table.i32()[b * columns + p / kPageRows] = order[next_page++];
      std::memcpy(static_cast<char*>(store.pool.raw()) + store.offset(b, p) * size, from + p * bytes,
                  static_cast<size_t>(bytes));
    }
  }
  return store;
}

PagedRows latent_store(TensorPool& pool, const PagedRows& plain, int64_t rank) {
  const LatentRow layout = latent_row(rank, plain.width() - rank);
  const int64_t rows = plain.pool.size(0) * kPageRows;
  const Tensor values = pool.zeros(DType::kF32, {rows, plain.width()});
  for (int64_t i = 0; i < values.numel(); ++i) {
    values.f32()[i] = plain.pool.dtype() == DType::kBf16 ? to_f32(plain.pool.bf()[i]) : plain.pool.f32()[i];
  }
  const PagedRows out{.pool = pool.output(DType::kF8E4M3, {plain.pool.size(0), kPageRows, layout.bytes}),
                      .page_table = plain.page_table};
  for (int64_t r = 0; r < rows; ++r) write_latent_row(layout, values.row(r), out.pool.data<e4m3>() + r * layout.bytes);
  return out;
}

PagedRows restored_store(TensorPool& pool, const PagedRows& latents, const LatentRow& layout, DType dtype) {
  const int64_t width = layout.rank + layout.rope, rows = latents.pool.size(0) * kPageRows;
  const Tensor values = pool.zeros(DType::kF32, {rows, width});
  for (int64_t r = 0; r < rows; ++r) {
    read_latent_row(layout, latents.pool.data<e4m3>() + r * layout.bytes, 0, width, values.row(r));
  }
  const PagedRows out{.pool = pool.output(dtype, {latents.pool.size(0), kPageRows, width}), .page_table = latents.page_table};
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (dtype == DType::kBf16) {
      out.pool.bf()[i] = to_bf16(values.f32()[i]);
    } else {
      out.pool.f32()[i] = values.f32()[i];
    }
  }
  return out;
}

void expect_same_tokens(const Tensor& part, const Lengths& lengths, const std::vector<Piece>& pieces,
                        const Tensor& whole) {
  int64_t row = 0;
  for (const Piece& piece : pieces) {
    const int64_t from = first_row(lengths, piece.sequence), count = piece.end - piece.begin;
    expect_same_bits(part.slice(0, row, row + count), whole.slice(0, from + piece.begin, from + piece.end));
    row += count;
  }
}

}  // namespace slipstream::kernels::testing
