// What sequences keep between forward passes: attention rows in pages, recurrent states in slots.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "common/status.h"
#include "kernels/arena.h"
#include "kernels/kda/kda.h"
#include "kernels/sequences.h"
#include "model/config.h"

namespace slipstream::model {

using kernels::Tensor;

// One layer's stores; what its kind of attention does not need is absent. W and dtypes as the operators' headers say.
struct LayerCache {
  Tensor keys;        // [pages, 64, W]   MLA latent rows (in fp8: bytes, kernels/latent_rows), or GQA keys
  Tensor values;      // [pages, 64, W]   GQA values
  Tensor index_keys;  // [pages, 64, Di]  indexer keys by token, or by pool (then on pool pages)
  Tensor open_pool;   // [slots, P, 2, Di]
  Tensor conv_tail;   // [slots, K-1, 3*h*d]
  kernels::KdaState kda;
};

// How rows of attention are kept.
struct RowFormat {
  kernels::DType dtype = kernels::DType::kF32;
  bool fp8_latents = false;  // MLA's key rows in fp8 instead (kernels/latent_rows), 656 bytes for 512 + 64 values
};

// Allocates the stores of one layer: `pages` token pages, `pool_pages` pool pages, `slots` sequences.
LayerCache allocate_layer_cache(const ModelConfig& config, const LayerConfig& layer, const RowFormat& format,
                                int64_t pages, int64_t pool_pages, int64_t slots, kernels::Arena& arena);

// Pages that this many rows fill, the last perhaps in part.
inline int64_t pages_for(int64_t rows) { return (rows + kernels::kPageRows - 1) / kernels::kPageRows; }

struct CacheLimits {
  int64_t tokens = 0;     // over all sequences; each rounds up to whole pages of 64
  int64_t sequences = 0;  // open at once
  kernels::DType dtype = kernels::DType::kF32;  // of attention rows; recurrent states are always f32
  bool fp8_latents = false;                     // as in RowFormat
};

struct CacheUsage {
  int64_t sequences = 0;
  int64_t pages_used = 0, pages_total = 0;            // token pages
  int64_t pool_pages_used = 0, pool_pages_total = 0;  // pool pages
  int64_t bytes_used = 0;   // pages and slots in use, all layers
  int64_t bytes_total = 0;  // everything allocated
};

// Pages are shared by all layers (page p of every layer belongs to the same tokens) and, after fork(), by sequences.
// Shared pages are full and never written again; the partial last page is copied at the fork. One thread uses a cache.
class Cache {
 public:
  // stream: on whose device the cache is, and which copies pages at a fork; it outlives the cache. Null: on the CPU.
  // InvalidArgument: limits not positive; fp8_latents of a model that has none. ResourceExhausted: no memory. On the CPU
  // memory is touched when used.
  static absl::StatusOr<std::unique_ptr<Cache>> create(const ModelConfig& config, const CacheLimits& limits,
                                                       kernels::Stream* stream = nullptr);

  // A new, empty sequence. ResourceExhausted: `sequences` are open.
  absl::StatusOr<int64_t> open();
  // A new sequence with the same history. ResourceExhausted: no slot or page left; then nothing changes.
  absl::StatusOr<int64_t> fork(int64_t id);
  // Gives back a sequence. NotFound: unknown id.
  absl::Status free(int64_t id);

  // Makes room for `count` more tokens. ResourceExhausted: pages run out; then nothing changes. NotFound: unknown id.
  absl::Status reserve(int64_t id, int64_t count);
  // Tokens of reserve() are now stored. Called by the forward pass.
  void advance(int64_t id, int64_t count);

  absl::StatusOr<int64_t> tokens(int64_t id) const;  // stored so far
  CacheUsage usage() const;

  const std::vector<LayerCache>& layers() const { return layers_; }
  kernels::DType dtype() const { return limits_.dtype; }
  struct Sequence {
    int64_t tokens = 0;
    int32_t slot = 0;
    std::vector<int32_t> pages;       // token pages, in order
    std::vector<int32_t> pool_pages;  // pool pages, in order
  };
  // Dies on an unknown id: reserve() has vetted it.
  const Sequence& sequence(int64_t id) const;

 private:
  // Page numbers with reference counts.
  class PagePool {
   public:
    explicit PagePool(int64_t count);
    int64_t available() const { return static_cast<int64_t>(free_.size()); }
    int64_t total() const { return static_cast<int64_t>(references_.size()); }
    int32_t take();
    void share(int32_t page) { ++references_[static_cast<size_t>(page)]; }
    void drop(int32_t page);

   private:
    std::vector<int32_t> free_;  // a stack; low numbers come out first
    std::vector<int32_t> references_;
  };

  Cache(const ModelConfig& config, const CacheLimits& limits, kernels::Stream* stream, kernels::Arena arena);
  void copy_entry(const Tensor& store, int32_t from, int32_t to);
  void copy_page(int32_t from, int32_t to, bool pool);
  void copy_slot(int32_t from, int32_t to);

  CacheLimits limits_;
  kernels::Stream* stream_;  // null on the CPU
  int64_t pool_;  // tokens per indexer key row
  kernels::Arena arena_;
  PagePool pages_;
  PagePool pool_pages_;
  PagePool slots_;
  std::vector<LayerCache> layers_;
  std::unordered_map<int64_t, Sequence> sequences_;
  int64_t next_id_ = 0;
};

}  // namespace slipstream::model
