// The DSA lightning indexer: which earlier positions a query attends to. DeepSeek-V3.2 2025, arXiv:2512.02556;
// model-spec section 4.
//   I(t, s) = sum over j, ascending, of weights[t, j] * relu(q[t, j] · k[s] * key_scale)      (all in fp32)
// The topk largest scores among s <= t are selected; equal scores go to the lower position. While t + 1 <= topk that is
// every position.
#pragma once

#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// With pool P > 1 (Flash) a key row stands for the P tokens pP .. pP+P-1 and is a candidate once its last token is <= t;
// the topk / P best pools are expanded to their positions, and with `tail` the tokens of the incomplete last pool up to t
// are appended.
struct IndexerSelect {
  Tensor q;             // in   [T, Hi, Di] f32
  Tensor weights;       // in   [T, Hi] f32, already times Hi^-1/2
  PagedRows keys;       // in   one row of Di a token, or a pool; rows of this batch are already written
  Sequences sequences;  // T rows
  int64_t topk;         // index_topk, a multiple of pool
  int64_t pool = 1;     // index_kpool
  bool tail = false;    // index_kpool_always_select_tail
  float key_scale;      // Di^-1/2
  Tensor indices;       // out  [T, W] i32 with W = selection_width(): selected positions, ascending, then -1
  Tensor counts;        // out  [T] i32
};

// topk, plus pool - 1 with a tail; never more than `longest`, the number of tokens of the longest sequence (cached + new).
int64_t selection_width(int64_t topk, int64_t pool, bool tail, int64_t longest);

// I(t, s) for given positions or pools: what the indexer's own loss (model-spec 9) differentiates.
struct IndexerScores {
  Tensor q;             // in   [T, Hi, Di] f32
  Tensor weights;       // in   [T, Hi] f32
  PagedRows keys;
  Sequences sequences;
  float key_scale;
  Tensor rows;          // in   [T, S] i32: key rows to score, -1 = none
  Tensor scores;        // out  [T, S] f32; 0 where none
};
struct IndexerScoresBackward {
  Tensor q, weights;    // in
  PagedRows keys;       // in
  Sequences sequences;  // every cached == 0
  float key_scale;
  Tensor rows;          // in   [T, S] i32
  Tensor dscores;       // in   [T, S] f32
  Tensor dq;            // out  [T, Hi, Di] f32
  Tensor dweights;      // out  [T, Hi] f32
  Tensor dkeys;         // out  [K, Di] f32: key rows of the sequences one after the other (tokens, or complete pools)
  int64_t pool = 1;     // tokens a key row
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
