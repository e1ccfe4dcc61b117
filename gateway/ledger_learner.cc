// The ledger towards the learner: lives, batches, commits, counts.
#include <algorithm>
#include <utility>

#include "common/check.h"
#include "gateway/ledger.h"

namespace slipstream::gateway {

absl::Status Ledger::check_life(int64_t incarnation) const {
  if (incarnation < incarnation_) {
    return absl::FailedPreconditionError(absl::StrCat("learner incarnation ", incarnation, " is over: ", incarnation_,
                                                      " said hello since"));
  }
  if (incarnation > incarnation_ || !greeted_) {
    return absl::FailedPreconditionError(absl::StrCat("learner incarnation ", incarnation, " must say hello first"));
  }
  return absl::OkStatus();
}

// ---- lives

void Ledger::hello(const v1::Hello& hello, std::function<void(absl::StatusOr<v1::HelloReply>)> done) {
  v1::HelloReply reply;
  reply.set_incarnation(hello.incarnation());
  absl::Status refused;
  BatchDone superseded;
  {
    const absl::MutexLock lock(&mutex_);
    if (learner_record_under_way_) {
      return defer([this, hello, done] { this->hello(hello, done); }, done);
    }
    reply.set_log_id(log_id_);
    refused = check_hello(hello);
    if (refused.ok() && (hello.incarnation() != incarnation_ || !greeted_)) {
      incarnation_ = hello.incarnation();
      greeted_ = false;
      if (pending_.has_value()) superseded = std::move(pending_->done);
      pending_.reset();
      const Settled settled = mark_settling(hello.last_commit());
      std::vector<Record> records;
      for (const auto& [reason, ids] : settled) records.push_back({RecordType::kSettled, ids.SerializeAsString()});
      v1::LogLearner life;
      life.set_hello(true);
      life.set_incarnation(hello.incarnation());
      life.set_committed_step(hello.committed_step());
      records.push_back({RecordType::kLearner, life.SerializeAsString()});
      append(std::move(records), [this, settled, life, reply, done](const auto& positions) {
        begin_life(settled, life, positions.ok());
        positions.ok() ? done(reply) : done(positions.status());
        run_deferred();
      });
      learner_record_under_way_ = true;
      done = nullptr;  // the log answers
    }
  }
  if (superseded != nullptr) superseded(absl::CancelledError("the learner started again"));
  if (done == nullptr) return;
  if (refused.ok()) return done(reply);  // said before, the reply was lost
  done(refused);
}

absl::Status Ledger::check_hello(const v1::Hello& hello) const {
  if (hello.run_id() != config_.job.run_id) {
    return absl::InvalidArgumentError(absl::StrCat("the learner is of run \"", hello.run_id(), "\", this gateway of \"",
                                                   config_.job.run_id, "\""));
  }
  if (hello.incarnation() < 1) {
    return absl::InvalidArgumentError(absl::StrCat("incarnation ", hello.incarnation(), ", expected >= 1"));
  }
  for (const auto& [key, value] : config_.job.settings()) {
    const auto theirs = hello.settings().find(key);
    if (theirs == hello.settings().end() || theirs->second == value) continue;
    return absl::InvalidArgumentError(absl::StrCat(key, ": the learner has ", theirs->second, ", this gateway ", value,
                                                   "; expected the same"));
  }
  if (hello.incarnation() < incarnation_) return check_life(hello.incarnation());
  if (hello.incarnation() == incarnation_ && greeted_) return absl::OkStatus();
  if (hello.committed_step() < committed_step_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "stale checkpoint: the learner starts from step ", hello.committed_step(), ", but step ", committed_step_,
        " is committed and its trajectories are gone; put the newest checkpoint and its journal back into ", config_.job.run_directory(),
        "/checkpoints, or begin anew in another directory"));
  }
  return check_log(hello);
}

// A log that is gone while checkpoints trained from it are still there: the groups, and so the rollout ids, would begin again.
absl::Status Ledger::check_log(const v1::Hello& hello) const {
  const auto refuse = [&](auto&&... text) {
    return absl::DataLossError(absl::StrCat("the checkpoint of step ", hello.committed_step(), " does not belong to the log ",
                                            log_directory(), ", ", text..., ": rollout ids would be given out again; "
                                            "put the log back in place of the one there now, or remove both and begin anew"));
  };
  if (!hello.log_id().empty() && hello.log_id() != log_id_) {
    return refuse("whose id is ", log_id_, " instead of ", hello.log_id());
  }
  if (hello.groups_end() > next_group_number_) {
    return refuse("which has ", next_group_number_, " groups; the checkpoint was trained on group ", hello.groups_end() - 1);
  }
  return absl::OkStatus();
}

// One record of a life or a commit is on its way to the disk at a time, so that what it settles is known to be settled, or
// not, before the next one is looked at.
void Ledger::defer(std::function<void()> run, std::function<void(absl::Status)> cancel) {
  deferred_.push_back({std::move(run), std::move(cancel)});
}

void Ledger::run_deferred() {
  std::vector<Deferred> now;
  {
    const absl::MutexLock lock(&mutex_);
    learner_record_under_way_ = false;
    if (closing_) return;
    now.swap(deferred_);
  }
  for (const Deferred& deferred : now) deferred.run();
}

void Ledger::begin_life(const Settled& settled, const v1::LogLearner& life, bool durable) {
  const absl::MutexLock lock(&mutex_);
  end_settling(settled, durable);
  if (!durable || life.incarnation() != incarnation_ || greeted_) return;
  greeted_ = heard_ = true;
  final_ = false;  // it came back for more
  committed_step_ = std::max(committed_step_, life.committed_step());
  requeue_delivered();
  episodes_changed_.Signal();
}

void Ledger::requeue_delivered() {
  for (const auto& [step, delivered] : delivered_) {
    for (const v1::LogDeliveredGroup& group : delivered.record.groups()) {
      const auto found = groups_.find(group.group_number());
      if (found != groups_.end()) found->second.step.reset();
    }
  }
  delivered_.clear();
}

// ---- batches

absl::Status Ledger::check_request(const v1::BatchRequest& request) const {
  RETURN_IF_ERROR(check_life(request.incarnation()));
  if (request.kind() != v1::TRAJECTORY_KIND_ROLLOUT && request.kind() != v1::TRAJECTORY_KIND_DEMONSTRATION) {
    return absl::InvalidArgumentError(absl::StrCat("kind ", static_cast<int>(request.kind()),
                                                   ", expected rollout or demonstration"));
  }
  const bool rollouts = request.kind() == v1::TRAJECTORY_KIND_ROLLOUT;
  const int most = rollouts ? config_.job.groups_per_batch : 1'000'000;
  if (request.num_groups() < 1 || request.num_groups() > most) {
    return absl::InvalidArgumentError(absl::StrCat("num_groups ", request.num_groups(), ", expected 1 .. ", most,
                                                   rollouts ? " (rl.groups_per_batch)" : ""));
  }
  if (request.policy_version() < 0) {
    return absl::InvalidArgumentError(absl::StrCat("policy_version ", request.policy_version(), ", expected >= 0"));
  }
  if (request.step() < committed_step_) {
    return absl::FailedPreconditionError(absl::StrCat("step ", request.step(), " is asked for, but step ", committed_step_,
                                                      " is committed"));
  }
  return absl::OkStatus();
}

void Ledger::observe(int64_t step, int policy_version) {
  if (policy_version != policy_version_ || step < first_step_at_version_) first_step_at_version_ = step;
  delivered_sizes_.erase(delivered_sizes_.begin(), delivered_sizes_.lower_bound(first_step_at_version_));
  step_ = step;
  policy_version_ = policy_version;
}

void Ledger::request_batch(const v1::BatchRequest& request, BatchDone done) {
  absl::Status refused;
  BatchDone superseded;
  {
    const absl::MutexLock lock(&mutex_);
    refused = check_request(request);
    if (refused.ok()) {
      heard_ = true;
      if (pending_.has_value()) superseded = std::move(pending_->done);
      pending_.reset();
      observe(request.step(), request.policy_version());
      if (request.kind() == v1::TRAJECTORY_KIND_DEMONSTRATION) {
        warming_up_ = true;
        demonstrations_.request(request.step(), request.num_groups());
        pending_ = PendingRequest{request, std::move(done)};
      } else {
        rollouts_open_ = true;
        // What the model was before its warm-up is not one version behind: it is another model.
        if (std::exchange(warming_up_, false)) warm_version_ = request.policy_version();
        demonstrations_.clear();
        expire_external_groups();
        if (delivered_.contains(request.step())) {
          write_delivered(request.step(), std::move(done));
        } else {
          delivered_sizes_.erase(delivered_sizes_.lower_bound(request.step()), delivered_sizes_.end());
          pending_ = PendingRequest{request, std::move(done)};
        }
      }
      answer_pending();
      episodes_changed_.Signal();
    }
  }
  if (superseded != nullptr) superseded(absl::CancelledError("asked for again"));
  if (!refused.ok()) done(refused);
}

void Ledger::answer_demonstrations() {
  const v1::BatchRequest& request = pending_->request;
  const absl::StatusOr<std::optional<Demonstrations::Batch>> ready = demonstrations_.ready(request.step());
  if (ready.ok() && !ready->has_value()) return;
  Assembly assembly{.batch = {}, .items = {}, .done = std::move(pending_->done)};
  assembly.batch.set_incarnation(request.incarnation());
  assembly.batch.set_step(request.step());
  if (ready.ok()) {
    for (const auto& trajectory : **ready) {
      v1::Group* group = assembly.batch.add_groups();
      group->set_group_id(trajectory->group_id());
      group->set_group_number(static_cast<uint64_t>(assembly.batch.groups_size() - 1));
      *group->add_trajectories() = *trajectory;
      group->add_rows(0);
    }
  } else {
    assembly.done = [done = std::move(assembly.done), status = ready.status()](const auto&) { done(status); };
  }
  pending_.reset();
  const absl::MutexLock lock(&assembly_mutex_);
  assemblies_.push_back(std::move(assembly));
}

// The first groups, in the order of their numbers, that pass the filters at the learner's version. With max_staleness 0 an
// unfinished group holds up those behind it: then the batch is the same whatever the timing.
void Ledger::answer_pending() {
  if (!pending_.has_value() || closing_ || log_ == nullptr) return;
  if (pending_->request.kind() == v1::TRAJECTORY_KIND_DEMONSTRATION) return answer_demonstrations();
  const auto wanted = static_cast<size_t>(pending_->request.num_groups());
  std::vector<std::pair<uint64_t, GroupDecision>> chosen;
  std::vector<std::pair<uint64_t, GroupDecision>> dead;
  for (const auto& [number, group] : groups_) {
    if (chosen.size() == wanted) break;
    if (group.step.has_value()) continue;
    if (!is_complete(group)) {
      if (config_.job.max_staleness == 0) break;
      continue;
    }
    GroupDecision decision = decide_group(group);
    (decision.alive ? chosen : dead).emplace_back(number, std::move(decision));
  }
  Settled settled;
  for (const auto& [number, decision] : dead) {
    Group& group = groups_.at(number);
    drop(group, decision, &settled);
    count_group(group, decision.outcome);
  }
  append_settled(settled);
  for (const auto& [number, decision] : dead) close_if_settled(number);
  if (!dead.empty()) {
    forget_segments();
    episodes_changed_.Signal();
  }
  if (chosen.size() == wanted) deliver(chosen);
}

void Ledger::deliver(const std::vector<std::pair<uint64_t, GroupDecision>>& chosen) {
  const v1::BatchRequest& request = pending_->request;
  DeliveredStep& delivered = delivered_[request.step()];
  delivered.record.set_incarnation(request.incarnation());
  delivered.record.set_step(request.step());
  delivered.record.set_policy_version(request.policy_version());
  Settled settled;
  for (const auto& [number, decision] : chosen) {
    Group& group = groups_.at(number);
    drop(group, decision, &settled);
    count_group(group, decision.outcome);
    group.step = request.step();
    delivered.record.set_trajectories(delivered.record.trajectories() + group.info.size());
    v1::LogDeliveredGroup* out = delivered.record.add_groups();
    out->set_group_number(number);
    out->mutable_members()->Add(decision.members.begin(), decision.members.end());
    out->mutable_rows()->Add(decision.rows.begin(), decision.rows.end());
    out->mutable_masked_members()->Add(decision.masked.begin(), decision.masked.end());
  }
  append_settled(settled);
  delivered_sizes_[request.step()] = delivered.record.trajectories();
  BatchDone done = std::move(pending_->done);
  const int64_t step = request.step();
  pending_.reset();
  write_delivered(step, std::move(done));
}

// A batch is sent when it is on disk that it was: a restarted gateway must not put its groups into another step.
void Ledger::write_delivered(int64_t step, BatchDone done) {
  const DeliveredStep& delivered = delivered_.at(step);
  if (delivered.durable) return assemble(step, std::move(done));
  append({{RecordType::kDelivered, delivered.record.SerializeAsString()}},
         [this, step, incarnation = incarnation_, done = std::move(done)](const auto& positions) {
           absl::Status status = positions.status();
           {
             const absl::MutexLock lock(&mutex_);
             const auto found = delivered_.find(step);
             if (status.ok() && (found == delivered_.end() || incarnation != incarnation_)) {
               status = absl::CancelledError("the learner started again");
             }
             if (status.ok()) {
               found->second.durable = true;
               return assemble(step, done);
             }
           }
           done(status);
         });
}

void Ledger::assemble(int64_t step, BatchDone done) {
  const v1::LogDelivered& record = delivered_.at(step).record;
  Assembly assembly{.batch = {}, .items = {}, .done = std::move(done)};
  assembly.batch.set_incarnation(incarnation_);
  assembly.batch.set_step(step);
  for (const v1::LogDeliveredGroup& delivered : record.groups()) {
    v1::Group* out = assembly.batch.add_groups();
    const auto found = groups_.find(delivered.group_number());
    if (found == groups_.end()) {
      assembly.done = [step, answer = std::move(assembly.done)](const auto&) {
        answer(absl::FailedPreconditionError(absl::StrCat("step ", step, " is committed")));
      };
      assembly.items.clear();
      break;
    }
    const Group& group = found->second;
    out->set_group_id(group.info.group_id());
    out->set_group_number(delivered.group_number());
    *out->mutable_rows() = delivered.rows();
    for (const int member : delivered.members()) {
      const bool masked = std::find(delivered.masked_members().begin(), delivered.masked_members().end(), member) !=
                          delivered.masked_members().end();
      assembly.items.push_back({assembly.batch.groups_size() - 1, group.members[member].position, masked});
    }
  }
  const absl::MutexLock lock(&assembly_mutex_);
  assemblies_.push_back(std::move(assembly));
}

// Reading a batch back takes the disk's time: in a thread of its own, without the ledger's lock.
void Ledger::run_assembler() {
  while (true) {
    Assembly assembly;
    {
      const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(assembly_mutex_) {
        return !assemblies_.empty() || assembler_stop_;
      };
      const absl::MutexLock lock(&assembly_mutex_, absl::Condition(&work));
      if (assembler_stop_) return;  // what is left is cancelled by who stops it
      assembly = std::move(assemblies_.front());
      assemblies_.pop_front();
    }
    if (const absl::Status status = read_trajectories(&assembly); !status.ok()) {
      logger_->error("batch of step {}: {}", assembly.batch.step(), std::string(status.message()));
      assembly.done(status);
      continue;
    }
    assembly.batch.set_num_parts(1);
    *assembly.batch.mutable_counts() = counts();
    assembly.done(std::move(assembly.batch));
  }
}

absl::Status Ledger::read_trajectories(Assembly* assembly) const {
  for (const Assembly::Item& item : assembly->items) {
    ASSIGN_OR_RETURN(const std::string payload, log_->read(item.position));
    v1::LogTrajectory record;
    if (!record.ParseFromString(payload)) {
      return absl::DataLossError(absl::StrCat("trajectory at log offset ", item.position, " is damaged"));
    }
    if (item.masked) mask_actions(record.mutable_trajectory());
    *assembly->batch.mutable_groups(item.group)->add_trajectories() = std::move(*record.mutable_trajectory());
  }
  return absl::OkStatus();
}

// ---- commits

// What the commit settles and is not settled yet, by reason. Marked, so that a repetition settles nothing twice.
Ledger::Settled Ledger::mark_settling(const v1::Commit& commit) {
  Settled settled;
  int64_t unknown = 0;
  const auto mark = [&](const std::string& id, const std::string& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto found = queued_ids_.find(id);
    if (found == queued_ids_.end()) return void(++unknown);  // settled before
    Member& member = groups_.at(found->second.first).members[found->second.second];
    if (member.settling) return;
    member.settling = true;
    v1::LogSettled& out = settled[reason];
    out.set_reason(reason);
    out.add_rollout_ids(id);
  };
  for (const std::string& id : commit.trained_rollout_ids()) mark(id, "");
  for (const auto& [reason, ids] : commit.dropped()) {
    for (const std::string& id : ids.rollout_ids()) mark(id, reason.empty() ? "learner" : reason);
  }
  for (const auto& [step, delivered] : delivered_) {
    if (step >= commit.step()) continue;
    for (const v1::LogDeliveredGroup& group : delivered.record.groups()) {
      const auto found = groups_.find(group.group_number());
      if (found == groups_.end()) continue;
      for (int i = 0; i < found->second.info.size(); ++i) {
        const Member& member = found->second.members[i];
        if (member.state != Member::State::kQueued || member.settling) continue;
        const std::string id = rollout_id(found->second, i);
        logger_->warn("step {} is committed, but nothing was said about trajectory {} of step {}", commit.step(), id, step);
        mark(id, "not_trained");
      }
    }
  }
  if (unknown > 0) logger_->info("commit of step {}: {} trajectories were settled before", commit.step(), unknown);
  return settled;
}

void Ledger::end_settling(const Settled& settled, bool durable) {
  bool closed = false;
  for (const auto& [reason, ids] : settled) {
    for (const std::string& id : ids.rollout_ids()) {
      const auto [number, index] = queued_ids_.at(id);
      Group& group = groups_.at(number);
      group.members[index].settling = false;
      if (!durable) continue;
      settle(group, index, reason);
      closed |= close_if_settled(number);
    }
  }
  forget_settled_steps();
  if (closed) forget_segments();
}

// A delivered step is remembered while one of its groups is.
void Ledger::forget_settled_steps() {
  std::erase_if(delivered_, [&](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::none_of(entry.second.record.groups().begin(), entry.second.record.groups().end(),
                        [&](const v1::LogDeliveredGroup& group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                          return groups_.contains(group.group_number());
                        });
  });
}

void Ledger::commit(const v1::Commit& commit, std::function<void(absl::StatusOr<v1::CommitReply>)> done) {
  absl::Status refused;
  {
    const absl::MutexLock lock(&mutex_);
    if (learner_record_under_way_) {
      return defer([this, commit, done] { this->commit(commit, done); }, done);
    }
    refused = check_life(commit.incarnation());
    if (refused.ok()) {
      heard_ = true;
      const Settled settled = mark_settling(commit);
      std::vector<Record> records;
      for (const auto& [reason, ids] : settled) records.push_back({RecordType::kSettled, ids.SerializeAsString()});
      v1::LogLearner life;
      life.set_incarnation(commit.incarnation());
      life.set_committed_step(commit.step());
      life.set_final(commit.final() || final_);
      records.push_back({RecordType::kLearner, life.SerializeAsString()});
      append(std::move(records), [this, settled, life, done](const auto& positions) {
        const v1::CommitReply reply = end_commit(settled, life, positions.ok());
        positions.ok() ? done(reply) : done(positions.status());
        run_deferred();
      });
      learner_record_under_way_ = true;
      return;
    }
  }
  done(refused);
}

v1::CommitReply Ledger::end_commit(const Settled& settled, const v1::LogLearner& life, bool durable) {
  v1::CommitReply reply;
  const absl::MutexLock lock(&mutex_);
  end_settling(settled, durable);
  if (durable) {
    committed_step_ = std::max(committed_step_, life.committed_step());
    if (life.incarnation() == incarnation_) final_ = life.final();
    episodes_changed_.Signal();
  }
  reply.set_incarnation(life.incarnation());
  reply.set_step(life.committed_step());
  *reply.mutable_counts() = counts_locked();
  return reply;
}

// ---- counts

v1::Counts Ledger::counts_locked() const {
  v1::Counts out = counts_;
  out.set_queued(queued_ids_.size());
  out.set_running(static_cast<uint64_t>(running_));
  return out;
}

v1::Counts Ledger::counts() const {
  const absl::MutexLock lock(&mutex_);
  return counts_locked();
}

std::map<std::string, v1::RewardTotal> Ledger::rewards() const {
  const absl::MutexLock lock(&mutex_);
  return rewards_;
}

int Ledger::learner_policy_version() const {
  const absl::MutexLock lock(&mutex_);
  return policy_version_;
}

bool Ledger::learner_connected() const {
  const absl::MutexLock lock(&mutex_);
  return heard_;
}

bool Ledger::run_complete() const {
  const absl::MutexLock lock(&mutex_);
  return final_;
}

// One look at the ledger for all of them: they add up at every scrape.
void Ledger::export_metrics(Metrics& metrics) {
  v1::Counts now;
  int64_t ready = 0, open = 0, delivered = 0;
  {
    const absl::MutexLock lock(&mutex_);
    now = counts_locked();
    for (const auto& [number, group] : groups_) {
      ++(group.step.has_value() ? delivered : is_complete(group) ? ready : open);
    }
  }
  metrics.add(metric::kProducedTrajectories, static_cast<double>(now.produced() - exported_.produced()));
  metrics.add(metric::kTrainedTrajectories, static_cast<double>(now.trained() - exported_.trained()));
  for (const auto& [reason, count] : now.dropped()) {
    const auto before = exported_.dropped().find(reason);
    const uint64_t was = before == exported_.dropped().end() ? 0 : before->second;
    metrics.add(metric::kDroppedTrajectories, static_cast<double>(count - was), {reason});
  }
  metrics.set(metric::kQueuedTrajectories, static_cast<double>(now.queued()));
  metrics.set(metric::kRunningEpisodes, static_cast<double>(now.running()));
  metrics.set(metric::kQueueDepth, static_cast<double>(open), {"groups_running"});
  metrics.set(metric::kQueueDepth, static_cast<double>(ready), {"groups_ready"});
  metrics.set(metric::kQueueDepth, static_cast<double>(delivered), {"groups_delivered"});
  exported_ = now;
}

}  // namespace slipstream::gateway
