// What of a learner outlives its process: restoring it, repeating the steps since its checkpoint, checkpoints and publications.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/cuda/runtime.h"
#include "learner/learner.h"
#include "learner/timer.h"
#include "model/weights.h"
#include "nlohmann/json.hpp"

namespace slipstream::learner {
namespace {

// learner.checkpoint_every 0: from one checkpoint to the next, as a multiple of the time that writing one takes. A restart
// repeats at most that much of training.
constexpr double kCheckpointShare = 10.0;

// A run goes on in the shape it began with: rollout workers start from model.path, and would never take other tensors.
absl::Status check_same_shape(const std::string& dir, const std::string& model_path) {
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::read_model_config(dir));
  ASSIGN_OR_RETURN(const model::ModelConfig wanted, model::read_model_config(model_path));
  const std::vector<model::Parameter> have = model::list_parameters(config, config.mtp_layers > 0);
  const std::vector<model::Parameter> want = model::list_parameters(wanted, wanted.mtp_layers > 0);
  for (size_t i = 0; i < std::max(have.size(), want.size()); ++i) {
    const auto text = [i](const std::vector<model::Parameter>& list) {
      return i < list.size() ? absl::StrCat(list[i].name, " [", absl::StrJoin(list[i].shape, ", "), "]") : "no more tensors";
    };
    if (text(have) == text(want)) continue;
    return absl::InvalidArgumentError(absl::StrCat("model.path: ", model_path, ": ", text(want), ", but the run's checkpoint ", dir,
                                                   " has ", text(have), "; expected the model that the run began with"));
  }
  return absl::OkStatus();
}

// Whether masters and moments are kept on the GPU that computes.
absl::StatusOr<MasterPlace> place_of_masters(Offload offload, const model::ModelConfig& config, kernels::Stream& compute) {
  if (!compute.on_cuda() || offload == Offload::kAlways) return MasterPlace::kHost;
  int64_t parameters = 0;
  for (const model::Parameter& parameter : model::list_parameters(config, config.mtp_layers > 0)) parameters += parameter.numel();
  // bf16 weights, their gradients in fp32, and what is in question: masters and two moments. The rest is for activations,
  // and for a rollout worker that may share the GPU.
  const int64_t bytes = parameters * (2 + 4 + 12), free = kernels::cuda::free_memory();
  if (offload == Offload::kAuto) return bytes <= free / 3 * 2 ? MasterPlace::kDevice : MasterPlace::kHost;
  if (bytes <= free) return MasterPlace::kDevice;
  return absl::ResourceExhaustedError(absl::StrCat("learner.optimizer.offload: false, but weights, gradients, masters and moments "
                                                   "take ", bytes, " bytes and the GPU has ", free, " free; expected auto or true"));
}

}  // namespace

// Loads the newest checkpoint, which rank 0 chooses and returns in `dir`, or the initial one ("").
absl::Status Learner::restore(std::string* dir) {
  *dir = is_root() ? checkpoints_.find().value_or("") : "";
  group_.broadcast(*dir, 0);
  if (!dir->empty()) {
    ASSIGN_OR_RETURN(state_, checkpoints_.read(*dir));
    RETURN_IF_ERROR(check_same_shape(*dir, config_.model.path));
  } else if (config_.warmup.steps == 0) {
    state_.phase = Phase::kRl;
  }
  const std::string& source = dir->empty() ? config_.model.path : *dir;
  ASSIGN_OR_RETURN(const model::ModelConfig model_config, model::read_model_config(source));
  ASSIGN_OR_RETURN(const MasterPlace place, place_of_masters(config_.optimizer.offload, model_config, compute()));
  ASSIGN_OR_RETURN(weights_, PolicyWeights::load(source, config_.model.dtype, *stream_, compute(), place));
  ASSIGN_OR_RETURN(trainer_, Trainer::create(*weights_,
                                             {.loss = config_.loss,
                                              .optimizer = config_.optimizer,
                                              .micro_batch_tokens = config_.micro_batch_tokens,
                                              .recompute = config_.recompute},
                                             group_, *stream_, compute()));
  if (!dir->empty())
    RETURN_IF_ERROR(Checkpoints::restore(*dir, state_, *weights_, trainer_->optimizer(), *stream_, compute()));
  log_->info("{}: step {}, policy version {}", source, state_.step, state_.policy_version);
  if (compute().on_cuda()) {
    log_->info("masters and moments are {}", place == MasterPlace::kDevice ? "on the GPU" : "in host memory (learner.optimizer.offload)");
  }
  return absl::OkStatus();
}

// What the bits of a step depend on besides the weights and what the journal has of it. (Threads and recomputation change none.)
JournalSettings Learner::journal_settings() const {
  const LossConfig& loss = config_.loss;
  const AdamWConfig& adam = config_.optimizer;
  const auto exact = [](double value) { return nlohmann::json(value).dump(); };  // the shortest that reads back as it is
  return {{"model.dtype", model::weight_dtype_word(config_.model.dtype)},
          {"learner.device", config_.model.device == kernels::Device{} ? "cpu" : "cuda"},
          {"ranks", absl::StrCat(group_.size())},
          {"learner.loss.objective", loss.objective},
          {"learner.loss.clip_low", exact(loss.options.clip_low)},
          {"learner.loss.clip_high", exact(loss.options.clip_high)},
          {"learner.loss.icepop_beta", exact(loss.options.icepop_beta)},
          {"learner.loss.normalizer", name_of(loss.normalizer)},
          {"learner.loss.normalizer_constant", exact(loss.normalizer_constant)},
          {"learner.loss.entropy_bonus", exact(loss.entropy_bonus)},
          {"learner.advantage_std", config_.advantage_std ? "true" : "false"},
          {"learner.micro_batch_tokens", absl::StrCat(config_.micro_batch_tokens)},
          {"learner.optimizer.beta1", exact(adam.beta1)},
          {"learner.optimizer.beta2", exact(adam.beta2)},
          {"learner.optimizer.eps", exact(adam.eps)},
          {"learner.optimizer.weight_decay", exact(adam.weight_decay)},
          {"learner.optimizer.grad_clip", exact(adam.grad_clip)},
          {"learner.optimizer.reset_on_publish", adam.reset_on_publish ? "true" : "false"}};
}

// The steps after the checkpoint, up to the newest version that was published. Rank 0 reads them; the others follow.
absl::Status Learner::repeat_journal(const std::string& dir, std::stop_token stop) {
  if (dir.empty()) return absl::OkStatus();
  if (!is_root()) return follow();
  const absl::Status status = repeat_versions(dir, stop);
  tell_end(status);
  return status;
}

absl::Status Learner::repeat_versions(const std::string& dir, std::stop_token stop) {
  ASSIGN_OR_RETURN(const JournalContents journal, read_journal(dir));
  if (!journal.left_out.empty()) log_->warn("{}", journal.left_out);
  if (journal.versions.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(unless_close(expect_same_settings(journal.settings, journal_settings(), dir),
                               "that value for now: start the run with it, stop it once it trains (SIGTERM or Ctrl-C), then change it"));
  // On the console too, as it may take a while.
  log_->warn("the run was killed; training the steps of {} versions in {} again", journal.versions.size(), journal_path(dir));
  const double begin = steady_seconds();
  const int64_t first = state_.step;
  bool same = true;
  for (const JournalContents::Version& version : journal.versions) {
    if (stop.stop_requested()) {
      return absl::CancelledError("interrupted while a killed run's steps were trained again; the same command does so from the beginning");
    }
    RETURN_IF_ERROR(repeat_version(version, dir, &same));
  }
  consumed_.clear();
  log_->info("repeated {} steps in {:.1f} s: step {}, policy version {}", state_.step - first, steady_seconds() - begin, state_.step,
             state_.policy_version);
  return absl::OkStatus();
}

// What learner.repeat makes of a difference.
absl::Status Learner::unless_close(const absl::Status& differs, const char* expected) {
  if (differs.ok()) return differs;
  if (!config_.repeat_exactly) {
    log_->warn("{}; learner.repeat: close goes on", std::string(differs.message()));
    return absl::OkStatus();
  }
  return absl::Status(differs.code(), absl::StrCat(differs.message(), "; expected ", expected, "; or learner.repeat: close"));
}

// same: so far all results were as recorded.
absl::Status Learner::repeat_version(const JournalContents::Version& version, const std::string& dir, bool* same) {
  const std::string path = journal_path(dir);
  ASSIGN_OR_RETURN(const LearnerState recorded, parse_state(version.state, path));
  StepResult result;
  for (const std::string_view bytes : version.batches) {
    v1::JournalBatch message;
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return absl::DataLossError(absl::StrCat(path, ": the batch of step ", state_.step + 1, " is no v1.JournalBatch"));
    }
    tell(Command::kBatch, bytes);
    TrainingBatch batch;
    ASSIGN_OR_RETURN(result, train(message, &batch));
  }
  count_publication();
  tell(Command::kPublished);
  if (state_.step != recorded.step || state_.policy_version != recorded.policy_version) {
    return absl::DataLossError(absl::StrCat(path, ": its batches end with step ", state_.step, ", version ", state_.policy_version,
                                            "; expected step ", recorded.step, ", version ", recorded.policy_version));
  }
  const auto equal = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  if (*same && !(equal(result.gradient.loss, recorded.report.loss) && equal(result.grad_norm, recorded.report.grad_norm))) {
    *same = false;
    RETURN_IF_ERROR(unless_close(absl::FailedPreconditionError(absl::StrFormat(
        "%s: step %d repeated: loss %.9g, gradient norm %.9g, and %.9g, %.9g as it was trained", path, recorded.step,
        result.gradient.loss, result.grad_norm, recorded.report.loss, recorded.report.grad_norm)),
                                 "the same program and kind of processor"));
  }
  state_ = recorded;  // with the clock, the reports and what the gateway was not told
  return absl::OkStatus();
}

// Without a journal, always: the steps in one are what a restart repeats.
bool Learner::checkpoint_is_due() const {
  if (!journal_ || finished()) return true;
  if (config_.checkpoint_every > 0) return state_.step - checkpoint_step_ >= config_.checkpoint_every;
  return steady_seconds() - checkpoint_ended_ >= kCheckpointShare * checkpoint_took_;
}

LearnerState Learner::durable_state() {
  state_.commit.set_step(state_.step);
  state_.commit.set_policy_version(state_.policy_version);
  state_.commit.set_final(finished());
  LearnerState out = state_;
  out.wall_seconds = wall_seconds();
  return out;
}

absl::Status Learner::save_checkpoint(double* seconds) {
  const Timer timer(seconds);
  const double begin = steady_seconds();
  if (state_.step > 1) RETURN_IF_ERROR(files_->sync());  // the lines before this step's, which it has itself
  weights_->fetch(compute());
  RETURN_IF_ERROR(checkpoints_.save(durable_state(), *weights_, trainer_->optimizer()));
  durable_step_ = checkpoint_step_ = state_.step;
  journal_.reset();
  if (state_.phase == Phase::kRl) {
    ASSIGN_OR_RETURN(Journal journal, Journal::create(checkpoints_.directory(state_.step), journal_settings()));
    journal_.emplace(std::move(journal));
  }
  checkpoint_ended_ = steady_seconds();
  checkpoint_took_ = checkpoint_ended_ - begin;
  return absl::OkStatus();
}

absl::Status Learner::end_version_in_journal(double* seconds) {
  const Timer timer(seconds);
  RETURN_IF_ERROR(files_->sync());
  RETURN_IF_ERROR(journal_->end_version(to_json(durable_state())));
  durable_step_ = state_.step;
  return absl::OkStatus();
}

// A copy for those who fetch it; none while there are only engines that read the learner's own weights.
absl::Status Learner::hand_out() {
  if (rewrite_ != nullptr && !publisher_.asked()) {
    publisher_.withhold();
    return absl::OkStatus();
  }
  weights_->fetch(compute());
  return publisher_.publish(state_.policy_version, weights_->master(), *stream_);
}

// Somebody who came when the version had been withheld, and may have been given episodes that need it.
absl::Status Learner::hand_out_late() {
  const bool withheld = exactly_published_ && publisher_.policy_version() != state_.policy_version;
  return withheld && publisher_.waiting() > 0 ? hand_out() : absl::OkStatus();
}

// A new policy version: durable first, then handed out.
absl::Status Learner::publish(double* checkpoint_seconds, double* publish_seconds) {
  count_publication();
  tell(Command::kPublished);
  RETURN_IF_ERROR(checkpoint_is_due() ? save_checkpoint(checkpoint_seconds) : end_version_in_journal(checkpoint_seconds));
  const Timer timer(publish_seconds);
  RETURN_IF_ERROR(hand_out());
  rewrite_shared_weights();
  metrics_.set(metric::kPolicyVersion, state_.policy_version, {"learner"});
  return absl::OkStatus();
}

// Trained steps are not lost by a stop: they become durable, and the gateway hears of them now or from the next life's Hello.
// In a checkpoint, so that the next life may have other settings.
absl::Status Learner::stop_here() {
  double unused = 0.0;
  if (durable_step_ != state_.step && state_.phase == Phase::kRl) RETURN_IF_ERROR(publish(&unused, &unused));
  if (checkpoint_step_ != state_.step) RETURN_IF_ERROR(save_checkpoint(&unused));
  return absl::CancelledError(absl::StrCat("stopped after step ", state_.step));
}

}  // namespace slipstream::learner
