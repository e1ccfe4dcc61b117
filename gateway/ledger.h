// The ledger knows the state of every trajectory, from the plan of its episode to the commit of the step that trained it:
//
//   planned -> running -> (on disk) queued in its group -> delivered in a step -> trained
//                                         |                      |-> queued again when the learner starts a new life
//                                         '-> dropped, with a reason, at any moment before trained
//
// It decides when episodes start (admission), completes and filters groups, and answers the learner. What it acknowledges is
// in the trajectory log first; opening the log again gives the same state. produced = trained + dropped + queued at every
// instant.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/log.h"
#include "common/metrics.h"
#include "gateway/config.h"
#include "gateway/demonstrations.h"
#include "gateway/episode.h"
#include "gateway/groups.h"
#include "gateway/task_schedule.h"
#include "gateway/trajectory_log.h"

namespace slipstream::gateway {

// Thread-safe. No call blocks but next().
class Ledger : public EpisodeSource {
 public:
  // Opens <run directory>/trajectories. tokenizer: Tokenizer::fingerprint() of the run's. Errors are TrajectoryLog::open's,
  // and FailedPrecondition: the log was made with another run.seed, rl.group_size or tokenizer. Metrics and logger outlive
  // the ledger.
  static absl::StatusOr<std::unique_ptr<Ledger>> open(const GatewayConfig& config, const std::string& tokenizer,
                                                      Metrics& metrics, Logger logger);
  // Nobody may be in a call any more. Requests that wait get Cancelled.
  ~Ledger() override;

  // EpisodeSource. finish(): when the log could not be written the episode is still running: finish it again, or cancel it.
  // An id that was settled and forgotten is answered with offset 0.
  std::optional<EpisodePlan> next(std::stop_token stop) override;
  std::optional<EpisodePlan> try_next();  // what next() would return at once
  void finish(const EpisodePlan& plan, v1::Trajectory trajectory,
              std::function<void(absl::StatusOr<uint64_t>)> done) override;
  void cancel(const EpisodePlan& plan) override;
  // group_size 0 reads as 1; an empty group_id makes a group whose id is in the plan, for others to join.
  absl::StatusOr<EpisodePlan> admit(const std::string& task, const std::string& group_id, int group_size) override;

  // TaskSchedule::set_tasks. Episodes start when every environment of the config has been described.
  absl::Status set_tasks(const std::string& environment, absl::Span<const v1::TaskDescription> descriptions);

  // The learner's messages. `done` is called once, perhaps by another thread and before the call returns. Cancelled: the
  // answer went to a repetition of the request, or the gateway stops. FailedPrecondition: an older incarnation, a stale
  // checkpoint, no Hello before. InvalidArgument, DataLoss: those of trajectory.proto's Hello. The errors of the disk:
  // nothing has changed, ask again.
  void hello(const v1::Hello& hello, std::function<void(absl::StatusOr<v1::HelloReply>)> done);
  // One part, activity not filled in. A repeated request gets the same groups, byte for byte.
  void request_batch(const v1::BatchRequest& request, std::function<void(absl::StatusOr<v1::Batch>)> done);
  void commit(const v1::Commit& commit, std::function<void(absl::StatusOr<v1::CommitReply>)> done);

  v1::Counts counts() const;
  // By task, of episodes that finished since open() and were not excluded.
  std::map<std::string, v1::RewardTotal> rewards() const;
  int learner_policy_version() const;  // of its last batch request
  bool learner_connected() const;      // it was heard of since open()
  bool run_complete() const;           // the learner's last commit was final
  // next() returns nullopt from now on, to everybody. finish() still works.
  void stop();

 private:
  struct Member {
    enum class State {
      kAbsent,   // external: no agent has it (any more); else: can't be run
      kPlanned, kRunning,
      kLogging,  // finished, on its way to the disk
      kQueued,   // on disk; delivered when its group is
      kTrained, kDropped
    };
    State state = State::kPlanned;
    bool settling = false;  // a commit on its way to the disk
    int attempt = 0;        // n of "-r<n>"
    TrajectorySummary summary;
    TrajectoryLog::Position position = 0;
    std::string drop_reason;
    std::vector<std::function<void(absl::StatusOr<uint64_t>)>> waiting;  // for the disk
  };
  struct Group {
    v1::LogGroup info;
    bool logged = false;           // known to be on disk
    uint32_t first_segment = 0;    // no record of it is in an older one
    bool sealed = false;           // external: nobody may join any more
    bool counted = false;          // in the metrics
    absl::Time touched;            // external: last admitted or finished
    std::optional<int64_t> step;   // delivered in
    std::vector<Member> members;   // by group index
    std::map<std::string, TrajectoryLog::Position> recorded;  // rollout ids on disk, earlier attempts too
  };
  struct DeliveredStep {
    v1::LogDelivered record;
    bool durable = false;
  };
  using BatchDone = std::function<void(absl::StatusOr<v1::Batch>)>;
  struct PendingRequest {
    v1::BatchRequest request;
    BatchDone done;
  };
  // A batch whose trajectories are still to be read.
  struct Assembly {
    v1::Batch batch;
    struct Item {
      int group;  // in the batch
      TrajectoryLog::Position position;
      bool masked;
    };
    std::vector<Item> items;
    BatchDone done;
  };
  // A learner's message that waits for the one before it to be on disk.
  struct Deferred {
    std::function<void()> run;
    std::function<void(absl::Status)> cancel;
  };
  using Settled = std::map<std::string, v1::LogSettled>;  // by reason; "": trained

  Ledger(const GatewayConfig& config, Metrics& metrics, Logger logger);

  // ledger_replay.cc
  absl::Status replay(RecordType type, std::string_view payload, TrajectoryLog::Position position)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ended_before_replay(uint64_t group_number) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status replay_group(v1::LogGroup info, uint32_t segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status replay_trajectory(const v1::LogTrajectory& record, TrajectoryLog::Position position)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status replay_settled(const v1::LogSettled& settled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status replay_delivered(const v1::LogDelivered& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status check_settings(const std::map<std::string, std::string>& now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status finish_replay() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ledger.cc: episodes and groups
  std::string rollout_id(const Group& group, int index) const;
  EpisodePlan make_plan(const Group& group, int index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<EpisodePlan> take_plan(absl::Time* retry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void start_scheduled_group(absl::Time* retry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Group& start_group(v1::LogGroup info) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t admitted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t admission_limit() const;
  void logged(uint64_t group_number, int index, const EpisodePlan& plan, absl::StatusOr<TrajectoryLog::Position> position);
  void account(Group& group, int index, const std::string& id, TrajectoryLog::Position position)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool is_complete(const Group& group) const;
  void complete(Group& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void expire_external_groups() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  GroupDecision decide_group(const Group& group) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void drop(Group& group, const GroupDecision& decision, Settled* settled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void settle(Group& group, int index, const std::string& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool close_if_settled(uint64_t group_number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void forget_segments() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void count_group(Group& group, const std::string& outcome) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void tell_of_drought(const Group* dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `done` gets the positions of `records`, without the owed ones written along.
  uint32_t append(std::vector<Record> records, TrajectoryLog::Done done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void append_settled(const Settled& settled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void append_owed(std::vector<Record> records) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ledger_learner.cc
  absl::Status check_life(int64_t incarnation) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status check_hello(const v1::Hello& hello) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status check_log(const v1::Hello& hello) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void defer(std::function<void()> run, std::function<void(absl::Status)> cancel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void run_deferred();
  void begin_life(const Settled& settled, const v1::LogLearner& life, bool durable);
  absl::Status check_request(const v1::BatchRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void observe(int64_t step, int policy_version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void answer_pending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void answer_demonstrations() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void deliver(const std::vector<std::pair<uint64_t, GroupDecision>>& chosen) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void write_delivered(int64_t step, BatchDone done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void assemble(int64_t step, BatchDone done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void run_assembler();
  absl::Status read_trajectories(Assembly* assembly) const;
  Settled mark_settling(const v1::Commit& commit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void end_settling(const Settled& settled, bool durable) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::CommitReply end_commit(const Settled& settled, const v1::LogLearner& life, bool durable);
  void forget_settled_steps() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void requeue_delivered() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::Counts counts_locked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void export_metrics(Metrics& metrics);

  std::string log_directory() const { return config_.job.run_directory() + "/trajectories"; }

  const GatewayConfig config_;
  const GroupFilters filters_;
  Metrics& metrics_;
  const Logger logger_;

  mutable absl::Mutex mutex_;
  absl::CondVar episodes_changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;  // the log is going away

  TaskSchedule schedule_ ABSL_GUARDED_BY(mutex_);
  Demonstrations demonstrations_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Group> groups_ ABSL_GUARDED_BY(mutex_);  // with anything unsettled
  std::unordered_map<std::string, uint64_t> external_groups_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, std::pair<uint64_t, int>> queued_ids_ ABSL_GUARDED_BY(mutex_);  // group and index
  std::set<std::pair<uint64_t, int>> planned_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_group_number_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t running_ ABSL_GUARDED_BY(mutex_) = 0;
  // Groups in a row that left the learner nothing, and why, by trajectory.
  int64_t drought_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, int64_t> drought_reasons_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, v1::RewardTotal> rewards_ ABSL_GUARDED_BY(mutex_);  // by task
  v1::Counts counts_ ABSL_GUARDED_BY(mutex_);          // produced, trained, dropped
  std::vector<Record> owed_ ABSL_GUARDED_BY(mutex_);   // records a full disk did not take; next append takes them along

  std::string log_id_ ABSL_GUARDED_BY(mutex_);
  v1::LogSnapshot replay_base_ ABSL_GUARDED_BY(mutex_);  // what the oldest segment of the log begins with

  int64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  bool greeted_ ABSL_GUARDED_BY(mutex_) = false;       // the Hello of this incarnation is on disk
  bool heard_ ABSL_GUARDED_BY(mutex_) = false;
  bool final_ ABSL_GUARDED_BY(mutex_) = false;
  bool rollouts_open_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t committed_step_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t step_ ABSL_GUARDED_BY(mutex_) = 0;           // of the last request
  int policy_version_ ABSL_GUARDED_BY(mutex_) = 0;
  bool warming_up_ ABSL_GUARDED_BY(mutex_) = false;  // the last request was for demonstrations
  int warm_version_ ABSL_GUARDED_BY(mutex_) = 0;     // of the first request for rollouts after those
  int64_t first_step_at_version_ ABSL_GUARDED_BY(mutex_) = 0;
  bool learner_record_under_way_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Deferred> deferred_ ABSL_GUARDED_BY(mutex_);
  // Sizes of the groups of each step at the learner's present version, committed or not.
  std::map<int64_t, int64_t> delivered_sizes_ ABSL_GUARDED_BY(mutex_);
  std::optional<PendingRequest> pending_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, DeliveredStep> delivered_ ABSL_GUARDED_BY(mutex_);  // by step, with anything unsettled

  absl::Mutex assembly_mutex_;
  std::deque<Assembly> assemblies_ ABSL_GUARDED_BY(assembly_mutex_);
  bool assembler_stop_ ABSL_GUARDED_BY(assembly_mutex_) = false;
  v1::Counts exported_;  // of the scrapes, which are one at a time

  std::unique_ptr<TrajectoryLog> log_;
  std::jthread assembler_;
  std::unique_ptr<Metrics::Collector> collector_;
};

}  // namespace slipstream::gateway
