#include "model/cache.h"

#include <algorithm>
#include <cstring>

#include "kernels/copy/copy.h"
#include "kernels/latent_rows/latent_row.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using kernels::kPageRows;

constexpr int64_t kAlignment = 256;  // of an arena, at most

// Pool pages a cache needs: full ones for all tokens together, and a partial one for each sequence.
int64_t pool_page_count(const ModelConfig& config, const CacheLimits& limits) {
  const int64_t pool = config.index_pool();
  return pages_for((limits.tokens + pool - 1) / pool) + limits.sequences;
}

kernels::LatentRow fp8_row(const MlaConfig& mla) { return kernels::latent_row(mla.kv_lora_rank, mla.rope); }

// Bytes of entry 0 of a store's first dimension: one page, or one slot.
int64_t entry_bytes(const Tensor& store) { return store.empty() ? 0 : store.bytes() / store.size(0); }

std::vector<Tensor> token_stores(const LayerCache& layer, bool pooled) {
  std::vector<Tensor> stores = {layer.keys, layer.values};
  if (!pooled) stores.push_back(layer.index_keys);
  return stores;
}

std::vector<Tensor> slot_stores(const LayerCache& layer) {
  return {layer.open_pool,   layer.conv_tail,   layer.kda.state,
          layer.kda.chunk_k, layer.kda.chunk_g, layer.kda.chunk_u};
}

int64_t arena_bytes(const ModelConfig& config, const CacheLimits& limits, int64_t pages, int64_t pool_pages) {
  int64_t bytes = 4096;
  const auto rows = [&](int64_t count, int64_t width) {
    return count * kPageRows * width * kernels::size_of(limits.dtype) + kAlignment;
  };
  for (const LayerConfig& layer : config.layers) {
    if (layer.attention == AttentionKind::kMla) {
      bytes += limits.fp8_latents ? pages * kPageRows * fp8_row(*config.mla).bytes + kAlignment
                                  : rows(pages, config.mla->key_width());
    }
    if (layer.attention == AttentionKind::kGqa) bytes += 2 * rows(pages, config.gqa->kv_heads * config.gqa->head_dim);
    if (layer.indexer == IndexerMode::kFull) {
      const IndexerConfig& indexer = *config.mla->indexer;
      bytes += rows(indexer.pool > 1 ? pool_pages : pages, indexer.head_dim);
      bytes += limits.sequences * indexer.pool * 2 * indexer.head_dim * 4 + kAlignment;
    }
    if (layer.attention == AttentionKind::kKda) {
      const KdaConfig& kda = *config.kda;
      const int64_t width = kda.heads * kda.head_dim;
      bytes += limits.sequences * 4 *
                   (width * kda.head_dim + 3 * kernels::kKdaChunk * width + (kda.conv_width - 1) * 3 * width) + 5 * kAlignment;
    }
  }
  return bytes;
}

}  // namespace

LayerCache allocate_layer_cache(const ModelConfig& config, const LayerConfig& layer, const RowFormat& format, int64_t pages,
                                int64_t pool_pages, int64_t slots, kernels::Arena& arena) {
  const DType dtype = format.dtype;
  LayerCache cache;
  if (layer.attention == AttentionKind::kMla) {
    cache.keys = format.fp8_latents ? arena.alloc(DType::kF8E4M3, {pages, kPageRows, fp8_row(*config.mla).bytes})
                                    : arena.alloc(dtype, {pages, kPageRows, config.mla->key_width()});
  }
  if (layer.attention == AttentionKind::kGqa) {
    const int64_t width = config.gqa->kv_heads * config.gqa->head_dim;
    cache.keys = arena.alloc(dtype, {pages, kPageRows, width});
    cache.values = arena.alloc(dtype, {pages, kPageRows, width});
  }
  if (layer.indexer == IndexerMode::kFull) {
    const IndexerConfig& indexer = *config.mla->indexer;
    const bool pooled = indexer.pool > 1;
    cache.index_keys = arena.alloc(dtype, {pooled ? pool_pages : pages, kPageRows, indexer.head_dim});
    if (pooled) cache.open_pool = arena.alloc(DType::kF32, {slots, indexer.pool, 2, indexer.head_dim});
  }
  if (layer.attention == AttentionKind::kKda) {
    const KdaConfig& kda = *config.kda;
    const int64_t h = kda.heads, d = kda.head_dim;
    cache.conv_tail = arena.alloc(DType::kF32, {slots, kda.conv_width - 1, 3 * h * d});
    cache.kda.state = arena.alloc(DType::kF32, {slots, h, d, d});
    cache.kda.chunk_k = arena.alloc(DType::kF32, {slots, kernels::kKdaChunk, h, d});
    cache.kda.chunk_g = arena.alloc(DType::kF32, {slots, kernels::kKdaChunk, h, d});
    cache.kda.chunk_u = arena.alloc(DType::kF32, {slots, kernels::kKdaChunk, h, d});
  }
  return cache;
}

Cache::PagePool::PagePool(int64_t count) : references_(static_cast<size_t>(count), 0) {
  for (int64_t page = count - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

int32_t Cache::PagePool::take() {
  CHECK(!free_.empty());
  const int32_t page = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(page)] = 1;
  return page;
}

void Cache::PagePool::drop(int32_t page) {
  CHECK_GT(references_[static_cast<size_t>(page)], 0);
  if (--references_[static_cast<size_t>(page)] == 0) free_.push_back(page);
}

absl::StatusOr<std::unique_ptr<Cache>> Cache::create(const ModelConfig& config, const CacheLimits& limits,
                                                    kernels::Stream* stream) {
  if (limits.tokens <= 0) return absl::InvalidArgumentError("cache tokens: expected > 0");
  if (limits.sequences <= 0) return absl::InvalidArgumentError("cache sequences: expected > 0");
  if (limits.dtype != DType::kF32 && limits.dtype != DType::kBf16) {
    return absl::InvalidArgumentError("cache dtype: expected f32 or bf16");
  }
  if (limits.fp8_latents && !config.mla) {
    return absl::InvalidArgumentError("cache fp8_latents: true, expected false for a model without latent attention");
  }
  ASSIGN_OR_RETURN(kernels::Arena arena,
                   kernels::Arena::create(stream != nullptr ? stream->device() : kernels::Device{},
                                          arena_bytes(config, limits, pages_for(limits.tokens),
                                                      pool_page_count(config, limits))));
  return std::unique_ptr<Cache>(new Cache(config, limits, stream, std::move(arena)));
}

Cache::Cache(const ModelConfig& config, const CacheLimits& limits, kernels::Stream* stream, kernels::Arena arena)
    : limits_(limits),
      stream_(stream),
      pool_(config.index_pool()),
      arena_(std::move(arena)),
      pages_(pages_for(limits.tokens)),
      pool_pages_(pool_page_count(config, limits)),
      slots_(limits.sequences) {
  for (const LayerConfig& layer : config.layers) {
    layers_.push_back(allocate_layer_cache(config, layer, {.dtype = limits.dtype, .fp8_latents = limits.fp8_latents},
                                           pages_.total(), pool_pages_.total(), limits.sequences, arena_));
  }
}

absl::StatusOr<int64_t> Cache::open() {
  if (slots_.available() == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("cache: all ", slots_.total(), " sequences are open"));
  }
  const int64_t id = next_id_++;
  sequences_[id].slot = slots_.take();
  return id;
}

absl::StatusOr<int64_t> Cache::fork(int64_t id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return absl::NotFoundError(absl::StrCat("cache: no sequence ", id));
  const Sequence parent = it->second;  // a copy: open() may move the map's entries
  const int64_t full = parent.tokens / kPageRows, full_pools = parent.tokens / pool_ / kPageRows;
  const int64_t partial = parent.tokens % kPageRows != 0 ? 1 : 0;
  const int64_t partial_pools = pool_ > 1 && parent.tokens / pool_ % kPageRows != 0 ? 1 : 0;
  if (pages_.available() < partial || pool_pages_.available() < partial_pools) {
    return absl::ResourceExhaustedError("cache: no page left for a fork");
  }
  ASSIGN_OR_RETURN(const int64_t child_id, open());
  Sequence& child = sequences_[child_id];
  child.tokens = parent.tokens;
  const auto inherit = [&](const std::vector<int32_t>& from, int64_t whole, int64_t rest, PagePool& pool, bool pooled,
                           std::vector<int32_t>& to) {
    for (int64_t i = 0; i < whole; ++i) {
      pool.share(from[static_cast<size_t>(i)]);
      to.push_back(from[static_cast<size_t>(i)]);
    }
    if (rest == 0) return;
    to.push_back(pool.take());
    copy_page(from[static_cast<size_t>(whole)], to.back(), pooled);
  };
  inherit(parent.pages, full, partial, pages_, /*pooled=*/false, child.pages);
  if (pool_ > 1) inherit(parent.pool_pages, full_pools, partial_pools, pool_pages_, /*pooled=*/true, child.pool_pages);
  copy_slot(parent.slot, child.slot);
  return child_id;
}

absl::Status Cache::free(int64_t id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return absl::NotFoundError(absl::StrCat("cache: no sequence ", id));
  for (const int32_t page : it->second.pages) pages_.drop(page);
  for (const int32_t page : it->second.pool_pages) pool_pages_.drop(page);
  slots_.drop(it->second.slot);
  sequences_.erase(it);
  return absl::OkStatus();
}

absl::Status Cache::reserve(int64_t id, int64_t count) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return absl::NotFoundError(absl::StrCat("cache: no sequence ", id));
  CHECK_GE(count, 0);
  Sequence& sequence = it->second;
  const int64_t tokens = sequence.tokens + count;
  const int64_t need = pages_for(tokens) - static_cast<int64_t>(sequence.pages.size());
  const int64_t need_pools =
      pool_ > 1 ? pages_for(tokens / pool_) - static_cast<int64_t>(sequence.pool_pages.size()) : 0;
  if (need > pages_.available() || need_pools > pool_pages_.available()) {
    return absl::ResourceExhaustedError(absl::StrCat("cache: ", need, " pages wanted, ", pages_.available(), " of ",
                                                     pages_.total(), " left"));
  }
  for (int64_t i = 0; i < need; ++i) sequence.pages.push_back(pages_.take());
  for (int64_t i = 0; i < need_pools; ++i) sequence.pool_pages.push_back(pool_pages_.take());
  return absl::OkStatus();
}

void Cache::advance(int64_t id, int64_t count) {
  const auto it = sequences_.find(id);
  CHECK(it != sequences_.end());
  it->second.tokens += count;
  CHECK_LE(it->second.tokens, static_cast<int64_t>(it->second.pages.size()) * kPageRows);
}

absl::StatusOr<int64_t> Cache::tokens(int64_t id) const {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return absl::NotFoundError(absl::StrCat("cache: no sequence ", id));
  return it->second.tokens;
}

const Cache::Sequence& Cache::sequence(int64_t id) const {
  const auto it = sequences_.find(id);
  CHECK(it != sequences_.end());
  return it->second;
}

CacheUsage Cache::usage() const {
  CacheUsage usage;
  usage.sequences = static_cast<int64_t>(sequences_.size());
  usage.pages_total = pages_.total();
  usage.pages_used = pages_.total() - pages_.available();
  usage.pool_pages_total = pool_ > 1 ? pool_pages_.total() : 0;
  usage.pool_pages_used = pool_ > 1 ? pool_pages_.total() - pool_pages_.available() : 0;
  usage.bytes_total = arena_.used();
  for (const LayerCache& layer : layers_) {
    for (const Tensor& store : token_stores(layer, pool_ > 1)) usage.bytes_used += entry_bytes(store) * usage.pages_used;
    if (pool_ > 1) usage.bytes_used += entry_bytes(layer.index_keys) * usage.pool_pages_used;
    for (const Tensor& store : slot_stores(layer)) usage.bytes_used += entry_bytes(store) * usage.sequences;
  }
  return usage;
}

void Cache::copy_entry(const Tensor& store, int32_t from, int32_t to) {
  if (store.empty()) return;
  const Tensor source = store[from], target = store[to];
  if (stream_ != nullptr && stream_->on_cuda()) {
    // As words of four bytes, whatever they hold: entries are a multiple of that.
    const auto words = [](const Tensor& t) { return Tensor(t.raw(), DType::kF32, {1, 1, t.bytes() / 4}, t.device()); };
    kernels::launch(kernels::Copy{.from = words(source), .to = words(target)}, *stream_);
  } else {
    std::memcpy(target.raw(), source.raw(), static_cast<size_t>(source.bytes()));
  }
}

void Cache::copy_page(int32_t from, int32_t to, bool pool) {
  for (const LayerCache& layer : layers_) {
    if (pool) {
      copy_entry(layer.index_keys, from, to);
    } else {
      for (const Tensor& store : token_stores(layer, pool_ > 1)) copy_entry(store, from, to);
    }
  }
}

void Cache::copy_slot(int32_t from, int32_t to) {
  for (const LayerCache& layer : layers_) {
    for (const Tensor& store : slot_stores(layer)) copy_entry(store, from, to);
  }
}

}  // namespace slipstream::model
