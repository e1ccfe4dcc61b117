// Batch: what one forward pass works on, whether that is prefill, decode, verification, log-probs or training.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/status.h"
#include "kernels/arena.h"
#include "kernels/sequences.h"
#include "model/cache.h"
#include "model/config.h"

namespace slipstream::model {

// A ragged list of sequences. With a cache, sequence i continues cache sequence `cached[i]` and its new tokens are stored
// there; without one (cached empty) every sequence is whole, which is what a backward pass needs.
struct Batch {
  std::vector<int32_t> tokens;   // the new tokens of all sequences, one after the other
  std::vector<int64_t> lengths;  // how many of them belong to each sequence; 0 is legal
  std::vector<int64_t> cached;   // cache sequence ids, or empty
};

// A Batch as tensors on the stream's device, shared by all layers. Lives in the arena it was prepared in.
struct PreparedBatch {
  kernels::Tensor ids;            // [T] i32
  kernels::Sequences sequences;
  struct HostSequences {
    std::vector<int32_t> row_begin, cached;
  };
  std::shared_ptr<HostSequences> host_sequences;  // what `sequences` points to in host memory
  // On a GPU, in a batch of one row a sequence (decode), sizes do not follow each token, so that launches recorded for one
  // step serve the next: `longest`, the widths of page tables and the tokens that the host knows of each sequence are those
  // of the next power of two. Kernels read the device's numbers.
  kernels::Tensor cos, sin;       // [T, rotary/2] f32; absent without RoPE
  kernels::Tensor token_pages;    // [B, n] i32
  kernels::Tensor pool_pages;     // [B, n] i32
  kernels::Tensor slots;          // [B] i32
  int64_t longest = 0;            // tokens of the longest sequence, cached and new
  // Without a cache each layer makes stores of its own for the pass, of these sizes; pages are then numbered in order.
  Cache* cache = nullptr;
  std::vector<int64_t> cache_ids;  // of each sequence in it
  int64_t token_page_count = 0;
  int64_t pool_page_count = 0;

  int64_t rows() const { return ids.size(0); }
  // The sequences in the cache have these rows now: to be called once a forward over the batch is enqueued.
  void advance() const;
};

// Checks the batch against the model and the cache and reserves room in it. InvalidArgument: a token outside the vocabulary,
// lengths that do not add up, a sequence longer than max_position_embeddings, a cache sequence named twice. NotFound: an
// unknown cache sequence. ResourceExhausted: the cache is full. Arena and cache are on the stream's device.
absl::StatusOr<PreparedBatch> prepare_batch(const ModelConfig& config, const Batch& batch, Cache* cache,
                                            kernels::Arena& arena, kernels::Stream& stream);

}  // namespace slipstream::model
