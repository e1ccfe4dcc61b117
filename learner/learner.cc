#include "learner/learner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include "common/records.h"
#include "learner/step_statistics.h"
#include "learner/timer.h"

namespace slipstream::learner {
namespace {

constexpr size_t kProbabilityWindow = 5;  // warm-up steps whose demonstration probabilities are averaged
constexpr int kHellosMax = 8;             // times one request may find a gateway that does not know us

int64_t wall_microseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The mean probability of a whole demonstration: what a greedy-free sampler would earn on tasks with one
// right answer.
double demonstration_probability(const TrainingBatch& batch, const GradientResult& result) {
  double sum = 0.0;
  for (const TrainingTrajectory& trajectory : batch.trajectories) {
    double logprob = 0.0;
    for (const int64_t sample : trajectory.samples) {
      const size_t s = static_cast<size_t>(sample);
      for (size_t i = 0; i < batch.samples[s].positions.size(); ++i) {
        if (batch.samples[s].selected[i] != 0) logprob += result.learner_logprob[s][i];
      }
    }
    sum += std::exp(logprob);
  }
  return batch.trajectories.empty() ? 0.0 : sum / static_cast<double>(batch.trajectories.size());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Learner>> Learner::create(const LearnerConfig& config, const JobConfig& job,
                                                         parallel::Group& group, Metrics& metrics,
                                                         Logger log, std::stop_token stop) {
  auto learner = std::unique_ptr<Learner>(new Learner(config, job, group, metrics, std::move(log)));
  const absl::Status started = learner->start(stop);
  RETURN_IF_ERROR(learner->agree(started, "starting"));
  return learner;
}

Learner::Learner(const LearnerConfig& config, const JobConfig& job, parallel::Group& group, Metrics& metrics,
                 Logger log)
    : config_(config),
      job_(job),
      group_(group),
      metrics_(metrics),
      log_(std::move(log)),
      checkpoints_(job.run_directory() + "/checkpoints", config.keep_checkpoints, config.model.path, log_),
      started_(steady_seconds()) {}

Learner::~Learner() = default;

std::string Learner::weights_address() const { return server_ == nullptr ? "" : server_->address(); }

double Learner::wall_seconds() const { return state_.wall_seconds + steady_seconds() - started_; }

// One rank's error is everybody's: nobody waits for a rank that is gone.
absl::Status Learner::agree(const absl::Status& mine, const char* what) {
  const bool failed = group_.all_reduce_max(mine.ok() ? 0 : 1) != 0;
  if (failed && mine.ok())
    return absl::AbortedError(absl::StrCat("another rank failed ", what, "; its log says why"));
  return mine;
}

absl::Status Learner::start(std::stop_token stop) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  ASSIGN_OR_RETURN(stream_, kernels::Stream::create_cpu(config_.threads > 0 ? config_.threads : cores));
  if (config_.model.device != kernels::Device{}) {
    ASSIGN_OR_RETURN(device_stream_, kernels::Stream::create(config_.model.device, 0));
  }
  RETURN_IF_ERROR(agree(is_root() ? lock_.take(job_.run_directory()) : absl::OkStatus(), "locking the run"));
  std::string dir;
  RETURN_IF_ERROR(agree(restore(&dir), "restoring"));
  checkpoint_step_ = state_.step;
  RETURN_IF_ERROR(agree(repeat_journal(dir, stop), "repeating steps"));
  if (state_.weights_id.empty()) state_.weights_id = absl::StrCat(job_.run_id, "-", absl::Hex(std::random_device{}()));
  exactly_published_ = state_.phase == Phase::kRl || state_.step == 0;
  durable_step_ = state_.step;
  state_.incarnation = std::max(wall_microseconds(), state_.incarnation + 1);
  if (!is_root()) return absl::OkStatus();
  ASSIGN_OR_RETURN(source_, Source::connect({.address = config_.gateway_address,
                                             .reply_timeout_ms = config_.reply_timeout_ms,
                                             .gateway_timeout_ms = config_.gateway_timeout_ms,
                                             .batch_timeout_ms = config_.batch_timeout_ms,
                                             .while_waiting = [this] { return hand_out_late(); }},
                                            log_));
  // In the middle of a warm-up the weights are no published version: workers have version 0 from model.path.
  if (exactly_published_) RETURN_IF_ERROR(hand_out());
  ASSIGN_OR_RETURN(server_, WeightsServer::start(config_.address, publisher_,
                                                 {.weights_id = state_.weights_id, .dtype = config_.model.dtype}, log_));
  metrics_.set(metric::kPolicyVersion, state_.policy_version, {"learner"});
  return absl::OkStatus();
}

void Learner::share_weights(Rewrite rewrite) {
  CHECK(group_.size() == 1 && job_.publish_every == 1);
  weights_->share();
  rewrite_ = std::move(rewrite);
}

// A version's weights may be those of the one before: a step that had nothing to learn from is published too.
void Learner::rewrite_shared_weights() {
  if (!rewrite_) return;
  rewrite_(state_.policy_version, [&] {
    if (weights_->behind()) weights_->follow(*stream_, compute());
  });
}

absl::Status Learner::run(std::stop_token stop, const Observers& observers) {
  started_ = steady_seconds();
  compute().adopt();  // who created an engine on another GPU since made that one this thread's
  if (!is_root()) return follow();
  const absl::Status status = run_root(stop, observers);
  tell_end(status);
  return status;
}

void Learner::tell(Command command, std::string_view payload) {
  if (group_.size() == 1) return;
  std::string bytes(1, static_cast<char>(command));
  bytes.append(payload);
  group_.broadcast(bytes, 0);
}

void Learner::tell_end(const absl::Status& status) {
  tell(Command::kEnd, absl::StrCat(absl::Hex(status.raw_code(), absl::kZeroPad2), status.message()));
}

absl::Status Learner::run_root(std::stop_token stop, const Observers& observers) {
  RETURN_IF_ERROR(say_hello(stop));
  if (observers.accepted) RETURN_IF_ERROR(observers.accepted());
  // Not before: what follows the checkpoint is cut off, and the gateway may have refused this checkpoint.
  ASSIGN_OR_RETURN(files_, RunFiles::open(job_.run_directory(), state_.report, config_.log_rollouts));
  // TensorBoard forgets the points of the restored step and of later ones: the former is the same, said
  // again.
  if (observers.scalars && files_->restored().step > 0) {
    observers.scalars(files_->restored().step, scalars_of(files_->restored()));
  }
  forget_consumed();  // this incarnation is new: the Hello was read, its last commit with it
  if (checkpoint_step_ != state_.step) {  // repeated once: the next life need not, and may have other settings
    double unused = 0.0;
    RETURN_IF_ERROR(save_checkpoint(&unused));
  }
  while (!finished()) {
    const absl::Status status = one_step(stop, observers);
    if (absl::IsCancelled(status) && stop.stop_requested()) return stop_here();
    RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

absl::Status Learner::follow() {
  while (true) {
    std::string bytes;
    group_.broadcast(bytes, 0);
    CHECK(!bytes.empty());
    switch (static_cast<Command>(bytes[0])) {
      case Command::kBatch: {
        v1::JournalBatch message;
        CHECK(message.ParseFromArray(bytes.data() + 1, static_cast<int>(bytes.size() - 1)));
        TrainingBatch batch;
        RETURN_IF_ERROR(train(message, &batch).status());
        break;
      }
      case Command::kPublished:
        count_publication();
        break;
      case Command::kCommitted:
        forget_consumed();
        break;
      case Command::kEnd:
        return absl::Status(static_cast<absl::StatusCode>(std::stoi(bytes.substr(1, 2), nullptr, 16)),
                            bytes.substr(3));
    }
  }
}

absl::Status Learner::say_hello(std::stop_token stop) {
  v1::Hello hello;
  hello.set_run_id(job_.run_id);
  hello.set_incarnation(state_.incarnation);
  hello.set_committed_step(durable_step_);
  hello.set_policy_version(state_.policy_version);
  *hello.mutable_last_commit() = state_.commit;
  hello.mutable_last_commit()->set_incarnation(state_.incarnation);
  for (const auto& [key, value] : job_.settings()) (*hello.mutable_settings())[key] = value;
  hello.set_log_id(state_.log_id);
  hello.set_groups_end(state_.groups_end);
  const absl::StatusOr<v1::HelloReply> reply = source_->hello(hello, stop);
  if (absl::IsDataLoss(reply.status())) {
    return absl::DataLossError(absl::StrCat(job_.run_directory(), "/checkpoints: ", reply.status().message()));
  }
  RETURN_IF_ERROR(reply.status());
  state_.log_id = reply->log_id();
  return absl::OkStatus();
}

// Runs a request. A gateway that forgot us is greeted first, with everything trained so far made durable, so
// that it does not deliver it again. It may know us all the same and leave the Hello unread, so the next
// commit says it once more.
absl::Status Learner::ask(std::stop_token stop, absl::FunctionRef<absl::Status()> request) {
  absl::Status status;
  for (int hellos = 0; hellos <= kHellosMax; ++hellos) {
    status = request();
    if (absl::IsFailedPrecondition(status))
      status = request();  // the first refusal may answer an earlier, repeated request
    if (!absl::IsFailedPrecondition(status)) return status;
    log_->info("saying Hello again: {}", std::string(status.message()));
    double unused = 0.0;
    if (!consumed_.empty() && durable_step_ != state_.step) RETURN_IF_ERROR(publish(&unused, &unused));
    RETURN_IF_ERROR(say_hello(stop));
  }
  return status;
}

absl::StatusOr<v1::Batch> Learner::next_batch(std::stop_token stop) {
  v1::BatchRequest request;
  request.set_incarnation(state_.incarnation);
  request.set_step(state_.step + 1);
  const bool warmup = state_.phase == Phase::kWarmup;
  request.set_kind(warmup ? v1::TRAJECTORY_KIND_DEMONSTRATION : v1::TRAJECTORY_KIND_ROLLOUT);
  request.set_num_groups(warmup ? config_.warmup.batch : job_.groups_per_batch);
  v1::Batch batch;
  RETURN_IF_ERROR(ask(stop, [&]() -> absl::Status {
    request.set_policy_version(state_.policy_version);
    ASSIGN_OR_RETURN(batch, source_->batch(request, stop));
    return absl::OkStatus();
  }));
  return batch;
}

double Learner::learning_rate() const {
  return state_.phase == Phase::kWarmup ? config_.warmup.learning_rate
                                        : scheduled_learning_rate(config_.optimizer, state_.rl_steps, config_.steps);
}

// Every rank, with the same message: the step and all that follows from it.
absl::StatusOr<StepResult> Learner::train(const v1::JournalBatch& message, TrainingBatch* batch) {
  if (weights_->behind()) rewrite_shared_weights();  // of the step before, which was no version
  const bool warmup = state_.phase == Phase::kWarmup;
  consumed_ = {message.consumed().begin(), message.consumed().end()};
  *batch =
      make_training_batch(message.batch(),
                          {.vocab = weights_->config().vocab,
                           .max_positions = weights_->config().max_positions,
                           .kind = warmup ? v1::TRAJECTORY_KIND_DEMONSTRATION : v1::TRAJECTORY_KIND_ROLLOUT,
                           .advantages = {.std = config_.advantage_std},
                           .trained = &consumed_},
                          log_);
  ASSIGN_OR_RETURN(StepResult result,
                   trainer_->step(*batch, warmup ? "sft" : config_.loss.objective, message.learning_rate()));
  ++state_.step;
  ++(warmup ? state_.warmup_steps : state_.rl_steps);
  exactly_published_ = exactly_published_ && !result.updated;
  state_.skipped_in_row = result.skipped ? state_.skipped_in_row + 1 : 0;
  if (!warmup) {
    take_ids(*batch, result);
    for (const v1::Group& group : message.batch().groups()) state_.groups_end = std::max(state_.groups_end, group.group_number() + 1);
  }
  if (warmup) end_warmup_when_due(demonstration_probability(*batch, result.gradient));
  return result;
}

void Learner::take_ids(const TrainingBatch& batch, const StepResult& result) {
  v1::Commit& commit = state_.commit;
  for (const std::string& id : batch.rollout_ids()) {
    consumed_.insert(id);
    *(result.skipped ? (*commit.mutable_dropped())["skipped_step"].add_rollout_ids()
                     : commit.add_trained_rollout_ids()) = id;
  }
  for (const auto& [reason, ids] : batch.refused) {
    for (const std::string& id : ids) {
      consumed_.insert(id);
      *(*commit.mutable_dropped())[reason].add_rollout_ids() = id;
    }
  }
}

void Learner::end_warmup_when_due(double probability) {
  std::vector<double>& recent = state_.demonstration_probabilities;
  recent.push_back(probability);
  if (recent.size() > kProbabilityWindow) recent.erase(recent.begin());
  double sum = 0.0;
  for (const double value : recent) sum += value;
  const bool good =
      recent.size() == kProbabilityWindow && sum / kProbabilityWindow >= config_.warmup.until_probability;
  if (!good && state_.warmup_steps < config_.warmup.steps) return;
  state_.phase = Phase::kRl;
  trainer_->optimizer().reset();  // its moments are of another objective
}

void Learner::count_publication() {
  ++state_.policy_version;
  exactly_published_ = true;
  if (config_.optimizer.reset_on_publish) trainer_->optimizer().reset();
}

void Learner::forget_consumed() {
  consumed_.clear();
  state_.commit.Clear();
  if (is_root()) tell(Command::kCommitted);
}

absl::Status Learner::send_commit(std::stop_token stop, v1::CommitReply* reply) {
  RETURN_IF_ERROR(ask(stop, [&]() -> absl::Status {
    v1::Commit commit = state_.commit;
    commit.set_incarnation(state_.incarnation);
    commit.set_step(durable_step_);
    commit.set_policy_version(state_.policy_version);
    commit.set_final(finished());
    ASSIGN_OR_RETURN(*reply, source_->commit(commit, stop));
    return absl::OkStatus();
  }));
  forget_consumed();
  return absl::OkStatus();
}

// To the other ranks, and to the journal: what does not fit it needs a checkpoint.
void Learner::note(const v1::JournalBatch& message) {
  if (journal_ && static_cast<int64_t>(message.ByteSizeLong()) >= kRecordBytesMax) journal_.reset();
  if (!journal_ && group_.size() == 1) return;
  const std::string bytes = message.SerializeAsString();
  tell(Command::kBatch, bytes);
  if (journal_) journal_->add(bytes);
}

absl::Status Learner::one_step(std::stop_token stop, const Observers& observers) {
  StepReport report;
  report.phase = state_.phase;
  v1::JournalBatch message;
  v1::Batch& delivered = *message.mutable_batch();
  {
    const Timer timer(&report.wait_data_seconds);
    ASSIGN_OR_RETURN(delivered, next_batch(stop));
  }
  state_.wait_data_seconds += report.wait_data_seconds;
  if (state_.phase == Phase::kRl && state_.rl_steps < config_.record_batches) {
    RETURN_IF_ERROR(files_->write_batch(state_.step + 1, delivered));
  }
  report.policy_version = state_.policy_version;
  for (const std::string& id : consumed_) message.add_consumed(id);
  message.set_learning_rate(learning_rate());
  note(message);
  const ScoredWith scored{.policy_version = state_.policy_version, .exactly = exactly_published_};
  TrainingBatch batch;
  StepResult result;
  {
    const Timer timer(&report.train_seconds);
    ASSIGN_OR_RETURN(result, train(message, &batch));
  }
  report.step = state_.step;
  const bool warmup = report.phase == Phase::kWarmup;
  report.phase_step = warmup ? state_.warmup_steps : state_.rl_steps;
  report.phase_steps = warmup ? config_.warmup.steps : config_.steps;
  if (warmup) report.demonstration_probability = state_.demonstration_probabilities.back();
  fill_report(batch, result, scored, &report);
  if (!warmup)
    RETURN_IF_ERROR(files_->write_rollouts(report.step, report.policy_version, batch, result.gradient,
                                           observers.tokenizer));
  const bool broken = state_.skipped_in_row >= config_.max_skipped_steps;
  v1::CommitReply state_of_gateway;
  *state_of_gateway.mutable_counts() = std::move(*delivered.mutable_counts());
  *state_of_gateway.mutable_activity() = std::move(*delivered.mutable_activity());
  fill_counts(state_of_gateway, &report);
  report.wall_seconds = wall_seconds();
  state_.report = report;
  state_.report.checkpoint_seconds = state_.report.publish_seconds = std::nan("");
  const absl::Status durable = broken ? absl::OkStatus() : publish_when_due(stop, &report, &state_of_gateway);
  fill_counts(state_of_gateway, &report);
  if (!warmup) remember_rewards(state_of_gateway.activity());
  report.wall_seconds = wall_seconds();
  state_.report = report;
  record_metrics(batch, result, scored, report, metrics_);
  RETURN_IF_ERROR(files_->append(report));
  if (observers.scalars) observers.scalars(report.step, scalars_of(report));
  if (observers.step) observers.step(report);
  RETURN_IF_ERROR(durable);
  if (!result.skipped) return absl::OkStatus();
  log_->warn("step {} skipped: {} is not finite", report.step, result.offending);
  if (!broken) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("step ", state_.step, ": ", state_.skipped_in_row,
                                         " steps in a row skipped: ", result.offending, " is not finite"));
}

absl::Status Learner::publish_when_due(std::stop_token stop, StepReport* report, v1::CommitReply* reply) {
  const bool warmup_ended = report->phase == Phase::kWarmup && state_.phase == Phase::kRl;
  if (state_.phase == Phase::kWarmup) {
    if (state_.warmup_steps % config_.warmup.checkpoint_every != 0) return absl::OkStatus();
    return save_checkpoint(&report->checkpoint_seconds);
  }
  if (!warmup_ended && !finished() && state_.rl_steps % job_.publish_every != 0) return absl::OkStatus();
  RETURN_IF_ERROR(publish(&report->checkpoint_seconds, &report->publish_seconds));
  const Timer timer(&report->publish_seconds);
  return send_commit(stop, reply);
}

void Learner::fill_counts(const v1::CommitReply& gateway, StepReport* report) const {
  const v1::Counts& counts = gateway.counts();
  report->produced = counts.produced();
  report->trained = counts.trained();
  report->queued = counts.queued();
  report->running = counts.running();
  report->dropped = 0;
  report->dropped_by_reason.clear();
  for (const auto& [reason, count] : counts.dropped()) {
    report->dropped += count;
    report->dropped_by_reason[reason] = count;
  }
  const v1::Activity& activity = gateway.activity();
  report->generated_tokens = activity.generated_tokens();
  for (const auto& [role, seconds] : activity.idle_seconds()) report->idle_seconds[role] = seconds;
  report->idle_seconds["learner"] = state_.wait_data_seconds;
  if (report->phase == Phase::kRl && activity.rewards_size() > 0) fill_rewards(activity, report);
}

// The gateway's totals less what they were a step ago. A restarted learner has no difference to take.
void Learner::fill_rewards(const v1::Activity& activity, StepReport* report) const {
  if (rewards_seen_.empty() && report->phase_step > 1) return;
  double sum = 0.0;
  uint64_t count = 0;
  std::map<std::string, double> by_task;
  for (const auto& [task, total] : activity.rewards()) {
    const auto found = rewards_seen_.find(task);
    v1::RewardTotal before = found == rewards_seen_.end() ? v1::RewardTotal() : found->second;
    if (total.count() < before.count()) before.Clear();  // the gateway restarted and counts anew
    const double task_sum = total.sum() - before.sum();
    const uint64_t task_count = total.count() - before.count();
    if (task_count == 0) continue;
    by_task[task] = task_sum / static_cast<double>(task_count);
    sum += task_sum;
    count += task_count;
  }
  report->reward_by_task = std::move(by_task);
  report->reward_mean.reset();
  if (count > 0) report->reward_mean = sum / static_cast<double>(count);
}

void Learner::remember_rewards(const v1::Activity& activity) {
  for (const auto& [task, total] : activity.rewards()) rewards_seen_[task] = total;
}

}  // namespace slipstream::learner
