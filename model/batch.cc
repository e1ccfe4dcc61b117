#include "model/batch.h"

#include <algorithm>
#include <bit>
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

// A batch's integers on the device: gathered first, so that they are one copy.
class Integers {
 public:
  // Where a tensor of these values will begin.
  size_t add(const std::vector<int32_t>& values) {
    const size_t begin = values_.size();
    values_.insert(values_.end(), values.begin(), values.end());
    values_.resize((values_.size() + kAlignment - 1) / kAlignment * kAlignment);
    return begin;
  }
  void upload(kernels::Arena& arena, kernels::Stream& stream) {
    uploaded_ = arena.alloc(DType::kI32, {static_cast<int64_t>(values_.size())});
    stream.upload(values_.data(), uploaded_);
  }
  kernels::Tensor at(size_t begin, std::initializer_list<int64_t> shape) const {
    return kernels::Tensor(uploaded_.i32() + begin, DType::kI32, shape, uploaded_.device());
  }

 private:
  static constexpr size_t kAlignment = 64;  // 256 bytes
  std::vector<int32_t> values_;
  kernels::Tensor uploaded_;
};

// The page numbers of each sequence, padded with -1 to `width`.
std::vector<int32_t> page_table(const std::vector<std::vector<int32_t>>& pages, int64_t width) {
  std::vector<int32_t> table(pages.size() * static_cast<size_t>(width), -1);
  for (size_t b = 0; b < pages.size(); ++b) {
    std::copy(pages[b].begin(), pages[b].end(), table.begin() + static_cast<int64_t>(b) * width);
  }
  return table;
}

int64_t widest(const std::vector<std::vector<int32_t>>& pages) {
  size_t most = 1;
  for (const auto& list : pages) most = std::max(most, list.size());
  return static_cast<int64_t>(most);
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
  const bool decode = use_cache && stream.on_cuda() && rows == count &&
                      std::all_of(batch.lengths.begin(), batch.lengths.end(), [](int64_t length) { return length == 1; });
  int64_t token_width = widest(token_pages), pool_width = widest(pool_pages);
  Integers integers;
  const size_t cached_at = integers.add(cached);
  if (decode) {
    constexpr uint64_t kLeast = 512;
    out.longest = static_cast<int64_t>(std::bit_ceil(std::max(static_cast<uint64_t>(out.longest), kLeast)));
    token_width = pages_for(out.longest);
    pool_width = pages_for(out.longest / pool);
    std::fill(cached.begin(), cached.end(), static_cast<int32_t>(out.longest - 1));
  }
  const size_t ids_at = integers.add(batch.tokens), row_begin_at = integers.add(row_begin), slots_at = integers.add(slots),
               positions_at = integers.add(positions), token_at = integers.add(page_table(token_pages, token_width)),
               pool_at = integers.add(page_table(pool_pages, pool_width));
  integers.upload(arena, stream);
  out.ids = integers.at(ids_at, {rows});
  out.sequences = {.row_begin = integers.at(row_begin_at, {count + 1}),
                   .cached = integers.at(cached_at, {count}),
                   .host_row_begin = kernels::Tensor(row_begin.data(), DType::kI32, {count + 1}),
                   .host_cached = kernels::Tensor(cached.data(), DType::kI32, {count})};
  out.slots = integers.at(slots_at, {count});
  out.token_pages = integers.at(token_at, {count, token_width});
  out.pool_pages = integers.at(pool_at, {count, pool_width});
  if (config.rotary() > 0) {
    out.cos = arena.alloc(DType::kF32, {rows, config.rotary() / 2});
    out.sin = arena.alloc(DType::kF32, {rows, config.rotary() / 2});
    kernels::launch(kernels::RopeTable{integers.at(positions_at, {rows}), out.cos, out.sin, config.rope_theta}, stream);
  }
  return out;
}

void PreparedBatch::advance() const {
  if (cache == nullptr) return;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    cache->advance(cache_ids[static_cast<size_t>(b)], sequences.end(b) - sequences.begin(b));
  }
}

}  // namespace slipstream::model
