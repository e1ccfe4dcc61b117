#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/kda/kda.h"
#include "kernels/kda/kda_reverse.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

KdaStateView view_of(const KdaState& cache) {
  if (cache.state.empty()) return {};
  return {.state = cache.state.f32(),
          .chunk_k = cache.chunk_k.f32(),
          .chunk_g = cache.chunk_g.f32(),
          .chunk_u = cache.chunk_u.f32(),
          .state_slot = cache.state.stride(0),
          .state_head = cache.state.stride(1),
          .state_row = cache.state.stride(2),
          .k_slot = cache.chunk_k.stride(0),
          .k_row = cache.chunk_k.stride(1),
          .k_head = cache.chunk_k.stride(2),
          .g_slot = cache.chunk_g.stride(0),
          .g_row = cache.chunk_g.stride(1),
          .g_head = cache.chunk_g.stride(2),
          .u_slot = cache.chunk_u.stride(0),
          .u_row = cache.chunk_u.stride(1),
          .u_head = cache.chunk_u.stride(2)};
}

// Slices of the state's columns, heads, sequences.
dim3 grid_of(int64_t dv, int64_t heads, int64_t sequences) {
  return dim3(static_cast<unsigned>(divide_up(dv, kWarp)), static_cast<unsigned>(heads),
              static_cast<unsigned>(sequences));
}

// Records in memory at once, twice: those of the chunks that a pass goes through and of those that follow.
constexpr int64_t kKdaRecordBytes = int64_t{96} << 20;

bool by_tensor_cores(const Kda& args) {
  bool fit = args.q.size(2) == kKdaWidth && args.v.size(2) == kKdaWidth;
  for (const Tensor* t : {&args.q, &args.k, &args.v, &args.log_decay, &args.o, &args.r, &args.span_states,
                          &args.cache.state, &args.cache.chunk_k, &args.cache.chunk_g, &args.cache.chunk_u}) {
    fit = fit && fours(*t);
  }
  return fit;
}

bool one_row_each(const Sequences& sequences) {
  for (int64_t b = 0; b < sequences.count(); ++b) {
    if (sequences.end(b) - sequences.begin(b) > 1) return false;
  }
  return true;
}

void forward_by_tensor_cores(const Kda& args, const KdaView<bf16>& view, Stream& stream) {
  const Sequences& sequences = args.sequences;
  const auto heads = static_cast<unsigned>(view.heads), count = static_cast<unsigned>(sequences.count());
  if (!args.slots.empty() && one_row_each(sequences)) {
    kda_decode<<<dim3(kKdaSlices, heads, count), kKdaDecodeWarps * kWarp, 0, cuda_stream(stream)>>>(view);
    return;
  }
  // A batch of few rows is one pass over whatever chunks the device finds: a captured launch may be repeated
  // with other positions. A longer one is cut where the host says that its chunks are.
  std::vector<int> chunk_begin = {0};
  int at_most = 0;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    const int rows = static_cast<int>(sequences.end(b) - sequences.begin(b));
    const int open = static_cast<int>(sequences.cached_tokens(b)) % kChunk;
    chunk_begin.push_back(chunk_begin.back() + (rows == 0 ? 0 : (open + rows + kChunk - 1) / kChunk));
    at_most += rows == 0 ? 0 : (rows + 2 * kChunk - 2) / kChunk;
  }
  const int each = std::max(static_cast<int>(kKdaRecordBytes / sizeof(KdaRecord)) / view.heads, 1);
  if (at_most == 0) return;
  // The first passes are short, as nothing hides the records of the first.
  const bool single = at_most <= std::max(each / 4, 1);
  const int chunks = single ? at_most : chunk_begin.back();
  const ArenaScope scope(stream.workspace());
  KdaRecord* records[2];
  float* carries[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t bytes =
        int64_t{std::min(chunks, each)} * view.heads * static_cast<int64_t>(sizeof(KdaRecord));
    records[i] = static_cast<KdaRecord*>(stream.workspace().alloc(DType::kF32, {bytes / 4}).raw());
    carries[i] = stream.workspace().alloc(DType::kF32, {view.heads, kKdaWidth, kKdaWidth}).f32();
  }
  allow_shared(kda_pass, sizeof(KdaPassShared));
  KdaPass pass{.view = view,
               .scanned = {},
               .prepared = {},
               .first_sequence = 0,
               .scan_blocks = 0,
               .carry_in = nullptr,
               .carry_out = nullptr};
  for (int n = 0, size = single ? chunks : std::max(each / 4, 1); pass.scanned.end < chunks; ++n) {
    pass.scanned = pass.prepared;
    pass.prepared = {records[n % 2], pass.scanned.end, std::min(pass.scanned.end + size, chunks)};
    size = std::min(2 * size, each);
    int last_sequence = static_cast<int>(count);
    pass.first_sequence = 0;
    if (!single) {
      while (chunk_begin[pass.first_sequence + 1] <= pass.scanned.begin) ++pass.first_sequence;
      while (chunk_begin[last_sequence - 1] >= pass.scanned.end && last_sequence > pass.first_sequence)
        --last_sequence;
    }
    pass.scan_blocks = pass.scanned.end > pass.scanned.begin
                           ? (last_sequence - pass.first_sequence) * view.heads * kKdaSlices
                           : 0;
    pass.carry_in = carries[n % 2];
    pass.carry_out = carries[(n + 1) % 2];
    const int64_t prepared = int64_t{pass.prepared.end - pass.prepared.begin} * view.heads;
    const auto blocks = static_cast<unsigned>(pass.scan_blocks + divide_up(prepared, kKdaScanWarps));
    kda_pass<<<blocks, kKdaPassThreads, sizeof(KdaPassShared), cuda_stream(stream)>>>(pass);
  }
  if (!args.slots.empty())
    kda_keep_rows<bf16, true><<<dim3(heads, count), 128, 0, cuda_stream(stream)>>>(view);
}

template <class X>
void forward(const Kda& args, Stream& stream) {
  KdaView<X> view{.q = heads_of<X>(args.q),
                  .k = heads_of<X>(args.k),
                  .v = heads_of<X>(args.v),
                  .o = heads_of<X>(args.o),
                  .log_decay = heads_of<float>(args.log_decay),
                  .r = heads_of<float>(args.r),
                  .beta = rows_of<float>(args.beta),
                  .batch = on_device(args.sequences),
                  .cache = view_of(args.cache),
                  .slots = data_of<int32_t>(args.slots),
                  .span_states = data_of<float>(args.span_states),
                  .span_stride = 0,
                  .span_head = 0,
                  .span_row = 0,
                  .heads = static_cast<int>(args.q.size(1)),
                  .dk = static_cast<int>(args.q.size(2)),
                  .dv = static_cast<int>(args.v.size(2))};
  if (!args.span_states.empty()) {
    view.span_stride = args.span_states.stride(0);
    view.span_head = args.span_states.stride(1);
    view.span_row = args.span_states.stride(2);
  }
  if constexpr (std::is_same_v<X, bf16>) {
    if (by_tensor_cores(args)) return forward_by_tensor_cores(args, view, stream);
  }
  allow_shared(kda_forward<X>, sizeof(KdaShared));
  const dim3 grid = grid_of(view.dv, view.heads, args.sequences.count());
  kda_forward<X><<<grid, kKdaThreads, sizeof(KdaShared), cuda_stream(stream)>>>(view);
  if (args.slots.empty()) return;
  kda_keep_rows<X, false><<<dim3(grid.y, grid.z), 128, 0, cuda_stream(stream)>>>(view);
}

bool by_tensor_cores(const KdaBackward& args) {
  bool fit = args.q.size(2) == kKdaWidth && args.r.size(2) == kKdaWidth && aligned_16(args.d_o) &&
             aligned_16(args.dv);
  for (const Tensor* t : {&args.q, &args.k, &args.log_decay, &args.r, &args.span_states})
    fit = fit && fours(*t);
  return fit;
}

constexpr int64_t kKdaBackwardBytes = int64_t{512} << 20;

void backward_by_tensor_cores(const KdaBackward& args, Stream& stream) {
  const Sequences& sequences = args.sequences;
  const int heads = static_cast<int>(args.q.size(1)), count = static_cast<int>(sequences.count());
  std::vector<int> span_begin = {0};
  for (int64_t b = 0; b < count; ++b)
    span_begin.push_back(span_begin.back() +
                         static_cast<int>(kda_spans(sequences.end(b) - sequences.begin(b))));
  const int spans = span_begin.back();
  if (spans == 0) return;
  KdaBackwardPass pass{.view = {.q = heads_of<bf16>(args.q),
                                .k = heads_of<bf16>(args.k),
                                .v = {},
                                .o = {},
                                .log_decay = heads_of<float>(args.log_decay),
                                .r = heads_of<float>(args.r),
                                .beta = rows_of<float>(args.beta),
                                .batch = on_device(sequences),
                                .cache = {},
                                .slots = nullptr,
                                .span_states = args.span_states.f32(),
                                .span_stride = args.span_states.stride(0),
                                .span_head = args.span_states.stride(1),
                                .span_row = args.span_states.stride(2),
                                .heads = heads,
                                .dk = kKdaWidth,
                                .dv = kKdaWidth},
                       .d_o = heads_of<bf16>(args.d_o),
                       .dq = heads_of<bf16>(args.dq),
                       .dk = heads_of<bf16>(args.dk),
                       .dv = heads_of<bf16>(args.dv),
                       .dlog_decay = heads_of<float>(args.dlog_decay),
                       .dbeta = rows_of<float>(args.dbeta)};
  // As many spans at once as there is room for: what is summed, and in which order, does not depend on it.
  Arena& arena = stream.workspace();
  const ArenaScope scope(arena);
  float* carries[2];
  for (float*& carry : carries) carry = arena.alloc(DType::kF32, {heads, kKdaWidth, kKdaWidth}).f32();
  constexpr int64_t kBytesAChunk = sizeof(KdaBackwardRecord) + 2 * (2 * kKdaMatrix + kChunk * kKdaWidth);
  const int64_t room = std::min(arena.capacity() - arena.used() - 4096, kKdaBackwardBytes) /
                       (kBytesAChunk * kSpanChunks * heads);
  const int each = static_cast<int>(std::clamp<int64_t>(room, 1, spans));
  const int64_t places = int64_t{each} * kSpanChunks * heads;
  pass.records = static_cast<KdaBackwardRecord*>(
      arena.alloc(DType::kF32, {places * static_cast<int64_t>(sizeof(KdaBackwardRecord) / 4)}).raw());
  pass.states = arena.alloc(DType::kBf16, {places, kKdaMatrix}).data<bf16>();
  pass.d_states = arena.alloc(DType::kBf16, {places, kKdaMatrix}).data<bf16>();
  pass.du = arena.alloc(DType::kBf16, {places, kChunk * kKdaWidth}).data<bf16>();
  constexpr int kRecordsShared = kKdaScanWarps * sizeof(KdaBackwardRecord);
  allow_shared(kda_prepare_backward, kRecordsShared);
  allow_shared(kda_reverse, sizeof(KdaReverseShared));
  allow_shared(kda_gradients, sizeof(KdaGradientsShared));
  const cudaStream_t queue = cuda_stream(stream);
  const auto all_heads = static_cast<unsigned>(heads);
  for (int n = (spans + each - 1) / each - 1; n >= 0; --n) {
    pass.begin = n * each;
    pass.end = std::min(pass.begin + each, spans);
    int last_sequence = count;
    pass.first_sequence = 0;
    while (span_begin[pass.first_sequence + 1] <= pass.begin) ++pass.first_sequence;
    while (span_begin[last_sequence - 1] >= pass.end) --last_sequence;
    pass.carry_in = carries[n % 2];
    pass.carry_out = carries[(n + 1) % 2];
    const auto own = static_cast<unsigned>(pass.end - pass.begin);
    kda_prepare_backward<<<own * all_heads, kKdaPassThreads, kRecordsShared, queue>>>(pass);
    kda_fold<<<dim3(kKdaSlices, all_heads, own), kKdaPassThreads, 0, queue>>>(pass);
    kda_reverse<<<dim3(kKdaSlices, all_heads, static_cast<unsigned>(last_sequence - pass.first_sequence)),
                  kKdaPassThreads, sizeof(KdaReverseShared), queue>>>(pass);
    kda_gradients<<<dim3(all_heads, own * kSpanChunks), kKdaWidth, sizeof(KdaGradientsShared), queue>>>(pass);
  }
}

template <class X>
void backward(const KdaBackward& args, Stream& stream) {
  if constexpr (std::is_same_v<X, bf16>) {
    if (by_tensor_cores(args)) return backward_by_tensor_cores(args, stream);
  }
  const KdaBackwardView<X> view{.q = heads_of<X>(args.q),
                                .k = heads_of<X>(args.k),
                                .d_o = heads_of<X>(args.d_o),
                                .dq = heads_of<X>(args.dq),
                                .dk = heads_of<X>(args.dk),
                                .dv_out = heads_of<X>(args.dv),
                                .log_decay = heads_of<float>(args.log_decay),
                                .r = heads_of<float>(args.r),
                                .dlog_decay = heads_of<float>(args.dlog_decay),
                                .beta = rows_of<float>(args.beta),
                                .dbeta = rows_of<float>(args.dbeta),
                                .batch = on_device(args.sequences),
                                .span_states = args.span_states.f32(),
                                .span_stride = args.span_states.stride(0),
                                .span_head = args.span_states.stride(1),
                                .span_row = args.span_states.stride(2),
                                .heads = static_cast<int>(args.q.size(1)),
                                .dk_width = static_cast<int>(args.q.size(2)),
                                .dv_width = static_cast<int>(args.r.size(2))};
  allow_shared(kda_backward<X>, sizeof(KdaBackwardShared));
  const dim3 grid(static_cast<unsigned>(view.heads), static_cast<unsigned>(args.sequences.count()));
  kda_backward<X><<<grid, kKdaThreads, sizeof(KdaBackwardShared), cuda_stream(stream)>>>(view);
}

template <class X>
void recurrent(const KdaRecurrent& args, Stream& stream) {
  const KdaRecurrentView<X> view{.q = heads_of<X>(args.q),
                                 .k = heads_of<X>(args.k),
                                 .v = heads_of<X>(args.v),
                                 .o = heads_of<X>(args.o),
                                 .log_decay = heads_of<float>(args.log_decay),
                                 .beta = rows_of<float>(args.beta),
                                 .batch = on_device(args.sequences),
                                 .state = args.state.f32(),
                                 .state_slot = args.state.stride(0),
                                 .state_head = args.state.stride(1),
                                 .state_row = args.state.stride(2),
                                 .slots = args.slots.i32(),
                                 .dk = static_cast<int>(args.q.size(2)),
                                 .dv = static_cast<int>(args.v.size(2))};
  const dim3 grid = grid_of(view.dv, args.q.size(1), args.sequences.count());
  kda_recurrent<X><<<grid, kKdaThreads, 0, cuda_stream(stream)>>>(view);
}

// Nothing to launch: a sequence without rows changes only a recurrent state.
bool nothing(const Tensor& q, const Sequences& sequences) { return q.size(1) == 0 || sequences.count() == 0; }

}  // namespace

template <>
void launch_cuda<Kda>(const Kda& args, Stream& stream) {
  if (nothing(args.q, args.sequences)) return;
  with_type(args.q.dtype(), [&](auto x) { forward<decltype(x)>(args, stream); });
  check_launch("kda");
}

template <>
void launch_cuda<KdaBackward>(const KdaBackward& args, Stream& stream) {
  if (nothing(args.q, args.sequences)) return;
  with_type(args.q.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
  check_launch("kda_backward");
}

template <>
void launch_cuda<KdaRecurrent>(const KdaRecurrent& args, Stream& stream) {
  if (nothing(args.q, args.sequences)) return;
  with_type(args.q.dtype(), [&](auto x) { recurrent<decltype(x)>(args, stream); });
  check_launch("kda_recurrent");
}

}  // namespace slipstream::kernels
