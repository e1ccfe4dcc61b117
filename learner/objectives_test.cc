// Goal: case C8 number by number; each objective's dlogprob is the derivative of its loss where it is defined
// as one; nothing of an unselected token reaches a result.
#include "learner/objectives.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace slipstream::learner {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Columns {
  std::vector<float> rollout = {-1, -.5f, -2, -.25f, -1.5f, -3, -.7f};
  std::vector<float> learner = {-1.235722f, -.710721f, -2, -.010983f, -1.245358f, -3, -.7f};
  std::vector<uint8_t> selected = {1, 1, 1, 1, 1, 1, 0};
  std::vector<float> advantage = {2, 2, 2, 2, 2, -1, kNan};
  std::vector<TokenLoss> out;

  std::vector<TokenLoss>& run(Objective objective, const ObjectiveOptions& options = {}) {
    out.assign(learner.size(), {});
    objective({learner, rollout, advantage, selected}, options, absl::MakeSpan(out));
    return out;
  }
  double loss() const {
    double sum = 0.0;
    for (const TokenLoss& token : out) sum += token.loss;
    return sum;
  }
};

TEST(Objectives, CaseC8) {
  Columns c;
  c.run(&double_sided);
  const double expected[] = {0, -.27, -1.0 / 3, -.4233333, 0, 1.0 / 6, 0};
  double weighted_advantage = 0.0;
  for (size_t i = 0; i < c.out.size(); ++i) {
    EXPECT_NEAR(c.out[i].dlogprob / 6, expected[i], 1e-6) << i;
    weighted_advantage -= c.out[i].dlogprob / 6.0;
  }
  EXPECT_NEAR(c.loss() / 6, .3632109, 1e-6);
  EXPECT_NEAR(weighted_advantage, .86, 1e-6);
  EXPECT_EQ(c.out[0].fate, TokenFate::kMaskedLow);
  EXPECT_EQ(c.out[4].fate, TokenFate::kMaskedHigh);
  EXPECT_EQ(c.out[6].fate, TokenFate::kUnselected);
  EXPECT_NEAR(c.out[3].ratio, 1.27, 1e-6);
}

TEST(Objectives, IntervalIsClosed) {
  Columns c;
  c.rollout = {0, 0, 0, 0};
  // Options chosen so that the ratio 1 stands exactly on a bound.
  c.learner = {0, 0, 0, 0};
  c.selected = {1, 1, 1, 1};
  c.advantage = {1, 1, 1, 1};
  for (const TokenLoss& token : c.run(&double_sided, {.clip_low = 0.0, .clip_high = 0.0})) {
    EXPECT_EQ(token.fate, TokenFate::kTrained);
    EXPECT_EQ(token.dlogprob, -1.0f);
  }
}

TEST(Objectives, HugeLogRatioIsMaskedWithoutInfinity) {
  for (const std::string& name : objective_names()) {
    Columns c;
    c.rollout.assign(7, -100.0f);
    c.learner.assign(7, 0.0f);
    c.advantage.assign(7, 1.0f);
    for (const TokenLoss& token : c.run(*find_objective(name))) {
      EXPECT_TRUE(std::isfinite(token.loss) && std::isfinite(token.dlogprob)) << name;
      if (name == "double_sided" || name == "icepop" || name == "ppo_clip") {
        EXPECT_EQ(token.dlogprob, 0.0f) << name;
        EXPECT_NE(token.fate, TokenFate::kTrained) << name;
      }
    }
  }
}

TEST(Objectives, UnselectedAndNonFiniteTokensReachNothing) {
  for (const std::string& name : objective_names()) {
    Columns clean, dirty;
    clean.selected = dirty.selected = {1, 0, 1, 0, 1, 1, 0};
    for (const size_t i : {1, 3, 6}) {
      dirty.learner[i] = kNan;
      dirty.rollout[i] = -kInf;
      dirty.advantage[i] = kInf;
    }
    clean.run(*find_objective(name));
    dirty.run(*find_objective(name));
    for (size_t i = 0; i < clean.out.size(); ++i) {
      EXPECT_EQ(clean.out[i].loss, dirty.out[i].loss) << name << i;
      EXPECT_EQ(clean.out[i].dlogprob, dirty.out[i].dlogprob) << name << i;
    }
    // Case C10: a non-finite log-prob masks its own token only.
    Columns hole = clean;
    hole.learner[2] = kNan;
    hole.run(*find_objective(name));
    EXPECT_EQ(hole.out[2].fate, TokenFate::kNonFinite) << name;
    EXPECT_EQ(hole.out[2].dlogprob, 0.0f) << name;
    if (name != "gspo") {
      EXPECT_EQ(hole.out[0].dlogprob, clean.out[0].dlogprob) << name;
    }
    EXPECT_TRUE(std::isfinite(hole.loss())) << name;
  }
}

TEST(Objectives, EverythingMaskedGivesZero) {
  for (const std::string& name : objective_names()) {
    Columns c;
    c.selected.assign(7, 0);
    c.run(*find_objective(name));
    EXPECT_EQ(c.loss(), 0.0) << name;
    for (const TokenLoss& token : c.out) EXPECT_EQ(token.dlogprob, 0.0f) << name;
  }
  Columns c;
  c.rollout.assign(7, -50.0f);
  c.run(&double_sided);
  EXPECT_EQ(c.loss(), 0.0);
}

// sft, ppo_clip and gspo are true derivatives; the others hold their weight constant.
TEST(Objectives, DerivativesOfSurrogates) {
  for (const char* name : {"sft", "ppo_clip", "gspo"}) {
    Columns c;
    c.advantage = {2, -2, 2, .5f, -1, -1, kNan};
    const std::vector<TokenLoss> at = c.run(*find_objective(name));
    for (size_t i = 0; i < 6; ++i) {
      constexpr float kStep = 1e-3f;
      Columns up = c, down = c;
      up.learner[i] += kStep;
      down.learner[i] -= kStep;
      up.run(*find_objective(name));
      down.run(*find_objective(name));
      EXPECT_NEAR((up.loss() - down.loss()) / (2 * kStep), at[i].dlogprob, 2e-3) << name << i;
    }
  }
}

TEST(Objectives, CispoClampsItsWeightAndIcepopMasksBeyondBeta) {
  Columns c;
  c.run(&cispo);
  EXPECT_NEAR(c.out[0].dlogprob, -.79 * 2, 1e-5);
  EXPECT_NEAR(c.out[4].dlogprob, -1.28 * 2, 1e-5);
  c.rollout = {-1, -1, -1, -1, -1, -1, -1};
  c.learner = {-1 + .69f, -1 + .70f, -1 - .69f, -1 - .70f, -1, -1, -1};
  c.advantage.assign(7, 1.0f);
  c.run(&icepop);
  EXPECT_NEAR(c.out[0].dlogprob, -std::exp(.69), 1e-5);
  EXPECT_EQ(c.out[1].fate, TokenFate::kMaskedHigh);
  EXPECT_NEAR(c.out[2].dlogprob, -std::exp(-.69), 1e-5);
  EXPECT_EQ(c.out[3].fate, TokenFate::kMaskedLow);
}

TEST(Objectives, UnknownNameListsTheKnownOnes) {
  EXPECT_EQ(find_objective("grpo").status().message(),
            "objective \"grpo\", expected double_sided | ppo_clip | cispo | gspo | icepop | sft");
}

}  // namespace
}  // namespace slipstream::learner
