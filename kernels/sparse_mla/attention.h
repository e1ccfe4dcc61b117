// The causal softmax attention that sparse MLA and GQA share on the CPU: groups of query rows against paged
// key and value rows. Both operators are this one with other widths, so they share its code and its order of
// sums:
//   score = four interleaved fma chains over the key's values (attention_tiles-inl.h), times scale;
//   softmax over the query's own keys: exact maximum, exp, sum in Lanes order over the index in its
//   selection; o     = one fma chain over the keys, ascending, then times 1 / sum.
// None of it depends on the other queries, so tiles, threads and calls may be cut anywhere.
#pragma once

#include "kernels/latent_rows/latent_row.h"
#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// Entries of a key list that are scored and summed at a time; part of the definition of the order above.
constexpr int64_t kAttentionBlock = 512;
// Entries of a key list whose scores' gradients are kept together in the backward: whole tiles of 12.
constexpr int64_t kGradTile = 96;

// The widest rows that the CUDA form takes: of latents, and of the heads of separate keys and values.
constexpr int64_t kAttentionWidthCuda = 640, kGqaWidthCuda = 256;

struct Attention {
  Tensor q;             // in   [T, h, key_width] f32; head j uses key/value head j / (h / kv_heads)
  PagedRows keys;       // in   key head g is columns [g * key_width, (g + 1) * key_width) of a row
  PagedRows values;     // in   value head g is columns [g * value_width, (g + 1) * value_width) of a row
  LatentRow latents = {};  // how the rows lie if they are e4m3: in the forward of one key head, keys and values one store
  Sequences sequences;  // T rows
  int64_t kv_heads;
  Tensor indices;  // in   [T, S] i32, ascending; absent: every position up to the query's
  Tensor counts;   // in   [T] i32
  float scale;
  Tensor o;    // out  [T, h, value_width] f32; in for the backward
  Tensor lse;  // out  [T, h] f32; may be absent in the forward; in for the backward
};

// For whole sequences (every cached == 0).
struct AttentionBackward {
  Attention forward;
  Tensor d_o;      // in   [T, h, value_width] f32
  Tensor dq;       // out  [T, h, key_width] f32
  Tensor dkeys;    // out  [T, kv_heads, key_width] f32; or [T, key_width] with one head
  Tensor dvalues;  // out  [T, kv_heads, value_width] f32; absent: added to the first columns of dkeys
};

// The callers have validated the arguments.
void attend(const Attention& args, Stream& stream);
void attend_backward(const AttentionBackward& args, Stream& stream);

// The unit of work: neighbouring queries of one sequence with some heads of one key/value head. Query i sees
// the first `prefix + i` entries of the group's key list, which is `selection` or, when null, the positions
// 0, 1, 2, ...
struct AttentionGroup {
  int64_t sequence;
  int64_t row;      // of the first query in the batch
  int64_t queries;  // 1 unless selection is null
  int64_t kv_head;
  int64_t head, heads;  // query heads [head, head + heads)
  int64_t prefix;
  const int32_t* selection;

  int64_t rows() const { return queries * heads; }  // query-major
  int64_t keys() const { return prefix + queries - 1; }
  // Row stride of a [rows, keys] matrix: whole tiles, and an odd number of cache lines so that columns spread
  // over the cache's sets.
  int64_t stride() const { return (keys() + 15) / 16 * 16 | 16; }
};

}  // namespace slipstream::kernels
