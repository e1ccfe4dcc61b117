#include "learner/config.h"

#include <limits>

namespace slipstream::learner {
namespace {

void read_loss(ConfigNode node, LossConfig* out) {
  node.read("objective", &out->objective);
  if (const auto objective = find_objective(out->objective); !objective.ok()) {
    node.fail("objective", std::string(objective.status().message()));
  }
  node.read("clip_low", &out->options.clip_low, 0.0, 1.0);
  node.read("clip_high", &out->options.clip_high, 0.0);
  node.read("icepop_beta", &out->options.icepop_beta, 1.0);
  const auto word = [](Normalizer normalizer) { return std::pair(name_of(normalizer), normalizer); };
  node.read_choice("normalizer", &out->normalizer,
                   {word(Normalizer::kTokens), word(Normalizer::kSequence), word(Normalizer::kConstant)});
  node.read("normalizer_constant", &out->normalizer_constant, std::numeric_limits<double>::min());
  node.read("entropy_bonus", &out->entropy_bonus, 0.0);
}

void read_optimizer(ConfigNode node, AdamWConfig* out) {
  node.read("learning_rate", &out->learning_rate, 0.0, 1.0);
  node.read("beta1", &out->beta1, 0.0, 0.999999);
  node.read("beta2", &out->beta2, 0.0, 0.999999);
  node.read("eps", &out->eps, 1e-30);
  node.read("weight_decay", &out->weight_decay, 0.0);
  node.read("grad_clip", &out->grad_clip, 0.0);
  node.read("warmup_steps", &out->warmup_steps, 0);
  node.read_choice("schedule", &out->schedule,
                   {{"constant", Schedule::kConstant}, {"cosine", Schedule::kCosine}});
  node.read("min_learning_rate", &out->min_learning_rate, 0.0, 1.0);
  node.read("reset_on_publish", &out->reset_on_publish);
  node.read_choice("offload", &out->offload,
                   {{"auto", Offload::kAuto}, {"true", Offload::kAlways}, {"false", Offload::kNever}});
}

void read_warmup(ConfigNode node, WarmupConfig* out) {
  node.read("steps", &out->steps, 0);
  node.read("batch", &out->batch, 1, 1'000'000);
  node.read("learning_rate", &out->learning_rate, 0.0, 1.0);
  node.read("until_probability", &out->until_probability, 0.0, 1.0);
  node.read("checkpoint_every", &out->checkpoint_every, 1);
}

}  // namespace

const char* name_of(Normalizer normalizer) {
  switch (normalizer) {
    case Normalizer::kTokens: return "tokens";
    case Normalizer::kSequence: return "sequence";
    case Normalizer::kConstant: return "constant";
  }
  return "";
}

LearnerConfig LearnerConfig::from(ConfigNode root) {
  LearnerConfig out;
  out.model = model::ModelSection::from(root, "learner");
  ConfigNode learner = root.child("learner");
  learner.read_address("address", &out.address, 0);
  learner.read("threads", &out.threads, 0, 256);
  learner.read("steps", &out.steps, 1);
  read_loss(learner.child("loss"), &out.loss);
  learner.read("advantage_std", &out.advantage_std);
  learner.read("micro_batch_tokens", &out.micro_batch_tokens, 1);
  learner.read("recompute", &out.recompute);
  read_optimizer(learner.child("optimizer"), &out.optimizer);
  learner.read("max_skipped_steps", &out.max_skipped_steps, 1);
  read_warmup(learner.child("warmup"), &out.warmup);
  learner.read("checkpoint_every", &out.checkpoint_every, 0);
  learner.read_choice("repeat", &out.repeat_exactly, {{"exact", true}, {"close", false}});
  learner.read("keep_checkpoints", &out.keep_checkpoints, 1);
  learner.read("log_rollouts", &out.log_rollouts, 0);
  learner.read("record_batches", &out.record_batches, 0);
  learner.read("reply_timeout_ms", &out.reply_timeout_ms, 1);
  learner.read("gateway_timeout_ms", &out.gateway_timeout_ms, 1);
  learner.read("batch_timeout_ms", &out.batch_timeout_ms, 1);
  return out;
}

}  // namespace slipstream::learner
