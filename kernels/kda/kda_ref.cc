#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/kda/kda.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// What Kda and KdaRecurrent have in common.
template <class Args>
absl::Status expect_inputs(const Operands& op, const Args& args) {
  RETURN_IF_ERROR(expect_activation(op, "q", args.q, {-1, -1, -1}));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), dk = args.q.size(2);
  RETURN_IF_ERROR(
      expect_supported(op, on_host(args.q) || dk <= kKdaWidthCuda, "q: more than 128 channels on CUDA"));
  RETURN_IF_ERROR(expect_activation(op, "k", args.k, {tokens, heads, dk}));
  RETURN_IF_ERROR(expect_activation(op, "v", args.v, {tokens, heads, -1}));
  RETURN_IF_ERROR(expect_tensor(op, "log_decay", args.log_decay, DType::kF32, {tokens, heads, dk}));
  RETURN_IF_ERROR(expect_tensor(op, "beta", args.beta, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_sequences(op, args.sequences, tokens));
  return expect_activation(op, "o", args.o, {tokens, heads, args.v.size(2)});
}

// S [dk, dv] of one head, in double.
struct State {
  int64_t dk, dv;
  std::vector<double> values;

  State(int64_t dk_in, int64_t dv_in) : dk(dk_in), dv(dv_in), values(static_cast<size_t>(dk * dv), 0.0) {}
  double& operator()(int64_t i, int64_t j) { return values[static_cast<size_t>(i * dv + j)]; }

  void load(const Tensor& states, int64_t index, int64_t head) {
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j) (*this)(i, j) = states.row(index, head)[i * states.stride(2) + j];
    }
  }
  void store(const Tensor& states, int64_t index, int64_t head) {
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j)
        states.row(index, head)[i * states.stride(2) + j] = static_cast<float>((*this)(i, j));
    }
  }
  template <class Decay>
  void decay(Decay&& a) {
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j) (*this)(i, j) *= a(i);
    }
  }
  // Sᵀ x.
  double read(const float* x, int64_t j) {
    double sum = 0.0;
    for (int64_t i = 0; i < dk; ++i) sum += (*this)(i, j) * x[i];
    return sum;
  }
  template <class U>
  void add(const float* k, U&& u) {
    for (int64_t i = 0; i < dk; ++i) {
      for (int64_t j = 0; j < dv; ++j) (*this)(i, j) += k[i] * u(j);
    }
  }
};

// One token of the recurrence: advances the state, writes o, returns r.
template <class Args>
std::vector<double> step(const Args& args, int64_t t, int64_t head, State& state) {
  const float* g = args.log_decay.row(t, head);
  const float* k = args.k.row(t, head);
  state.decay([&](int64_t i) { return std::exp(double{g[i]}); });
  std::vector<double> r(static_cast<size_t>(state.dv));
  for (int64_t j = 0; j < state.dv; ++j)
    r[static_cast<size_t>(j)] = args.v.row(t, head)[j] - state.read(k, j);
  const double beta = args.beta.row(t)[head];
  state.add(k, [&](int64_t j) { return beta * r[static_cast<size_t>(j)]; });
  for (int64_t j = 0; j < state.dv; ++j) {
    args.o.row(t, head)[j] = static_cast<float>(state.read(args.q.row(t, head), j));
  }
  return r;
}

float* live_row(const Tensor& rows, int64_t slot, int64_t i, int64_t head) {
  return rows.row(slot, i) + head * rows.stride(2);
}

}  // namespace

int64_t kda_spans(const Sequences& sequences) {
  int64_t spans = 0;
  for (int64_t b = 0; b < sequences.count(); ++b) spans += kda_spans(sequences.end(b) - sequences.begin(b));
  return spans;
}

absl::Status validate(const Kda& args) {
  const Operands op("kda");
  RETURN_IF_ERROR(expect_inputs(op, args));
  const int64_t heads = args.q.size(1), dk = args.q.size(2), dv = args.v.size(2);
  const KdaState& cache = args.cache;
  const bool absent = cache.state.empty();
  RETURN_IF_ERROR(expect_that(op,
                              cache.chunk_k.empty() == absent && cache.chunk_g.empty() == absent &&
                                  cache.chunk_u.empty() == absent && args.slots.empty() == absent,
                              "cache and slots: expected all or none"));
  if (absent) {
    RETURN_IF_ERROR(
        expect_that(op, args.sequences.whole(), "cache: needed where a sequence has cached tokens"));
  } else {
    RETURN_IF_ERROR(expect_tensor(op, "cache.state", cache.state, DType::kF32, {-1, heads, dk, dv}));
    const int64_t slots = cache.state.size(0);
    RETURN_IF_ERROR(
        expect_tensor(op, "cache.chunk_k", cache.chunk_k, DType::kF32, {slots, kKdaChunk, heads, dk}));
    RETURN_IF_ERROR(
        expect_tensor(op, "cache.chunk_g", cache.chunk_g, DType::kF32, {slots, kKdaChunk, heads, dk}));
    RETURN_IF_ERROR(
        expect_tensor(op, "cache.chunk_u", cache.chunk_u, DType::kF32, {slots, kKdaChunk, heads, dv}));
    RETURN_IF_ERROR(expect_slots(op, args.slots, args.sequences, slots));
  }
  RETURN_IF_ERROR(expect_that(op, args.span_states.empty() == args.r.empty(),
                              "span_states and r: expected both or neither"));
  if (args.r.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(expect_that(op, args.sequences.whole(),
                              "span_states: only for whole sequences (cached all 0)"));
  RETURN_IF_ERROR(expect_tensor(op, "span_states", args.span_states, DType::kF32,
                                {kda_spans(args.sequences), heads, dk, dv}));
  return expect_tensor(op, "r", args.r, DType::kF32, {args.v.size(0), heads, dv});
}

absl::Status validate(const KdaBackward& args) {
  const Operands op("kda_backward");
  RETURN_IF_ERROR(expect_activation(op, "q", args.q, {-1, -1, -1}));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), dk = args.q.size(2);
  RETURN_IF_ERROR(expect_activation(op, "k", args.k, {tokens, heads, dk}));
  RETURN_IF_ERROR(expect_tensor(op, "log_decay", args.log_decay, DType::kF32, {tokens, heads, dk}));
  RETURN_IF_ERROR(expect_tensor(op, "beta", args.beta, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_sequences(op, args.sequences, tokens));
  RETURN_IF_ERROR(expect_whole(op, args.sequences));
  RETURN_IF_ERROR(expect_tensor(op, "r", args.r, DType::kF32, {tokens, heads, -1}));
  const int64_t dv = args.r.size(2);
  RETURN_IF_ERROR(expect_supported(op, on_host(args.q) || std::max(dk, dv) <= kKdaWidthCuda,
                                   "q, r: more than 128 channels on CUDA"));
  RETURN_IF_ERROR(expect_tensor(op, "span_states", args.span_states, DType::kF32,
                                {kda_spans(args.sequences), heads, dk, dv}));
  RETURN_IF_ERROR(expect_activation(op, "d_o", args.d_o, {tokens, heads, dv}));
  RETURN_IF_ERROR(expect_activation(op, "dq", args.dq, {tokens, heads, dk}));
  RETURN_IF_ERROR(expect_activation(op, "dk", args.dk, {tokens, heads, dk}));
  RETURN_IF_ERROR(expect_tensor(op, "dlog_decay", args.dlog_decay, DType::kF32, {tokens, heads, dk}));
  RETURN_IF_ERROR(expect_activation(op, "dv", args.dv, {tokens, heads, dv}));
  return expect_tensor(op, "dbeta", args.dbeta, DType::kF32, {tokens, heads});
}

absl::Status validate(const KdaRecurrent& args) {
  const Operands op("kda_recurrent");
  RETURN_IF_ERROR(expect_inputs(op, args));
  RETURN_IF_ERROR(expect_tensor(op, "state", args.state, DType::kF32,
                                {-1, args.q.size(1), args.q.size(2), args.v.size(2)}));
  return expect_slots(op, args.slots, args.sequences, args.state.size(0));
}

void reference(const Kda& args) {
  CHECK_OK(validate(args));
  const int64_t dk = args.q.size(2), dv = args.v.size(2);
  const KdaState& cache = args.cache;
  int64_t span = 0;
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t begin = args.sequences.begin(b), cached = args.sequences.cached_tokens(b);
    const int64_t slot = args.slots.empty() ? 0 : args.slots.i32()[b];
    for (int64_t head = 0; head < args.q.size(1); ++head) {
      State state(dk, dv);
      if (cached >= kKdaChunk) state.load(cache.state, slot, head);
      for (int64_t i = 0; i < cached % kKdaChunk; ++i) {
        state.decay([&](int64_t j) { return live_row(cache.chunk_g, slot, i, head)[j]; });
        state.add(live_row(cache.chunk_k, slot, i, head),
                  [&](int64_t j) { return live_row(cache.chunk_u, slot, i, head)[j]; });
      }
      for (int64_t t = begin; t < args.sequences.end(b); ++t) {
        const int64_t position = cached + t - begin;
        if (!args.r.empty() && position % kKdaSpan == 0)
          state.store(args.span_states, span + position / kKdaSpan, head);
        const std::vector<double> r = step(args, t, head, state);
        for (int64_t j = 0; j < dv && !args.r.empty(); ++j)
          args.r.row(t, head)[j] = static_cast<float>(r[static_cast<size_t>(j)]);
        if (cache.state.empty()) continue;
        const int64_t i = position % kKdaChunk;
        for (int64_t j = 0; j < dk; ++j) {
          live_row(cache.chunk_k, slot, i, head)[j] = args.k.row(t, head)[j];
          live_row(cache.chunk_g, slot, i, head)[j] = std::exp(args.log_decay.row(t, head)[j]);
        }
        for (int64_t j = 0; j < dv; ++j) {
          live_row(cache.chunk_u, slot, i, head)[j] =
              static_cast<float>(args.beta.row(t)[head] * r[static_cast<size_t>(j)]);
        }
        if (i == kKdaChunk - 1) state.store(cache.state, slot, head);
      }
    }
    span += kda_spans(args.sequences.end(b) - begin);
  }
}

void reference(const KdaRecurrent& args) {
  CHECK_OK(validate(args));
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t slot = args.slots.i32()[b];
    for (int64_t head = 0; head < args.q.size(1); ++head) {
      State state(args.q.size(2), args.v.size(2));
      if (args.sequences.cached_tokens(b) > 0) state.load(args.state, slot, head);
      for (int64_t t = args.sequences.begin(b); t < args.sequences.end(b); ++t) step(args, t, head, state);
      state.store(args.state, slot, head);
    }
  }
}

// The recurrence run backwards. With D the gradient of the state after a token, and S' = Diag(a) S of before:
//   D += q doᵀ, dq = S do;  du = Dᵀ k, dk = D u;  dr = beta du, dbeta = du r, dv = dr;
//   dk -= S' dr, D -= k drᵀ;  dg = rowsum(D * S');  D <- Diag(a) D.
void reference(const KdaBackward& args) {
  CHECK_OK(validate(args));
  const int64_t dk = args.q.size(2), dv = args.r.size(2);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const int64_t begin = args.sequences.begin(b), end = args.sequences.end(b);
    for (int64_t head = 0; head < args.q.size(1); ++head) {
      const auto decay = [&](int64_t t) {
        return [&, t](int64_t i) { return std::exp(double{args.log_decay.row(t, head)[i]}); };
      };
      const auto u = [&](int64_t t) {
        return [&, t](int64_t j) { return double{args.beta.row(t)[head]} * args.r.row(t, head)[j]; };
      };
      std::vector<State> states = {State(dk, dv)};  // before each token, and after the last
      for (int64_t t = begin; t < end; ++t) {
        states.push_back(states.back());
        states.back().decay(decay(t));
        states.back().add(args.k.row(t, head), u(t));
      }
      State d_state(dk, dv);
      for (int64_t t = end - 1; t >= begin; --t) {
        const float* d_o = args.d_o.row(t, head);
        const float* k = args.k.row(t, head);
        const float* r = args.r.row(t, head);
        const double beta = args.beta.row(t)[head];
        State& after = states[static_cast<size_t>(t - begin + 1)];
        State decayed = states[static_cast<size_t>(t - begin)];
        decayed.decay(decay(t));
        d_state.add(args.q.row(t, head), [&](int64_t j) { return double{d_o[j]}; });
        std::vector<double> dr(static_cast<size_t>(dv));
        double dbeta = 0.0;
        for (int64_t j = 0; j < dv; ++j) {
          const double du = d_state.read(k, j);
          dbeta += du * r[j];
          dr[static_cast<size_t>(j)] = beta * du;
          args.dv.row(t, head)[j] = static_cast<float>(beta * du);
        }
        args.dbeta.row(t)[head] = static_cast<float>(dbeta);
        for (int64_t i = 0; i < dk; ++i) {
          double dq = 0.0, dkey = 0.0, dg = 0.0;
          for (int64_t j = 0; j < dv; ++j) {
            dq += after(i, j) * d_o[j];
            dkey += d_state(i, j) * beta * r[j] - decayed(i, j) * dr[static_cast<size_t>(j)];
            d_state(i, j) -= k[i] * dr[static_cast<size_t>(j)];
            dg += d_state(i, j) * decayed(i, j);
          }
          args.dq.row(t, head)[i] = static_cast<float>(dq);
          args.dk.row(t, head)[i] = static_cast<float>(dkey);
          args.dlog_decay.row(t, head)[i] = static_cast<float>(dg);
        }
        d_state.decay(decay(t));
      }
    }
  }
}

}  // namespace slipstream::kernels
