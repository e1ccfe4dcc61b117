#include "gateway/ledger.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/check.h"
#include "proto/words.h"

namespace slipstream::gateway {
namespace {

constexpr int64_t kDrought = 32;  // groups, a power of two
constexpr int64_t kTrajectoryBytesMax = (int64_t{1} << 30) - (1 << 10);  // of the log and of protobuf

}  // namespace

Ledger::Ledger(const GatewayConfig& config, Metrics& metrics, Logger logger)
    : config_(config),
      filters_{.max_staleness = config.job.max_staleness,
               .max_version_span = config.job.max_version_span,
               .overlong = config.overlong,
               .drop_zero_variance = config.drop_zero_variance},
      metrics_(metrics),
      logger_(std::move(logger)),
      schedule_(config.job.seed, config.environments),
      demonstrations_(config.job.seed, config.job.run_id, schedule_) {}

Ledger::~Ledger() {
  stop();
  collector_.reset();
  std::vector<BatchDone> waiting;
  {
    const absl::MutexLock lock(&mutex_);
    closing_ = true;
    if (pending_.has_value()) waiting.push_back(std::move(pending_->done));
    pending_.reset();
  }
  {
    const absl::MutexLock lock(&assembly_mutex_);
    assembler_stop_ = true;
  }
  if (assembler_.joinable()) assembler_.join();
  log_.reset();  // its last callbacks still find everything else
  {
    const absl::MutexLock lock(&assembly_mutex_);
    for (Assembly& left : assemblies_) waiting.push_back(std::move(left.done));
  }
  std::vector<Deferred> deferred;
  {
    const absl::MutexLock lock(&mutex_);
    deferred.swap(deferred_);
  }
  for (const BatchDone& done : waiting) done(absl::CancelledError("the gateway stops"));
  for (const Deferred& message : deferred) message.cancel(absl::CancelledError("the gateway stops"));
}

absl::Status Ledger::set_tasks(const std::string& environment, absl::Span<const v1::TaskDescription> descriptions) {
  const absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(schedule_.set_tasks(environment, descriptions));
  answer_pending();  // demonstrations may turn out not to exist
  episodes_changed_.Signal();
  return absl::OkStatus();
}

void Ledger::stop() {
  const absl::MutexLock lock(&mutex_);
  stopped_ = true;
  episodes_changed_.SignalAll();
}

// ---- plans

std::string Ledger::rollout_id(const Group& group, int index) const {
  std::string id = absl::StrCat(config_.job.run_id, "-g", group.info.group_number(), "-", index);
  if (const int attempt = group.members[index].attempt; attempt > 0) absl::StrAppend(&id, "-r", attempt);
  return id;
}

EpisodePlan Ledger::make_plan(const Group& group, int index) const {
  const auto attempt = static_cast<uint64_t>(group.members[index].attempt);
  EpisodePlan plan;
  plan.rollout_id = rollout_id(group, index);
  plan.group_id = group.info.group_id();
  plan.group_number = group.info.group_number();
  plan.group_index = index;
  plan.environment = group.info.environment();
  plan.task = group.info.task();
  plan.instance = group.info.instance();
  plan.sampling_seed = counter_hash(config_.job.seed, "sampling",
                                    {group.info.group_number(), static_cast<uint64_t>(index), attempt});
  plan.min_policy_version = std::max({0, policy_version_ - config_.job.max_staleness, warm_version_});
  return plan;
}

// Hundreds of threads may wait here. What changes wakes one of them, and one that finds an episode, or goes, wakes the next:
// woken all at once they would all look, and all but a few wait again.
std::optional<EpisodePlan> Ledger::next(std::stop_token stop) {
  // Before the lock, so that it is taken down after it: its callback takes the lock.
  const std::stop_callback on_stop(stop, [this] {
    const absl::MutexLock lock(&mutex_);
    episodes_changed_.SignalAll();
  });
  const absl::MutexLock lock(&mutex_);
  while (!stop.stop_requested() && !stopped_) {
    absl::Time retry = absl::InfiniteFuture();
    if (std::optional<EpisodePlan> plan = take_plan(&retry)) {
      episodes_changed_.Signal();
      return plan;
    }
    episodes_changed_.WaitWithDeadline(&mutex_, retry);
  }
  episodes_changed_.Signal();
  return std::nullopt;
}

std::optional<EpisodePlan> Ledger::try_next() {
  const absl::MutexLock lock(&mutex_);
  absl::Time retry;
  return stopped_ ? std::nullopt : take_plan(&retry);
}

std::optional<EpisodePlan> Ledger::take_plan(absl::Time* retry) {
  if (!schedule_.complete()) return std::nullopt;
  if (std::optional<EpisodePlan> demonstration = demonstrations_.next()) return demonstration;
  if (!rollouts_open_ || final_) return std::nullopt;
  if (planned_.empty()) start_scheduled_group(retry);
  if (planned_.empty()) return std::nullopt;
  const auto [number, index] = *planned_.begin();
  planned_.erase(planned_.begin());
  Group& group = groups_.at(number);
  group.members[index].state = Member::State::kRunning;
  ++running_;
  return make_plan(group, index);
}

// ---- admission

int64_t Ledger::admission_limit() const {
  return (int64_t{config_.job.max_staleness} + 1) * config_.job.publish_every * config_.job.batch_trajectories();
}

// Members of groups that run or wait, and of those delivered in the steps since the learner's version last changed, trained or
// not: the steps of one version consume what one version admits. A group counts whole until it is dropped, since repair
// fills it up: with max_staleness 0 the groups started are then the shortest prefix that has enough good ones, whatever the
// timing. Should the version not change after publish_every steps, as it ought to, the older steps no longer count.
int64_t Ledger::admitted() const {
  int64_t count = 0;
  for (const auto& [number, group] : groups_) {
    if (!group.step.has_value()) count += group.info.size();
  }
  for (const auto& [step, size] : delivered_sizes_) {
    if (step > step_ - config_.job.publish_every) count += size;
  }
  return count;
}

void Ledger::start_scheduled_group(absl::Time* retry) {
  if (admitted() + config_.job.group_size > admission_limit()) return;
  const uint64_t number = next_group_number_;
  const ScheduledTask task = schedule_.group(number);
  const absl::Time now = absl::Now();
  if (const absl::Time start = schedule_.start_time(task.task_index); start > now) {
    *retry = start;
    return;
  }
  schedule_.started(task.task_index, now);
  v1::LogGroup info;
  info.set_group_number(number);
  info.set_group_id(absl::StrCat(config_.job.run_id, "-g", number));
  info.set_environment(task.environment);
  info.set_task(task.task);
  info.set_instance(task.instance);
  info.set_size(config_.job.group_size);
  start_group(std::move(info));
  for (int i = 0; i < config_.job.group_size; ++i) planned_.emplace(number, i);
  episodes_changed_.Signal();
}

Ledger::Group& Ledger::start_group(v1::LogGroup info) {
  const uint64_t number = info.group_number();
  next_group_number_ = std::max(next_group_number_, number + 1);
  Group& group = groups_[number];
  group.members.resize(info.size());
  group.touched = absl::Now();
  for (Member& member : group.members) {
    member.state = info.external() ? Member::State::kAbsent : Member::State::kPlanned;
  }
  // Should it fail, the first trajectory takes it along; and a group without any need not be known.
  if (log_ != nullptr) {
    group.first_segment = append({{RecordType::kGroup, info.SerializeAsString()}}, [](const auto&) {});
  }
  group.info = std::move(info);
  return group;
}

absl::StatusOr<EpisodePlan> Ledger::admit(const std::string& task, const std::string& group_id, int group_size) {
  const int size = group_size == 0 ? 1 : group_size;
  if (size < 1 || size > config_.job.group_size) {
    return absl::InvalidArgumentError(absl::StrCat("group_size ", group_size, ", expected 1 .. rl.group_size ",
                                                   config_.job.group_size));
  }
  const absl::MutexLock lock(&mutex_);
  expire_external_groups();
  if (stopped_ || final_) return absl::ResourceExhaustedError("the run is complete: no more episodes are started");
  if (!rollouts_open_) return absl::ResourceExhaustedError("no episodes are started yet: the learner has not asked for rollouts");
  const auto known = external_groups_.find(group_id);
  uint64_t number = next_group_number_;
  if (known != external_groups_.end()) {
    number = known->second;
  } else {
    if (admitted() + size > admission_limit()) {
      return absl::ResourceExhaustedError(absl::StrCat("admission is closed: ", admitted(), " trajectories run or wait, at most ",
                                                       admission_limit(), " may"));
    }
    v1::LogGroup info;
    info.set_group_number(number);
    info.set_group_id(group_id.empty() ? absl::StrCat(config_.job.run_id, "-g", number) : group_id);
    info.set_task(task);
    info.set_size(size);
    info.set_external(true);
    external_groups_[info.group_id()] = info.group_number();
    start_group(std::move(info));
  }
  Group& group = groups_.at(number);
  if (group.info.size() != size || group.info.task() != task) {
    return absl::InvalidArgumentError(absl::StrCat("group_id \"", group_id, "\": group_size ", size, " and task \"", task,
                                                   "\", but its first member said ", group.info.size(), " and \"",
                                                   group.info.task(), "\""));
  }
  const auto free = std::find_if(group.members.begin(), group.members.end(),
                                 [](const Member& member) { return member.state == Member::State::kAbsent; });
  if (free == group.members.end() || group.sealed) {
    return absl::InvalidArgumentError(absl::StrCat("group_id \"", group_id, "\": all ", size, " members are taken"));
  }
  free->state = Member::State::kRunning;
  group.touched = absl::Now();
  ++running_;
  return make_plan(group, static_cast<int>(free - group.members.begin()));
}

// Agents that opened a group and went away must not hold back admission for ever.
void Ledger::expire_external_groups() {
  const absl::Time now = absl::Now();
  std::vector<uint64_t> expired;
  for (auto& [number, group] : groups_) {
    if (!group.info.external() || group.sealed || now - group.touched < absl::Milliseconds(config_.session_idle_ms)) continue;
    const bool busy = std::any_of(group.members.begin(), group.members.end(), [](const Member& member) {
      return member.state == Member::State::kRunning || member.state == Member::State::kLogging;
    });
    if (busy) continue;
    group.sealed = true;
    if (!group.step.has_value()) expired.push_back(number);
  }
  for (const uint64_t number : expired) {
    logger_->warn("group \"{}\": not all of its {} members came; closed", groups_.at(number).info.group_id(),
                  groups_.at(number).info.size());
    complete(groups_.at(number));
  }
}

// ---- the end of an episode

void Ledger::finish(const EpisodePlan& plan, v1::Trajectory trajectory, std::function<void(absl::StatusOr<uint64_t>)> done) {
  identify(plan, &trajectory);
  if (plan.kind == v1::TRAJECTORY_KIND_DEMONSTRATION) {
    {
      const absl::MutexLock lock(&mutex_);
      demonstrations_.finish(plan, std::move(trajectory));
      answer_pending();
      episodes_changed_.Signal();
    }
    done(uint64_t{0});
    return;
  }
  const TrajectorySummary summary = summarize(trajectory);
  const std::optional<std::string> excluded = exclusion(summary);
  v1::LogTrajectory record;
  record.set_group_number(plan.group_number);
  *record.mutable_trajectory() = std::move(trajectory);
  if (static_cast<int64_t>(record.ByteSizeLong()) > kTrajectoryBytesMax) {
    done(absl::InvalidArgumentError(absl::StrCat("trajectory ", plan.rollout_id, ": ", record.ByteSizeLong(),
                                                 " bytes, at most ", kTrajectoryBytesMax)));
    return;
  }
  std::vector<Record> records = {{RecordType::kTrajectory, record.SerializeAsString()}};
  absl::StatusOr<uint64_t> known = uint64_t{0};  // settled and forgotten
  {
    const absl::MutexLock lock(&mutex_);
    const auto found = groups_.find(plan.group_number);
    if (found != groups_.end()) {
      Group& group = found->second;
      const int index = plan.group_index;
      const auto recorded = group.recorded.find(plan.rollout_id);
      Member* member = index >= 0 && index < group.info.size() ? &group.members[index] : nullptr;
      if (recorded != group.recorded.end()) {
        known = recorded->second;
      } else if (member == nullptr || member->state == Member::State::kAbsent || rollout_id(group, index) != plan.rollout_id) {
        known = absl::NotFoundError(absl::StrCat("episode ", plan.rollout_id, " was given up before it finished"));
      } else {
        member->waiting.push_back(std::move(done));
        if (member->state == Member::State::kLogging) return;  // the first one's log offset answers both
        if (planned_.erase({plan.group_number, index}) > 0) ++running_;  // given up, and finished all the same
        member->state = Member::State::kLogging;
        member->summary = summary;
        if (!group.logged) records.insert(records.begin(), {RecordType::kGroup, group.info.SerializeAsString()});
        if (excluded.has_value()) {
          v1::LogSettled settled;
          settled.add_rollout_ids(plan.rollout_id);
          settled.set_reason(*excluded);
          records.push_back({RecordType::kSettled, settled.SerializeAsString()});
        }
        const size_t at = group.logged ? 0 : 1;
        append(std::move(records), [this, plan, at](absl::StatusOr<std::vector<TrajectoryLog::Position>> positions) {
          if (positions.ok()) return logged(plan.group_number, plan.group_index, plan, (*positions)[at]);
          logged(plan.group_number, plan.group_index, plan, positions.status());
        });
        return;
      }
    }
  }
  done(known);
}

void Ledger::logged(uint64_t group_number, int index, const EpisodePlan& plan,
                    absl::StatusOr<TrajectoryLog::Position> position) {
  std::vector<std::function<void(absl::StatusOr<uint64_t>)>> waiting;
  {
    const absl::MutexLock lock(&mutex_);
    Group& group = groups_.at(group_number);
    Member& member = group.members[index];
    waiting.swap(member.waiting);
    if (!position.ok()) {
      member.state = Member::State::kRunning;
    } else {
      group.logged = true;
      group.touched = absl::Now();
      --running_;
      const TrajectorySummary& summary = member.summary;
      const std::string task = schedule_.knows(plan.task) ? plan.task : "external";
      metrics_.add(metric::kTrajectories, 1, {task, rpc::word_of(summary.finish_reason)});
      const std::optional<std::string> excluded = exclusion(summary);
      if (!excluded.has_value()) {
        metrics_.observe(metric::kReward, summary.reward, {task});
        v1::RewardTotal& total = rewards_[task];
        total.set_sum(total.sum() + summary.reward);
        total.set_count(total.count() + 1);
      }
      account(group, index, plan.rollout_id, *position);
      if (excluded.has_value()) settle(group, index, *excluded);
      if (is_complete(group)) complete(group);
      answer_pending();
      episodes_changed_.Signal();
    }
  }
  for (const auto& done : waiting) done(position);
}

void Ledger::account(Group& group, int index, const std::string& id, TrajectoryLog::Position position) {
  Member& member = group.members[index];
  member.state = Member::State::kQueued;
  member.position = position;
  group.recorded[id] = position;
  queued_ids_[id] = {group.info.group_number(), index};
  counts_.set_produced(counts_.produced() + 1);
}

void Ledger::cancel(const EpisodePlan& plan) {
  const absl::MutexLock lock(&mutex_);
  if (plan.kind == v1::TRAJECTORY_KIND_DEMONSTRATION) {
    demonstrations_.cancel(plan);
    episodes_changed_.Signal();
    return;
  }
  const auto found = groups_.find(plan.group_number);
  if (found == groups_.end() || plan.group_index < 0 || plan.group_index >= found->second.info.size()) return;
  Group& group = found->second;
  Member& member = group.members[plan.group_index];
  if (member.state != Member::State::kRunning || rollout_id(group, plan.group_index) != plan.rollout_id) return;
  --running_;
  if (group.info.external()) {
    member.state = Member::State::kAbsent;  // another agent may take its place, under another id
    ++member.attempt;
    group.touched = absl::Now();
    if (group.sealed && is_complete(group)) complete(group);
  } else {
    member.state = Member::State::kPlanned;
    planned_.emplace(plan.group_number, plan.group_index);
  }
  episodes_changed_.Signal();
}

// ---- groups

bool Ledger::is_complete(const Group& group) const {
  return std::all_of(group.members.begin(), group.members.end(), [&](const Member& member) {
    switch (member.state) {
      case Member::State::kPlanned: case Member::State::kRunning: case Member::State::kLogging: return false;
      case Member::State::kAbsent: return group.sealed || !group.info.external();
      default: return true;
    }
  });
}

GroupDecision Ledger::decide_group(const Group& group) const {
  std::vector<GroupMember> members;
  for (const Member& member : group.members) {
    GroupMember& out = members.emplace_back();
    out.summary = member.summary;
    if (member.state == Member::State::kDropped) out.dropped = member.drop_reason;
    else if (member.state != Member::State::kQueued) out.dropped = "missing";
    else if (member.settling) out.dropped = "trained";
  }
  return decide(filters_, members, policy_version_);
}

// A complete group that no later filter can save is dropped at once: its place goes to another.
void Ledger::complete(Group& group) {
  const uint64_t number = group.info.group_number();
  const GroupDecision decision = decide_group(group);
  if (decision.alive) return tell_of_drought(nullptr);
  Settled settled;
  drop(group, decision, &settled);
  tell_of_drought(&group);
  count_group(group, decision.outcome);
  append_settled(settled);
  if (close_if_settled(number)) forget_segments();
  episodes_changed_.Signal();
}

void Ledger::drop(Group& group, const GroupDecision& decision, Settled* settled) {
  for (const auto& [index, reason] : decision.drops) {
    (*settled)[reason].add_rollout_ids(rollout_id(group, index));
    settle(group, index, reason);
  }
}

// A learner that gets nothing waits for hours: whoever looks at the log must find out why. `dropped`: the group that left
// nothing; null: one that did.
void Ledger::tell_of_drought(const Group* dropped) {
  if (dropped == nullptr) {
    drought_ = 0;
    drought_reasons_.clear();
    return;
  }
  for (const Member& member : dropped->members) {
    if (!member.drop_reason.empty()) ++drought_reasons_[member.drop_reason];
  }
  if (++drought_ < kDrought || (drought_ & (drought_ - 1)) != 0) return;  // at powers of two
  const auto line = [](std::string* out, const auto& reason) { absl::StrAppend(out, reason.second, " ", reason.first); };
  logger_->warn("the last {} groups left the learner nothing; their trajectories were dropped: {}{}", drought_,
                absl::StrJoin(drought_reasons_, ", ", line),
                drought_reasons_.contains("zero_variance")
                    ? " (zero_variance: all rewards of a group are equal, which teaches GRPO nothing; a longer warm-up, easier "
                      "tasks or gateway.drop_zero_variance: false help)"
                    : "");
}

// With repair: refill an excluded episode is run again instead of leaving a gap.
void Ledger::settle(Group& group, int index, const std::string& reason) {
  Member& member = group.members[index];
  CHECK(member.state == Member::State::kQueued);
  queued_ids_.erase(rollout_id(group, index));
  if (reason.empty()) {
    member.state = Member::State::kTrained;
    counts_.set_trained(counts_.trained() + 1);
    return;
  }
  member.state = Member::State::kDropped;
  member.drop_reason = reason;
  ++(*counts_.mutable_dropped())[reason];
  const bool refill = config_.repair == Repair::kRefill && !group.info.external() &&
                      member.attempt < config_.refills_max && exclusion(member.summary) == reason;
  if (refill) {
    ++member.attempt;
    member.state = Member::State::kPlanned;
    planned_.emplace(group.info.group_number(), index);
  }
}

bool Ledger::close_if_settled(uint64_t group_number) {
  const auto found = groups_.find(group_number);
  if (found == groups_.end() || !is_complete(found->second)) return false;
  const Group& group = found->second;
  if (std::any_of(group.members.begin(), group.members.end(),
                  [](const Member& member) { return member.state == Member::State::kQueued; })) {
    return false;
  }
  if (group.info.external()) external_groups_.erase(group.info.group_id());
  groups_.erase(found);
  return true;
}

// All other records are of groups that are alive, or their sum is in the newest snapshot.
void Ledger::forget_segments() {
  if (closing_) return;
  uint32_t oldest = log_->active_segment();
  for (const auto& [number, group] : groups_) oldest = std::min(oldest, group.first_segment);
  log_->forget_before(oldest);
}

void Ledger::count_group(Group& group, const std::string& outcome) {
  if (!group.counted) metrics_.add(metric::kGroups, 1, {outcome});
  group.counted = true;
}

// ---- the log

uint32_t Ledger::append(std::vector<Record> records, TrajectoryLog::Done done) {
  const size_t num_owed = owed_.size();
  const auto owed = std::make_shared<const std::vector<Record>>(std::move(owed_));
  owed_.clear();
  records.insert(records.begin(), owed->begin(), owed->end());
  return log_->append(std::move(records), [this, num_owed, owed, done = std::move(done)](
                                              absl::StatusOr<std::vector<TrajectoryLog::Position>> positions) {
    if (positions.ok()) {
      positions->erase(positions->begin(), positions->begin() + static_cast<std::ptrdiff_t>(num_owed));
    } else {
      const absl::MutexLock lock(&mutex_);
      owed_.insert(owed_.begin(), owed->begin(), owed->end());
    }
    done(std::move(positions));
  });
}

// For records nobody waits for: what they say holds in memory already.
void Ledger::append_owed(std::vector<Record> records) {
  if (closing_) return;  // the next gateway decides again
  const auto kept = std::make_shared<const std::vector<Record>>(records);
  append(std::move(records), [this, kept](const absl::StatusOr<std::vector<TrajectoryLog::Position>>& positions) {
    if (positions.ok()) return;
    const absl::MutexLock lock(&mutex_);
    owed_.insert(owed_.end(), kept->begin(), kept->end());
  });
}

void Ledger::append_settled(const Settled& settled) {
  std::vector<Record> records;
  for (const auto& [reason, ids] : settled) {
    v1::LogSettled record = ids;
    record.set_reason(reason);
    records.push_back({RecordType::kSettled, record.SerializeAsString()});
  }
  if (!records.empty()) append_owed(std::move(records));
}

}  // namespace slipstream::gateway
