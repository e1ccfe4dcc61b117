// Ragged batches and paged stores for the tests of operators that read them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/latent_rows/latent_row.h"
#include "kernels/sequences.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels::testing {

// A sequence's tokens in one call: those before it and those in it.
struct Length {
  int64_t cached, fresh;
};
Sequences make_sequences(TensorPool& pool, const std::vector<Length>& lengths);
// `count` sequences, all of this length.
Sequences even_sequences(TensorPool& pool, int64_t count, Length length);
// Sequences with this many new tokens each; `cached` is 0 where it names none.
Sequences sequences_of(TensorPool& pool, const std::vector<int32_t>& fresh, std::vector<int32_t> cached = {});

// Page numbers [count, columns] dealt to the sequences in turn.
Tensor pages_in_turn(TensorPool& pool, int64_t count, int64_t columns);

// Whole sequences of these lengths one after the other: the rows of tensors that calls take pieces of.
using Lengths = std::vector<int64_t>;
int64_t first_row(const Lengths& lengths, int64_t sequence);

// New tokens [begin, end) of one sequence in a call; what came before is cached.
struct Piece {
  int64_t sequence, begin, end;
};
std::vector<Piece> whole_sequences(const Lengths& lengths);
Sequences sequences_of_pieces(TensorPool& pool, const std::vector<Piece>& pieces);

// The new tokens' rows of `whole` [T, h, d], copied to `to` [t, h, d].
void copy_pieces(const Tensor& whole, const Lengths& lengths, const std::vector<Piece>& pieces, const Tensor& to);
// A store of the first `end` rows of each piece's sequence, taken from `rows` [T, W]. Pages are dealt out in an order given
// by `seed`; two are left over. Rows that no call may read are NaN.
PagedRows store_pieces(TensorPool& pool, const Tensor& rows, const Lengths& lengths, const std::vector<Piece>& pieces,
                       uint64_t seed);

// A store of the same rows in fp8, as LatentWrite keeps f32 or bf16 rows of rank + rope; and one of the values that such
// rows have, rounded to `dtype`. On the host; they share the page table.
PagedRows latent_store(TensorPool& pool, const PagedRows& plain, int64_t rank);
PagedRows restored_store(TensorPool& pool, const PagedRows& latents, const LatentRow& layout, DType dtype);

// The rows of `part`, a call's output, have the bits of the same tokens' rows in `whole`.
void expect_same_tokens(const Tensor& part, const Lengths& lengths, const std::vector<Piece>& pieces,
                        const Tensor& whole);

}  // namespace slipstream::kernels::testing
