#include "kernels/launch_cuda.h"
#include "kernels/sparse_mla/attention_backward_mma.cuh"
#include "kernels/sparse_mla/attention_backward_wgmma.cuh"
#include "kernels/sparse_mla/attention_forward.cuh"
#include "kernels/sparse_mla/attention_latents_split.cuh"
#include "kernels/sparse_mla/attention_restore.cuh"
#include "kernels/sparse_mla/sparse_mla.h"

namespace slipstream::kernels {
namespace {

unsigned runs_of(const Attention& args, int64_t heads_a_block) {
  const int64_t group = args.q.size(1) / args.kv_heads;
  return static_cast<unsigned>(args.kv_heads * ((group + heads_a_block - 1) / heads_a_block));
}

// f is called with the compile-time number of columns a lane owns.
template <class F>
void for_columns(int64_t width, F&& f) {
  if (width <= 4 * kWarp) return f(std::integral_constant<int, 4>());
  CHECK_LE(width, 20 * kWarp);  // validate()
  f(std::integral_constant<int, 20>());
}

// f is called with the dtypes of activations and stores; those of the backward.
template <class F>
void for_grad_dtypes(const Attention& args, F&& f) {
  with_type(args.q.dtype(), [&](auto x) { with_type(args.keys.pool.dtype(), [&](auto k) { f(x, k); }); });
}
template <class F>
void for_dtypes(const Attention& args, F&& f) {
  if (args.keys.pool.dtype() != DType::kF8E4M3) return for_grad_dtypes(args, f);
  with_type(args.q.dtype(), [&](auto x) { f(x, e4m3{}); });
}

template <class X, class K>
void attend_plain(const Attention& args, Stream& stream) {
  const AttentionView<X, K> view = view_of<X, K>(args);
  const int key_pitch = fma_pitch(view.key_width),
            value_pitch = view.shared ? 0 : fma_pitch(view.value_width);
  const int bytes = 4 * ((kFmaHeads + kFmaKeys) * key_pitch + kFmaKeys * value_pitch);
  for_columns(view.value_width, [&](auto columns) {
    const auto kernel = attend_fma<X, K, columns()>;
    allow_shared(kernel, bytes);
    const dim3 grid(static_cast<unsigned>(args.q.size(0)), runs_of(args, kFmaHeads));
    kernel<<<grid, kFmaThreads, bytes, cuda_stream(stream)>>>(view);
  });
}

template <int kRowTiles, int kColumnWarps, int kTiles, bool kShared>
bool has_room(const Attention& args) {
  using Shape = MmaAttention<kRowTiles, kColumnWarps, kTiles, kShared>;
  const bool shared = args.values.pool.raw() == args.keys.pool.raw();
  const int key_width = static_cast<int>(args.q.size(2)), value_width = static_cast<int>(args.o.size(2));
  return shared == kShared && value_width <= Shape::kValueWidthMax &&
         Shape::shared_bytes(key_width, value_width) <= kSharedMax;
}

template <int kRowTiles, int kColumnWarps, int kTiles, bool kShared, class K>
void attend_tiles(const Attention& args, Stream& stream) {
  using Shape = MmaAttention<kRowTiles, kColumnWarps, kTiles, kShared>;
  const AttentionView<bf16, K> view = view_of<bf16, K>(args);
  const int bytes = Shape::shared_bytes(view.key_width, view.value_width);
  const auto kernel = attend_mma<kRowTiles, kColumnWarps, kTiles, kShared, K>;
  allow_shared(kernel, bytes);
  const dim3 grid(static_cast<unsigned>(args.q.size(0)), runs_of(args, Shape::kHeads));
  const bool query_vectors = aligned_16(args.q);
  kernel<<<grid, Shape::kThreads, bytes, cuda_stream(stream)>>>(view, query_vectors);
}

// --- latents on Hopper ---

// By heads, widths and layout, never by the batch. Sixteen heads and fewer would leave most of a tile empty.
template <class K>
bool takes_latents(const Attention& args, const LatentView<K>& view) {
  return view.shared && view.value_width == kLatentWidth &&
         (view.key_width == kLatentWidth || view.key_width == kLatentWidth + 64) && args.kv_heads == 1 &&
         view.heads > 16 && args.scale > 0.0f && view.vectors && aligned_16(args.q) && fours(args.o);
}

// Up to so many queries with a selection are shared out: of bf16 rows weigh_latents' blocks then run at once. (On an H200, with 2048 keys each, 32
// take 0.073 ms so and 0.066 otherwise; of fp8 rows 0.083 and 0.110.) Lists without a selection have lengths that a graph's launches
// must not depend on.
template <class K>
constexpr int64_t kFewQueries = sizeof(K) == 1 ? 32 : 16;

template <bool kRope, class K>
void attend_to_latents(const Attention& args, const LatentView<K>& view, Stream& stream) {
  constexpr float kLog2e = 1.4426950408889634f;
  const int64_t queries = args.q.size(0), runs = divide_up(view.heads, kLatentHeads);
  const int64_t blocks = args.indices.empty() ? 0 : divide_up(args.indices.size(1), kLatentKeys);
  const int64_t multi = multiprocessors(), scored = queries * runs * blocks, floats = scored * (kScoreValues + kLatentHeads);
  const auto grid = [&](int64_t x, int64_t z) {
    return dim3(static_cast<unsigned>(x), static_cast<unsigned>(runs), static_cast<unsigned>(z));
  };
  // KeyFinder counts sixteens of bytes in 32 bits.
  CHECK_LT(args.keys.pool.size(0) * args.keys.pool.stride(0) * int64_t{sizeof(K)}, int64_t{16} * 0xffffffff);
  LatentShare share{.queries = static_cast<int>(queries), .span = 1 << 24, .scale = view.scale * kLog2e};
  constexpr int kBytes = sizeof(LatentShared<kRope>);
  static_assert(kBytes <= kSharedMax);
  Arena& workspace = stream.workspace();
  if (queries * runs > kFewQueries<K> || blocks < 4 || blocks > kSplitBlocksMax ||
      floats * 4 + 1024 > workspace.capacity() - workspace.used()) {
    allow_shared(attend_latents<kRope, K>, kBytes);
    attend_latents<kRope, K><<<grid(std::min(queries, std::max<int64_t>(multi / runs, 1)), 1), kLatentThreads,
                            kBytes, cuda_stream(stream)>>>(view, share);
    return;
  }
  const ArenaScope scope(workspace);
  const LatentScores scores{workspace.alloc(DType::kF32, {scored * kScoreValues}).f32(),
                            workspace.alloc(DType::kF32, {scored * kLatentHeads}).f32(), static_cast<int>(blocks)};
  share.span = static_cast<int>(divide_up(blocks, std::max<int64_t>(multi / (queries * runs), 1)));
  allow_shared(score_latents<kRope, K>, kBytes);
  allow_shared(weigh_latents<K>, sizeof(WeighShared));
  score_latents<kRope, K><<<grid(queries, divide_up(blocks, share.span)), kScoreThreads<K>, kBytes,
                            cuda_stream(stream)>>>(view, share, scores);
  weigh_latents<K><<<grid(queries, kLatentTiles), kWeighThreads<K>, sizeof(WeighShared), cuda_stream(stream)>>>(
      view, share, scores);
}

// False where no tiling has room: by heads and widths alone, never by the batch.
template <class K>
bool attend_on_tensor_cores(const Attention& args, Stream& stream) {
  const LatentView<K> view = view_of<bf16, K>(args);
  if (takes_latents(args, view)) {
    view.key_width > kLatentWidth ? attend_to_latents<true>(args, view, stream)
                                  : attend_to_latents<false>(args, view, stream);
    return true;
  }
  if (has_room<1, 4, 16, true>(args)) {
    attend_tiles<1, 4, 16, true, K>(args, stream);
    return true;
  }
  if constexpr (sizeof(K) == 2) {
    if (has_room<1, 4, 4, false>(args)) {
      attend_tiles<1, 4, 4, false, K>(args, stream);
      return true;
    }
  }
  return false;
}

void forward(const Attention& args, Stream& stream) {
  if (args.q.size(0) == 0) return;
  for_dtypes(args, [&]<class X, class K>(X, K) {
    if constexpr (sizeof(K) == 1) {
      const ArenaScope scope(stream.workspace());
      if (const std::optional<Attention> restored = restore_pages<X>(args, stream)) return forward(*restored, stream);
    }
    if constexpr (sizeof(X) == 2 && sizeof(K) <= 2) {
      if (attend_on_tensor_cores<K>(args, stream)) return;
    }
    attend_plain<X, K>(args, stream);
  });
  check_launch("attention");
}

template <int kRowTiles, int kColumnWarps, int kTiles, bool kShared>
bool has_grad_room(const GradientView<bf16, bf16>& view) {
  using Shape = MmaGradQueries<kRowTiles, kColumnWarps, kTiles, kShared>;
  const AttentionView<bf16, bf16>& forward = view.forward;
  const int group = forward.heads / forward.kv_heads;
  return forward.shared == kShared && group <= Shape::kHeads && forward.key_width <= Shape::kKeyWidthMax &&
         Shape::shared_bytes(forward.key_width, forward.value_width) <= kSharedMax;
}

// One round of the backward on tensor cores; p and ds are the two halves of what the plain form keeps in
// fp32.
template <int kRowTiles, int kColumnWarps, int kTiles, bool kShared>
void grad_tiles(const AttentionBackward& args, const GradientView<bf16, bf16>& view, dim3 keys_grid,
                Stream& stream) {
  using Shape = MmaGradQueries<kRowTiles, kColumnWarps, kTiles, kShared>;
  const int bytes = Shape::shared_bytes(view.forward.key_width, view.forward.value_width);
  const auto kernel = attend_backward_queries_mma<kRowTiles, kColumnWarps, kTiles, kShared>;
  allow_shared(kernel, bytes);
  allow_shared(attend_backward_keys_mma, sizeof(MmaGradShared));
  const bool vectors = aligned_16(args.forward.q) && aligned_16(args.d_o);
  bf16* const p = reinterpret_cast<bf16*>(view.p);
  bf16* const ds = reinterpret_cast<bf16*>(view.ds);
  const dim3 grid(static_cast<unsigned>(view.last - view.first), runs_of(args.forward, Shape::kHeads));
  kernel<<<grid, Shape::kThreads, bytes, cuda_stream(stream)>>>(view, p, ds, vectors);
  attend_backward_keys_mma<<<keys_grid, kGradThreads, sizeof(MmaGradShared), cuda_stream(stream)>>>(
      view, p, ds, vectors);
}

// False where no tiling has room: by heads and widths alone.
bool grad_round_on_tensor_cores(const AttentionBackward& args, const GradientView<bf16, bf16>& view,
                                dim3 keys_grid, Stream& stream) {
  if (has_grad_room<1, 4, 18, true>(view)) {
    grad_tiles<1, 4, 18, true>(args, view, keys_grid, stream);
  } else if (has_grad_room<1, 4, 4, false>(view)) {
    grad_tiles<1, 4, 4, false>(args, view, keys_grid, stream);
  } else {
    return false;
  }
  return true;
}

template <class X, class K>
void backward(const AttentionBackward& args, Stream& stream) {
  const Attention& forward = args.forward;
  if constexpr (sizeof(X) == 2 && sizeof(K) == 2) {
    if (wgmma_grad_takes(args)) {
      if (forward.q.size(2) == 512) return backward_wgmma<WgmmaGrad<0>>(args, stream);
      return backward_wgmma<WgmmaGrad<64>>(args, stream);
    }
  }
  Arena& workspace = stream.workspace();
  const ArenaScope scope(workspace);
  const int64_t tokens = forward.q.size(0), heads = forward.q.size(1), kv_heads = forward.kv_heads;
  const bool shared = args.dvalues.empty();
  GradientView<X, K> view{};
  view.forward = view_of<X, K>(forward);
  view.d_o = heads_of<X>(args.d_o);
  view.dq = heads_of<X>(args.dq);
  const int key_width = view.forward.key_width, value_width = view.forward.value_width;
  const Tensor key_sums = workspace.zeros(DType::kF32, {tokens, kv_heads, key_width}, stream);
  view.key_sums = key_sums.f32();
  if (!shared) view.value_sums = workspace.zeros(DType::kF32, {tokens, kv_heads, value_width}, stream).f32();

  int64_t longest = 1;
  for (int64_t b = 0; b < forward.sequences.count(); ++b) {
    longest = std::max(longest, forward.sequences.end(b) - forward.sequences.begin(b));
  }
  view.entries = forward.indices.empty() ? longest : std::max<int64_t>(forward.indices.size(1), 1);
  const int64_t query_bytes = 2 * heads * view.entries * 4;
  const int64_t round = std::min(tokens, (workspace.capacity() - workspace.used() - 1024) / query_bytes);
  CHECK_GE(round, 1);  // the workspace holds one query's probabilities
  view.p = workspace.alloc(DType::kF32, {round * heads * view.entries}).f32();
  view.ds = workspace.alloc(DType::kF32, {round * heads * view.entries}).f32();

  const int key_pitch = fma_pitch(key_width), value_pitch = fma_pitch(value_width);
  const int bytes =
      4 * ((kFmaHeads + kFmaKeys) * key_pitch + (kFmaHeads + (shared ? 0 : kFmaKeys)) * value_pitch);
  const auto keys_kernel = attend_backward_keys<X, K>;
  allow_shared(keys_kernel, sizeof(GradShared));
  const auto slices = [](int width) { return (width + kGradColumns - 1) / kGradColumns; };
  const dim3 keys_grid(
      pieces_at_most(forward.sequences, kGradKeys),
      static_cast<unsigned>(kv_heads * (slices(key_width) + (shared ? 0 : slices(value_width)))));
  for (int64_t first = 0; first < tokens; first += round) {
    view.first = static_cast<int>(first);
    view.last = static_cast<int>(std::min(first + round, tokens));
    if constexpr (sizeof(X) == 2 && sizeof(K) == 2) {
      if (grad_round_on_tensor_cores(args, view, keys_grid, stream)) continue;
    }
    for_columns(key_width, [&](auto columns) {
      const auto kernel = attend_backward_queries<X, K, columns()>;
      allow_shared(kernel, bytes);
      const dim3 grid(static_cast<unsigned>(view.last - view.first), runs_of(forward, kFmaHeads));
      kernel<<<grid, kFmaThreads, bytes, cuda_stream(stream)>>>(view);
    });
    keys_kernel<<<keys_grid, kGradThreads, sizeof(GradShared), cuda_stream(stream)>>>(view);
  }
  const auto finish = [&](const float* sums, const Tensor& to, int width) {
    const Heads<X> rows = heads_of<X>(to);
    round_sums<X><<<static_cast<unsigned>(tokens), 256, 0, cuda_stream(stream)>>>(
        sums, rows, static_cast<int>(kv_heads), width);
  };
  finish(view.key_sums, args.dkeys, key_width);
  if (!shared) finish(view.value_sums, args.dvalues, value_width);
}

}  // namespace

template <>
void launch_cuda<Attention>(const Attention& args, Stream& stream) {
  forward(args, stream);
}

template <>
void launch_cuda<AttentionBackward>(const AttentionBackward& args, Stream& stream) {
  if (args.forward.q.size(0) == 0) return;
  for_grad_dtypes(args.forward, [&]<class X, class K>(X, K) { backward<X, K>(args, stream); });
  check_launch("attention_backward");
}

}  // namespace slipstream::kernels
