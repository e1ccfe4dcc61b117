#include "model/layers/indexer.h"

#include <cmath>
#include <vector>

#include "kernels/indexer/indexer.h"
#include "kernels/layernorm/layernorm.h"
#include "kernels/paged_rows/paged_rows.h"
#include "kernels/pool_keys/pool_keys.h"
#include "kernels/rope/rope.h"

namespace slipstream::model {
namespace {

constexpr float kKeyNormEps = 1e-6f;  // of the published indexer's LayerNorm, whatever rms_norm_eps is

}  // namespace

Selection Indexer::allocate(Step& step) const {
  const int64_t width = kernels::selection_width(config_.topk, config_.pool, config_.tail, step.batch.longest);
  return {step.ints({step.batch.rows(), width}), step.ints({step.batch.rows()})};
}

void Indexer::forward(const Weights& w, const Tensor& x, const Tensor& q_resid, const LayerCache& cache,
                      const Selection& selection, Step& step) const {
  const kernels::ArenaScope scope(step.arena);
  const PreparedBatch& batch = step.batch;
  const int64_t tokens = x.size(0), width = config_.head_dim;
  const bool pooled = config_.pool > 1;
  const Tensor q = step.alloc({tokens, config_.heads, width}), weights = step.island({tokens, config_.heads});
  const Tensor raw = step.alloc({tokens, width}), k = step.alloc({tokens, width});
  const Tensor gate = pooled ? step.alloc({tokens, width}) : Tensor();
  std::vector<Linear> layers = {{.x = q_resid, .w = w.wq_b, .y = q.view({tokens, config_.heads * width})},
                                {.x = x, .w = w.weights_proj, .y = weights},
                                {.x = x, .w = w.wk, .y = raw}};
  if (pooled) layers.push_back({.x = x, .w = w.pool_gate, .y = gate});
  linears_into(step, layers);
  kernels::launch(kernels::LayerNorm{.x = raw, .w = w.k_norm_w, .b = w.k_norm_b, .y = k, .mean = {}, .inv_std = {},
                                     .eps = kKeyNormEps},
                  step.stream);
  if (rope_ > 0) {
    const auto rotate = [&](const Tensor& heads) {
      kernels::launch(kernels::Rope{.x = heads.slice(2, 0, rope_), .cos = batch.cos, .sin = batch.sin,
                                    .layout = kernels::RopeLayout::kInterleaved},
                      step.stream);
    };
    rotate(q);
    rotate(k.split_last(1));
  }
  const kernels::PagedRows keys{cache.index_keys, pooled ? batch.pool_pages : batch.token_pages};
  if (pooled) {
    kernels::launch(kernels::PoolKeys{.k = k, .gate = gate, .ape = w.pool_ape, .sequences = batch.sequences,
                                      .open = cache.open_pool, .slots = batch.slots, .pooled = keys},
                    step.stream);
  } else {
    kernels::launch(kernels::PagedWrite{.rows = k, .sequences = batch.sequences, .store = keys}, step.stream);
  }
  // The head count's scale Hi^-1/2 is positive, so it may stand inside the relu, with the key's.
  const float scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim * config_.heads));
  kernels::launch(kernels::IndexerSelect{.q = q, .weights = weights, .keys = keys, .sequences = batch.sequences,
                                         .topk = config_.topk, .pool = config_.pool, .tail = config_.tail,
                                         .key_scale = scale, .indices = selection.indices,
                                         .counts = selection.counts},
                  step.stream);
}

}  // namespace slipstream::model
