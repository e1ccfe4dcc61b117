#include "model/batch.h"

#include <algorithm>
#include <unordered_set>

#include "kernels/rope/rope.h"

namespace slipstream::model {
namespace {

using kernels::DType;

absl::Status check_batch(const ModelConfig& config, const Batch& batch, Cache* cache) {
  int64_t total = 0;
  for (const int64_t length : batch.lengths) {
    if (length < 0) return absl::InvalidArgumentError("batch: lengths: expected >= 0");
    total += length;
  }
  if (total != static_cast<int64_t>(batch.tokens.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch: lengths add up to ", total, ", expected ", batch.tokens.size(), " tokens"));
  }
  for (size_t i = 0; i < batch.tokens.size(); ++i) {
    if (batch.tokens[i] < 0 || batch.tokens[i] >= config.vocab) {
      return absl::InvalidArgumentError(absl::StrCat("batch: tokens[", i, "]: ", batch.tokens[i],
                                                     ", expected 0..", config.vocab - 1));
    }
  }
  if (batch.cached.empty()) return absl::OkStatus();
  if (cache == nullptr) return absl::InvalidArgumentError("batch: cached sequences, but no cache");
  if (batch.cached.size() != batch.lengths.size()) {
    return absl::InvalidArgumentError(absl::StrCat("batch: ", batch.cached.size(), " cached sequences, expected ",
                                                   batch.lengths.size()));
  }
  std::unordered_set<int64_t> seen;
  for (const int64_t id : batch.cached) {
    if (!seen.insert(id).second) {
      return absl::InvalidArgumentError(absl::StrCat("batch: cache sequence ", id, " named twice"));
    }
  }
  return absl::OkStatus();
}

// The page numbers of each sequence, padded with -1.
kernels::Tensor page_table(const std::vector<std::vector<int32_t>>& pages, kernels::Arena& arena) {
  size_t widest = 1;
  for (const auto& list : pages) widest = std::max(widest, list.size());
  const int64_t width = static_cast<int64_t>(widest);
  const kernels::Tensor table = arena.alloc(DType::kI32, {static_cast<int64_t>(pages.size()), width});
  for (size_t b = 0; b < pages.size(); ++b) {
    int32_t* row = table.i32() + static_cast<int64_t>(b) * width;
    std::fill(row, row + width, -1);
    std::copy(pages[b].begin(), pages[b].end(), row);
  }
  return table;
}

}  // namespace

absl::StatusOr<PreparedBatch> prepare_batch(const ModelConfig& config, const Batch& batch, Cache* cache,
                                            kernels::Arena& arena, kernels::Stream& stream) {
  RETURN_IF_ERROR(check_batch(config, batch, cache));
  const int64_t count = static_cast<int64_t>(batch.lengths.size()), rows = static_cast<int64_t>(batch.tokens.size());
  const bool use_cache = !batch.cached.empty();
  PreparedBatch out;
  out.cache = use_cache ? cache : nullptr;
  out.cache_ids = batch.cached;
  out.ids = arena.alloc(DType::kI32, {rows});
  std::copy(batch.tokens.begin(), batch.tokens.end(), out.ids.i32());
  out.sequences.row_begin = arena.alloc(DType::kI32, {count + 1});
  out.sequences.cached = arena.alloc(DType::kI32, {count});
  out.slots = arena.alloc(DType::kI32, {count});
  const kernels::Tensor positions = arena.alloc(DType::kI32, {rows});
  const int64_t pool = config.index_pool();
  std::vector<std::vector<int32_t>> token_pages(batch.lengths.size()), pool_pages(batch.lengths.size());
  int32_t row = 0;
  for (size_t b = 0; b < batch.lengths.size(); ++b) {
    int64_t before = 0;
    if (use_cache) {
      ASSIGN_OR_RETURN(before, cache->tokens(batch.cached[b]));
    }
    const int64_t tokens = before + batch.lengths[b];
    if (tokens > config.max_positions) {
      return absl::InvalidArgumentError(absl::StrCat("batch: sequence ", b, ": ", tokens, " tokens, expected at most ",
                                                     "max_position_embeddings ", config.max_positions));
    }
    if (use_cache) {
      RETURN_IF_ERROR(cache->reserve(batch.cached[b], batch.lengths[b]));
      const Cache::Sequence& sequence = cache->sequence(batch.cached[b]);
      token_pages[b] = sequence.pages;
      pool_pages[b] = sequence.pool_pages;
      out.slots.i32()[b] = sequence.slot;
    } else {
      for (int64_t i = 0; i < pages_for(tokens); ++i) {
        token_pages[b].push_back(static_cast<int32_t>(out.token_page_count++));
      }
      for (int64_t i = 0; i < pages_for(tokens / pool); ++i) {
        pool_pages[b].push_back(static_cast<int32_t>(out.pool_page_count++));
      }
      out.slots.i32()[b] = static_cast<int32_t>(b);
    }
    out.sequences.row_begin.i32()[b] = row;
    out.sequences.cached.i32()[b] = static_cast<int32_t>(before);
    for (int64_t i = 0; i < batch.lengths[b]; ++i) positions.i32()[row++] = static_cast<int32_t>(before + i);
    out.longest = std::max(out.longest, tokens);
  }
  out.sequences.row_begin.i32()[count] = row;
  out.token_pages = page_table(token_pages, arena);
  out.pool_pages = page_table(pool_pages, arena);
  if (config.rotary() > 0) {
    out.cos = arena.alloc(DType::kF32, {rows, config.rotary() / 2});
    out.sin = arena.alloc(DType::kF32, {rows, config.rotary() / 2});
    kernels::launch(kernels::RopeTable{positions, out.cos, out.sin, config.rope_theta}, stream);
  }
  return out;
}

}  // namespace slipstream::model
