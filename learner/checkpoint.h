// The learner's checkpoints: what it needs to go on as if it had not stopped.
//
//   <root>/step_00000012/   config.json, model.safetensors (published format), optimizer/ (fp32 masters where
//                           the file's dtype cannot hold them, moments), learner.json, manifest.json (written
//                           last: CRCs of all the others); journal.log comes later (learner/journal.h)
//   <root>/latest           a symbolic link to the newest complete one
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/log.h"
#include "common/status.h"
#include "learner/optimizer.h"
#include "learner/policy_weights.h"
#include "learner/step_report.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::learner {

// learner.json.
struct LearnerState {
  int64_t step = 0;          // steps done, warm-up included
  int64_t warmup_steps = 0;  // of them
  int64_t rl_steps = 0;
  Phase phase = Phase::kWarmup;
  int32_t policy_version = 0;
  int64_t incarnation = 0;  // of the learner that wrote it
  int skipped_in_row = 0;
  int64_t optimizer_updates = 0;
  double wall_seconds = 0.0;
  double wait_data_seconds = 0.0;                   // in all
  std::vector<double> demonstration_probabilities;  // of the last warm-up steps
  std::string weights_id;   // of the run, made when it first began: workers tell its versions from another run's
  std::string log_id;       // of the trajectory log it was trained from; empty: it never met a gateway
  uint64_t groups_end = 0;  // one more than the highest number of a group taken from it
  v1::Commit commit;        // what the gateway has to be told once this checkpoint is durable
  // Of `step`, as far as it was known when the checkpoint was written: metrics.jsonl gets it from here if the
  // process dies before it could write the line.
  StepReport report;
};
std::string to_json(const LearnerState& state);
// path: for messages, which name it and the field.
absl::StatusOr<LearnerState> parse_state(std::string_view json, const std::string& path);

class Checkpoints {
 public:
  // Called before each change a reader could see, with a name such as "rename step_00000012": tests end the
  // process there.
  using Hook = std::function<void(std::string_view step)>;

  // keep: how many stay. carry_from: the model directory whose tokenizer files and vision tower go along.
  Checkpoints(std::string root, int keep, std::string carry_from, Logger log, Hook hook = {});

  // Where to start: what `latest` names, or, only if that link is missing or names nothing, the newest
  // complete directory (a warning says so). nullopt: there is none.
  std::optional<std::string> find() const;

  // weights: fetched. Everything is written to a temporary directory and fsync'd, renamed, then `latest` is replaced. After OK
  // the checkpoint is found by find() whatever happens; after a crash at any point find() gives this or the
  // previous one. Older ones are removed; those that stay lose their journals.
  absl::Status save(const LearnerState& state, const PolicyWeights& weights, const AdamW& optimizer) const;

  // The state in `dir`, after every file there was found to be as it was written. Errors name the file, what
  // is there and what was expected (NotFound, InvalidArgument, DataLoss), and the newest older checkpoint
  // that is intact. An older one is never taken instead: the gateway no longer has what was trained since.
  absl::StatusOr<LearnerState> read(const std::string& dir) const;
  std::string directory(int64_t step) const;
  // learner.json alone. Errors name file and field.
  static absl::StatusOr<LearnerState> read_state(const std::string& dir);
  // The optimizer and the exact masters of `dir`, from which `weights` were loaded.
  static absl::Status restore(const std::string& dir, const LearnerState& state, PolicyWeights& weights,
                              AdamW& optimizer, kernels::Stream& host, kernels::Stream& compute);

 private:
  absl::Status write(const std::string& dir, const LearnerState& state, const PolicyWeights& weights,
                     const AdamW& optimizer) const;
  absl::Status replace_latest(const std::string& name) const;
  absl::Status damaged(const std::string& dir, const absl::Status& why) const;
  void remove_old(const std::string& newest) const;
  std::vector<std::string> complete_directories() const;  // names, oldest first
  void before(const std::string& step) const {
    if (hook_) hook_(step);
  }

  std::string root_;
  int keep_;
  std::string carry_from_;
  Logger log_;
  Hook hook_;
};

}  // namespace slipstream::learner
