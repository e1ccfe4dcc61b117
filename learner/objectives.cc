#include "learner/objectives.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/check.h"

namespace slipstream::learner {
namespace {

// exp(20) is far outside every interval and far from overflow.
constexpr double kLogRatioMax = 20.0;

constexpr std::pair<const char*, Objective> kObjectives[] = {
    {"double_sided", &double_sided},
    {"ppo_clip", &ppo_clip},
    {"cispo", &cispo},
    {"gspo", &gspo},
    {"icepop", &icepop},
    {"sft", &sft},
};

double clamped_ratio(double log_ratio) {
  return std::exp(std::clamp(log_ratio, -kLogRatioMax, kLogRatioMax));
}

TokenFate side_of(double ratio, double low, double high) {
  return ratio < low ? TokenFate::kMaskedLow : ratio > high ? TokenFate::kMaskedHigh : TokenFate::kTrained;
}

void put(TokenLoss& token, double loss, double dlogprob) {
  token.loss = static_cast<float>(loss);
  token.dlogprob = static_cast<float>(dlogprob);
}

// Calls each(token, ratio, advantage, logprob) for selected tokens with finite log-probs, having set ratio
// and fate kTrained.
template <class F>
void for_each_selected(const TokenColumns& columns, absl::Span<TokenLoss> out, F each) {
  CHECK_EQ(out.size(), columns.learner_logprob.size());
  CHECK_EQ(out.size(), columns.rollout_logprob.size());
  CHECK_EQ(out.size(), columns.advantage.size());
  CHECK_EQ(out.size(), columns.selected.size());
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = {};
    if (columns.selected[i] == 0) continue;
    const double logprob = columns.learner_logprob[i], rollout = columns.rollout_logprob[i];
    if (!std::isfinite(logprob) || !std::isfinite(rollout)) {
      out[i].fate = TokenFate::kNonFinite;
      continue;
    }
    const double ratio = clamped_ratio(logprob - rollout);
    out[i].ratio = static_cast<float>(ratio);
    out[i].fate = TokenFate::kTrained;
    each(out[i], ratio, double{columns.advantage[i]}, logprob);
  }
}

// Tokens whose fate is a mask keep loss 0 and gradient 0; the others weigh -weight A l.
void weighted(TokenLoss& token, double weight, double advantage, double logprob) {
  put(token, -weight * advantage * logprob, -weight * advantage);
}

// PPO's surrogate: the gradient flows unless clipping makes the objective flat on the side the advantage
// pushes to.
bool surrogate_is_flat(double ratio, double advantage, const ObjectiveOptions& options) {
  return (advantage > 0.0 && ratio > 1.0 + options.clip_high) ||
         (advantage < 0.0 && ratio < 1.0 - options.clip_low);
}

double surrogate(double ratio, double advantage, const ObjectiveOptions& options) {
  const double clipped = std::clamp(ratio, 1.0 - options.clip_low, 1.0 + options.clip_high);
  return std::min(ratio * advantage, clipped * advantage);
}

}  // namespace

void double_sided(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out) {
  for_each_selected(columns, out, [&](TokenLoss& token, double ratio, double advantage, double logprob) {
    token.fate = side_of(ratio, 1.0 - options.clip_low, 1.0 + options.clip_high);
    if (token.fate == TokenFate::kTrained) weighted(token, ratio, advantage, logprob);
  });
}

void ppo_clip(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out) {
  for_each_selected(columns, out, [&](TokenLoss& token, double ratio, double advantage, double) {
    const bool flat = surrogate_is_flat(ratio, advantage, options);
    if (flat) token.fate = advantage > 0.0 ? TokenFate::kMaskedHigh : TokenFate::kMaskedLow;
    put(token, -surrogate(ratio, advantage, options), flat ? 0.0 : -ratio * advantage);
  });
}

void cispo(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out) {
  for_each_selected(columns, out, [&](TokenLoss& token, double ratio, double advantage, double logprob) {
    weighted(token, std::min(ratio, 1.0 + options.clip_high), advantage, logprob);
  });
}

void gspo(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out) {
  double log_ratio = 0.0, advantage = 0.0, count = 0.0;
  for_each_selected(columns, out, [](TokenLoss&, double, double, double) {});
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].fate != TokenFate::kTrained) continue;
    log_ratio += double{columns.learner_logprob[i]} - double{columns.rollout_logprob[i]};
    advantage += columns.advantage[i];
    count += 1.0;
  }
  if (count == 0.0) return;
  // d ratio / d l_i = ratio / count, and the sequence's surrogate stands once for each of its `count` tokens.
  const double ratio = clamped_ratio(log_ratio / count);
  advantage /= count;
  const bool flat = surrogate_is_flat(ratio, advantage, options);
  for (TokenLoss& token : out) {
    if (token.fate != TokenFate::kTrained) continue;
    if (flat) token.fate = advantage > 0.0 ? TokenFate::kMaskedHigh : TokenFate::kMaskedLow;
    put(token, -surrogate(ratio, advantage, options), flat ? 0.0 : -ratio * advantage);
  }
}

void icepop(const TokenColumns& columns, const ObjectiveOptions& options, absl::Span<TokenLoss> out) {
  for_each_selected(columns, out, [&](TokenLoss& token, double ratio, double advantage, double logprob) {
    token.fate = side_of(ratio, 1.0 / options.icepop_beta, options.icepop_beta);
    if (token.fate == TokenFate::kTrained) weighted(token, ratio, advantage, logprob);
  });
}

void sft(const TokenColumns& columns, const ObjectiveOptions&, absl::Span<TokenLoss> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = {};
    if (columns.selected[i] == 0) continue;
    const double logprob = columns.learner_logprob[i];
    out[i].fate = std::isfinite(logprob) ? TokenFate::kTrained : TokenFate::kNonFinite;
    if (out[i].fate == TokenFate::kTrained) put(out[i], -logprob, -1.0);
  }
}

absl::StatusOr<Objective> find_objective(const std::string& name) {
  for (const auto& [key, objective] : kObjectives) {
    if (name == key) return objective;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("objective \"", name, "\", expected ", absl::StrJoin(objective_names(), " | ")));
}

std::vector<std::string> objective_names() {
  std::vector<std::string> names;
  for (const auto& [key, objective] : kObjectives) names.push_back(key);
  return names;
}

}  // namespace slipstream::learner
