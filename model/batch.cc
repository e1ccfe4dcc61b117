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

kernels::Tensor uploaded(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape,
                         kernels::Arena& arena, kernels::Stream& stream) {
  const kernels::Tensor t = arena.alloc(DType::kI32, shape);
  stream.upload(values.data(), t);
  return t;
}

// The page numbers of each sequence, padded with -1.
kernels::Tensor page_table(const std::vector<std::vector<int32_t>>& pages, kernels::Arena& arena,
                           kernels::Stream& stream) {
  size_t widest = 1;
  for (const auto& list : pages) widest = std::max(widest, list.size());
  const int64_t width = static_cast<int64_t>(widest);
  std::vector<int32_t> table(pages.size() * widest, -1);
  for (size_t b = 0; b < pages.size(); ++b) {
    std::copy(pages[b].begin(), pages[b].end(), table.begin() + static_cast<int64_t>(b) * width);
  }
  return uploaded(table, {static_cast<int64_t>(pages.size()), width}, arena, stream);
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
  out.ids = uploaded(batch.tokens, {rows}, arena, stream);
  out.host_sequences = std::make_shared<PreparedBatch::HostSequences>();
  std::vector<int32_t>&row_begin = out.host_sequences->row_begin, &cached = out.host_sequences->cached;
  std::vector<int32_t> slots, positions;
  const int64_t pool = config.index_pool();
  std::vector<std::vector<int32_t>> token_pages(batch.lengths.size()), pool_pages(batch.lengths.size());
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
      slots.push_back(sequence.slot);
    } else {
      for (int64_t i = 0; i < pages_for(tokens); ++i) {
        token_pages[b].push_back(static_cast<int32_t>(out.token_page_count++));
      }
      for (int64_t i = 0; i < pages_for(tokens / pool); ++i) {
        pool_pages[b].push_back(static_cast<int32_t>(out.pool_page_count++));
      }
      slots.push_back(static_cast<int32_t>(b));
    }
    row_begin.push_back(static_cast<int32_t>(positions.size()));
    cached.push_back(static_cast<int32_t>(before));
    for (int64_t i = 0; i < batch.lengths[b]; ++i) positions.push_back(static_cast<int32_t>(before + i));
    out.longest = std::max(out.longest, tokens);
  }
  row_begin.push_back(static_cast<int32_t>(rows));
  out.sequences = {.row_begin = uploaded(row_begin, {count + 1}, arena, stream),
                   .cached = uploaded(cached, {count}, arena, stream),
                   .host_row_begin = kernels::Tensor(row_begin.data(), DType::kI32, {count + 1}),
                   .host_cached = kernels::Tensor(cached.data(), DType::kI32, {count})};
  out.slots = uploaded(slots, {count}, arena, stream);
  out.token_pages = page_table(token_pages, arena, stream);
  out.pool_pages = page_table(pool_pages, arena, stream);
  if (config.rotary() > 0) {
    out.cos = arena.alloc(DType::kF32, {rows, config.rotary() / 2});
    out.sin = arena.alloc(DType::kF32, {rows, config.rotary() / 2});
    kernels::launch(kernels::RopeTable{uploaded(positions, {rows}, arena, stream), out.cos, out.sin, config.rope_theta}, stream);
  }
  return out;
}

}  // namespace slipstream::model
