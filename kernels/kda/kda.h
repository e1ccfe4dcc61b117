// KDA (Kimi Delta Attention): linear attention with a per-channel forget gate and the delta rule, per head
//   S <- Diag(a) S, a = exp(g);  r = v - Sᵀ k;  S <- S + k uᵀ, u = beta r;  o = Sᵀ q     S: [d_k, d_v], zero
//   at the start
// Kimi Linear 2025, arXiv:2510.26692. The chunked form follows from unrolling it over a chunk with start
// state S0. With E_ij = a_{j+1} ... a_i (per channel; E_ii = 1) and P_i = a_0 ... a_i:
//   r_i = v_i - (k_i P_i)ᵀ S0 - sum_{j<i} A_ij u_j,      A_ij = sum_d k_id k_jd E_ijd
//   o_i = (q_i P_i)ᵀ S0 + sum_{j<=i} B_ij u_j,           B_ij = sum_d q_id k_jd E_ijd
//   S_C = Diag(P_C) S0 + sum_j (k_j E_Cj) u_jᵀ
// Decays are multiplied, never divided and never taken as differences of summed logarithms: no log-decay
// overflows, and the error is that of the recurrence also where strong and weak decays follow one another.
//
// Chunks are aligned to absolute positions (multiples of kKdaChunk from the sequence start) and each row is
// computed from the chunk's start state and the chunk's earlier rows with one arithmetic, whether the row
// arrives in a prefill, in a piece of one, alone in decode or in training: the bits are the same.
//
// On CUDA q, k, v, o and their gradients are f32 or bf16, all of a call alike; the rest is f32. In bf16 with d_k = d_v =
// 128 the tensor cores compute: factors of products with the state are bf16 (k P, q P, S) where it is read and tf32
// (k_j E_Cj, u_j) where it is written, as are B_ij and u_j in o; A, B, u, decays and all sums are f32. A row's bits are as
// much its own there: a product's element depends on its row and column alone. After 16K tokens the state is within 3e-4 of
// the f32 form's where decays are typical or strong, 2e-3 where nothing is forgotten. In the backward all factors are bf16;
// gradients are within 3e-3.
#pragma once

#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// Sixteen rows: the A and B of a chunk are then one register wide, and the work inside chunks, which grows
// with their length, stays small beside the products with the state (at d = 64: 2 of 14 thousand
// multiply-adds a token; with 64 rows it would be 8 of 20). Decode reads 8 earlier rows on average beside the
// state and writes the state every 16th token. Pages of 64 tokens end where chunks end.
constexpr int64_t kKdaChunk = 16;
// Training keeps the state at the start of every span of four chunks; the backward recomputes those between.
constexpr int64_t kKdaSpan = 64;

// Channels d_k that the CUDA form takes; its backward also d_v.
constexpr int64_t kKdaWidthCuda = 128;

// What a sequence keeps: the state at the start of its current chunk and the rows of that chunk so far. With
// p tokens seen, p % kKdaChunk rows are live; a full chunk is folded into the state at once.
struct KdaState {
  Tensor state;    // [slots, h, dk, dv] f32; read only where cached >= kKdaChunk (before that it is zero)
  Tensor chunk_k;  // [slots, kKdaChunk, h, dk] f32
  Tensor chunk_g;  // [slots, kKdaChunk, h, dk] f32, as decays a = exp(g)
  Tensor chunk_u;  // [slots, kKdaChunk, h, dv] f32
};

struct Kda {
  Tensor q;             // in   [T, h, dk] f32, outer dimensions strided
  Tensor k;             // in   [T, h, dk] f32
  Tensor v;             // in   [T, h, dv] f32
  Tensor log_decay;     // in   [T, h, dk] f32, g <= 0
  Tensor beta;          // in   [T, h] f32
  Sequences sequences;  // T rows
  KdaState cache;       // in/out; may be absent with `slots`: every cached is then 0 and nothing is kept
  Tensor slots;         // in   [B] i32, the slot of each sequence in the cache, each used once
  Tensor o;             // out  [T, h, dv] f32
  // For the backward, both or neither; every cached is then 0. Sequence after sequence, ceil(n / kKdaSpan)
  // spans each.
  Tensor span_states;  // out  [spans, h, dk, dv] f32, the state at the start of each span
  Tensor r;            // out  [T, h, dv] f32, v - Sᵀ k: what a row writes, before beta
};

// Spans that `rows` rows of a whole sequence fill, and those of all sequences together.
inline int64_t kda_spans(int64_t rows) { return (rows + kKdaSpan - 1) / kKdaSpan; }
int64_t kda_spans(const Sequences& sequences);

// For whole sequences (every cached == 0). r stands in for v.
struct KdaBackward {
  Tensor q, k, log_decay, beta;  // in, as in Kda
  Sequences sequences;
  Tensor span_states;         // in   [spans, h, dk, dv] f32
  Tensor r;                   // in   [T, h, dv] f32
  Tensor d_o;                 // in   [T, h, dv] f32
  Tensor dq, dk, dlog_decay;  // out  [T, h, dk] f32
  Tensor dv;                  // out  [T, h, dv] f32
  Tensor dbeta;               // out  [T, h] f32
};

// The plain recurrence, one token after the other: the fast decode when bitwise equality with prefill is not
// asked for. reference(Kda) computes this too. The cache is just the state after the last token.
struct KdaRecurrent {
  Tensor q, k, v, log_decay, beta;  // in, as in Kda
  Sequences sequences;
  Tensor state;  // in/out [slots, h, dk, dv] f32; counts as zero where cached == 0
  Tensor slots;  // in   [B] i32, each used once
  Tensor o;      // out  [T, h, dv] f32
};

// InvalidArgument: shapes or dtypes disagree. Unimplemented: no code for this device.
absl::Status validate(const Kda& args);
absl::Status validate(const KdaBackward& args);
absl::Status validate(const KdaRecurrent& args);

// The definition: plain loops over CPU tensors.
void reference(const Kda& args);
void reference(const KdaBackward& args);
void reference(const KdaRecurrent& args);

// Enqueues and returns (on the CPU: computes). Dies unless validate(args) is OK.
void launch(const Kda& args, Stream& stream);
void launch(const KdaBackward& args, Stream& stream);
void launch(const KdaRecurrent& args, Stream& stream);

}  // namespace slipstream::kernels
