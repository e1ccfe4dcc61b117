// Objectives: from log-probs and advantages of one sample's action tokens to each token's loss and its
// derivative (rl-spec 4).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/status.h"

namespace slipstream::learner {

// Columns have one entry per action token of one sample. Where `selected` is 0 the other columns may hold
// anything, NaN included: masking is selection, so nothing of such a token reaches a result.
struct TokenColumns {
  absl::Span<const float> learner_logprob;
  absl::Span<const float> rollout_logprob;  // empty for demonstrations, which only `sft` takes
  absl::Span<const float> advantage;
  absl::Span<const uint8_t> selected;
};

struct ObjectiveOptions {
  double clip_low = 0.2;    // epsilon_l
  double clip_high = 0.28;  // epsilon_h
  double icepop_beta = 2.0;
};

// What became of a token: trained, or left out because its importance ratio was too low, too high or not a
// number.
enum class TokenFate : uint8_t { kUnselected, kTrained, kMaskedLow, kMaskedHigh, kNonFinite };

struct TokenLoss {
  float loss = 0.0f;
  float dlogprob = 0.0f;  // d loss / d learner_logprob; exactly 0 unless the token is trained
  float ratio = 1.0f;     // exp(learner - rollout), the difference clamped to +-20; of selected tokens with
                          // finite log-probs
  TokenFate fate = TokenFate::kUnselected;
};

// Sums are the caller's, with its normaliser. `out` has an entry per token.
using Objective = void (*)(const TokenColumns& columns, const ObjectiveOptions& options,
                           absl::Span<TokenLoss> out);

// Double-sided importance masking: loss = -f(r) A l with f(r) = r inside [1 - clip_low, 1 + clip_high], else
// 0, a constant.
void double_sided(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out);
// Supervised: loss = -l.
void sft(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out);
// PPO's clipped surrogate against the rollout policy: loss = -min(r A, clip(r) A). Schulman et al. 2017,
// arXiv:1707.06347.
void ppo_clip(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out);
// CISPO: loss = -min(r, 1 + clip_high) A l, the weight a constant; no token is left out. arXiv:2506.13585.
void cispo(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out);
// GSPO: PPO's surrogate with one ratio a sequence, exp(mean (learner - rollout)), and its mean advantage.
// arXiv:2507.18071.
void gspo(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out);
// IcePop with one update a batch: the old policy is the learner's own, so the PPO ratio inside is 1 and
// loss = -rho A l for 1/beta <= rho <= beta, rho = exp(learner - rollout) a constant; other tokens are left
// out.
void icepop(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out);

// The table of names. InvalidArgument: lists them.
absl::StatusOr<Objective> find_objective(const std::string& name);
std::vector<std::string> objective_names();

}  // namespace slipstream::learner
