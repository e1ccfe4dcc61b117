// Learner: the training role. Supervised warm-up, then reinforcement learning on batches from the gateway;
// durable checkpoints; published weights.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>

#include "absl/functional/function_ref.h"
#include "common/job.h"
#include "common/log.h"
#include "common/metrics.h"
#include "learner/checkpoint.h"
#include "learner/config.h"
#include "learner/journal.h"
#include "learner/publisher.h"
#include "learner/run_files.h"
#include "learner/source.h"
#include "learner/step_report.h"
#include "learner/trainer.h"
#include "learner/weights_service.h"
#include "model/tokenizer.h"
#include "parallel/group.h"
#include "slipstream/v1/journal.pb.h"

namespace slipstream::learner {

// Who looks on. All on the thread of run(), on rank 0.
struct Observers {
  std::function<absl::Status()> accepted = nullptr;       // the gateway took the checkpoint: nothing of the run is touched before; may be empty
  std::function<void(const StepReport&)> step = nullptr;  // after each step; may be empty
  ScalarSink scalars = nullptr;                           // the same as names and numbers; may be empty
  const model::Tokenizer* tokenizer = nullptr;  // gives the rollout logs text; may be null
};

// The order that makes every crash harmless: a version is durable, as a checkpoint or in the journal of the one
// before it, then its weights are published, then the gateway is told what was trained, then the step's line is
// written (which a copy of it in the durable state stands in for until then). A version that anybody sampled with
// can always be restored, and what the gateway may not have heard is in the durable state and said again in the
// next Hello.
//
// Data-parallel ranks run the same Learner; rank 0 alone talks to the gateway, serves weights and writes
// files.
class Learner {
 public:
  // Loads the newest checkpoint of the run, or model.path, and serves its weights. Errors name the file, the
  // config field or the address; the error of one rank ends all. group, metrics and log outlive the learner.
  // stop (rank 0's): ends the training of a journal's steps (Cancelled).
  static absl::StatusOr<std::unique_ptr<Learner>> create(const LearnerConfig& config, const JobConfig& job,
                                                         parallel::Group& group, Metrics& metrics,
                                                         Logger log, std::stop_token stop = {});
  ~Learner();

  // Trains until learner.steps are done (OK) or stop is requested (Cancelled; trained steps are made durable
  // first). Other codes: the gateway refused or did not answer in time, the disk failed, gradients stayed
  // non-finite. Only rank 0's stop token counts.
  absl::Status run(std::stop_token stop, const Observers& observers);

  // An engine in this process may read the weights of forward passes where they are (model.dtype bf16, rl.publish_every 1): once
  // share_weights() was called, before run(), they change only while `rewrite` runs its `write`, which makes them those of
  // policy_version.
  using Rewrite = std::function<void(int32_t policy_version, absl::FunctionRef<void()> write)>;
  const model::ModelConfig& model_config() const { return weights_->config(); }
  const model::WeightStore& weights() const { return weights_->compute_store(); }
  void share_weights(Rewrite rewrite);

  // Where workers fetch weights, host:port; empty on other ranks than 0.
  std::string weights_address() const;
  int32_t policy_version() const { return state_.policy_version; }
  int64_t step() const { return state_.step; }
  bool finished() const { return state_.phase == Phase::kRl && state_.rl_steps >= config_.steps; }

 private:
  Learner(const LearnerConfig& config, const JobConfig& job, parallel::Group& group, Metrics& metrics,
          Logger log);
  // The first byte of what rank 0 tells the others; payload follows: a v1.JournalBatch, or the status of the end.
  enum class Command : char { kBatch = 'B', kPublished = 'P', kCommitted = 'C', kEnd = 'E' };

  absl::Status start(std::stop_token stop);
  absl::Status restore(std::string* dir);
  absl::Status repeat_journal(const std::string& dir, std::stop_token stop);
  absl::Status agree(const absl::Status& mine, const char* what);
  kernels::Stream& compute() { return device_stream_ != nullptr ? *device_stream_ : *stream_; }
  void rewrite_shared_weights();

  // What run() is on rank 0 and on the others.
  absl::Status run_root(std::stop_token stop, const Observers& observers);
  absl::Status follow();

  // Every rank, in the same order.
  absl::StatusOr<StepResult> train(const v1::JournalBatch& message, TrainingBatch* batch);
  void take_ids(const TrainingBatch& batch, const StepResult& result);
  void end_warmup_when_due(double probability);
  void count_publication();
  void forget_consumed();

  // Rank 0.
  void tell(Command command, std::string_view payload = "");
  void tell_end(const absl::Status& status);
  absl::Status repeat_versions(const std::string& dir, std::stop_token stop);
  absl::Status repeat_version(const JournalContents::Version& version, const std::string& dir, bool* same);
  absl::Status unless_close(const absl::Status& differs, const char* expected);
  JournalSettings journal_settings() const;
  absl::Status one_step(std::stop_token stop, const Observers& observers);
  void note(const v1::JournalBatch& message);
  double learning_rate() const;
  absl::Status ask(std::stop_token stop, absl::FunctionRef<absl::Status()> request);
  absl::Status say_hello(std::stop_token stop);
  absl::StatusOr<v1::Batch> next_batch(std::stop_token stop);
  absl::Status publish_when_due(std::stop_token stop, StepReport* report, v1::CommitReply* reply);
  absl::Status publish(double* checkpoint_seconds, double* publish_seconds);
  bool checkpoint_is_due() const;
  LearnerState durable_state();
  absl::Status hand_out();
  absl::Status hand_out_late();
  absl::Status save_checkpoint(double* seconds);
  absl::Status end_version_in_journal(double* seconds);
  absl::Status send_commit(std::stop_token stop, v1::CommitReply* reply);
  absl::Status stop_here();
  void fill_counts(const v1::CommitReply& gateway, StepReport* report) const;
  void fill_rewards(const v1::Activity& activity, StepReport* report) const;
  void remember_rewards(const v1::Activity& activity);

  bool is_root() const { return group_.rank() == 0; }
  double wall_seconds() const;

  LearnerConfig config_;
  JobConfig job_;
  parallel::Group& group_;
  Metrics& metrics_;
  Logger log_;
  std::unique_ptr<kernels::Stream> stream_;         // on the CPU
  std::unique_ptr<kernels::Stream> device_stream_;  // on a GPU, when the model runs there
  std::optional<PolicyWeights> weights_;
  Rewrite rewrite_;  // when somebody else reads the weights too
  std::unique_ptr<Trainer> trainer_;
  Checkpoints checkpoints_;
  Publisher publisher_;
  std::unique_ptr<WeightsServer> server_;
  std::unique_ptr<Source> source_;
  RunLock lock_;                     // rank 0
  std::unique_ptr<RunFiles> files_;  // rank 0, once the gateway has accepted the checkpoint
  LearnerState state_;
  bool exactly_published_ = true;   // the weights are those of state_.policy_version
  std::set<std::string> consumed_;  // rollout ids of state_.commit: trained or refused, not acknowledged yet
  int64_t durable_step_ = 0;        // of the last checkpoint or the last version in its journal
  int64_t checkpoint_step_ = 0;
  double checkpoint_took_ = 0.0, checkpoint_ended_ = 0.0;  // seconds, steady
  std::optional<Journal> journal_;  // of this life's last checkpoint
  std::map<std::string, v1::RewardTotal> rewards_seen_;  // the gateway's totals, by task, at the last step
  double started_ = 0.0;                                 // steady seconds when this life began
};

}  // namespace slipstream::learner
