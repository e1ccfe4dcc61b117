// The DSA lightning indexer: which earlier positions a query attends to. DeepSeek-V3.2 2025, arXiv:2512.02556;
// model-spec section 4.
//   I(t, s) = sum over j, ascending, of weights[t, j] * relu(q[t, j] · k[s] * key_scale)
// in fp32: both sums are single chains of fused multiply-adds that start at zero, the product over ascending channels.
// On CUDA q, dq and dkeys are f32 or bf16. With bf16 queries and keys of 32 heads and 128 channels, tensor
// cores add in another order, of which a row's bits depend on nothing else either.
#pragma once

#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// A key row stands for `pool` = P tokens: row p for pP .. pP+P-1 (P = 1: the token itself). It is a candidate of query
// t once its last token is <= t, so there are n = (t + 1) / P, rounded down, of them. The topk / P largest scores are
// selected, all rows while n <= topk / P (nothing is scored then), and expanded to their positions. The order is total:
// equal scores (0 equals -0) go to the lower row, NaN comes after every number. With `tail` the positions nP .. t of
// the query's incomplete pool are appended; without it a query sees none of them, and none at all while t + 1 < P.
struct IndexerSelect {
  Tensor q;             // in   [T, Hi, Di] f32
  Tensor weights;       // in   [T, Hi] f32
  PagedRows keys;       // in   one row of Di a token, or a pool; rows of this batch are already written
  Sequences sequences;  // T rows
  int64_t topk;         // index_topk, a multiple of pool
  int64_t pool = 1;     // index_kpool
  bool tail = false;    // index_kpool_always_select_tail
  float key_scale;      // > 0, so it may stand inside the relu: (Hi Di)^-1/2
  Tensor indices;       // out  [T, W] i32 with W >= selection_width(): selected positions, ascending, then -1
  Tensor counts;        // out  [T] i32
};

// What the CUDA form takes: heads Hi and channels Di.
constexpr int64_t kIndexerHeadsCuda = 64, kIndexerWidthCuda = 256;

// topk, plus pool - 1 with a tail; never more than `longest`, the tokens of the longest sequence (cached + new).
int64_t selection_width(int64_t topk, int64_t pool, bool tail, int64_t longest);

// I(t, s) for given positions or pools: what the indexer's own loss (model-spec 9) differentiates. The bits are those
// that IndexerSelect ranks.
struct IndexerScores {
  Tensor q;             // in   [T, Hi, Di] f32
  Tensor weights;       // in   [T, Hi] f32
  PagedRows keys;       // in
  Sequences sequences;  // T rows
  int64_t pool = 1;     // tokens a key row
  float key_scale;
  Tensor rows;          // in   [T, S] i32: rows of the query's sequence to score, in any order; -1 = none
  Tensor scores;        // out  [T, S] f32; 0 where none
};
// The gradient of relu is 0 at 0.
struct IndexerScoresBackward {
  Tensor q, weights;    // in
  PagedRows keys;       // in
  Sequences sequences;  // T rows; every cached == 0
  int64_t pool = 1;     // tokens a key row
  float key_scale;
  Tensor rows;          // in   [T, S] i32
  Tensor dscores;       // in   [T, S] f32
  Tensor dq;            // out  [T, Hi, Di] f32
  Tensor dweights;      // out  [T, Hi] f32
  Tensor dkeys;         // out  [K, Di] f32: key rows of the sequences one after the other (tokens, or complete pools)
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const IndexerSelect& args);
absl::Status validate(const IndexerScores& args);
absl::Status validate(const IndexerScoresBackward& args);

// The definition: plain loops over CPU tensors.
void reference(const IndexerSelect& args);
void reference(const IndexerScores& args);
void reference(const IndexerScoresBackward& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const IndexerSelect& args, Stream& stream);
void launch(const IndexerScores& args, Stream& stream);
void launch(const IndexerScoresBackward& args, Stream& stream);

}  // namespace slipstream::kernels
