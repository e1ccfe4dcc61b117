#include "gateway/worker_pool.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "common/address.h"

namespace slipstream::gateway {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(10);  // then waiting for a worker is told

absl::Status validate_id(const char* call, const std::string& worker_id) {
  const std::string problem = file_name_problem(worker_id);
  return problem.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat(call, ": worker_id: ", problem));
}

absl::Status validate(const v1::RegisterRequest& request) {
  RETURN_IF_ERROR(validate_id("register", request.worker_id()));
  const auto refuse = [](auto&&... text) { return absl::InvalidArgumentError(absl::StrCat("register: ", text...)); };
  if (const std::string problem = address_problem(request.address(), 1); !problem.empty()) return refuse("address: ", problem);
  if (request.policy_version() < 0) return refuse("policy_version: ", request.policy_version(), ", expected >= 0");
  if (request.max_concurrent() <= 0) return refuse("max_concurrent: ", request.max_concurrent(), ", expected > 0");
  if (request.max_context() <= 0) return refuse("max_context: ", request.max_context(), ", expected > 0");
  if (request.start_time_us() <= 0) return refuse("start_time_us: ", request.start_time_us(), ", expected > 0");
  return absl::OkStatus();
}

}  // namespace

WorkerPool::WorkerPool(Options options, Metrics& metrics, Logger log)
    : options_(options), metrics_(metrics), log_(std::move(log)) {
  collector_ = metrics_.on_scrape([this](Metrics& to) {
    const absl::MutexLock lock(&mutex_);
    for (const auto& [id, entry] : entries_) {
      to.set(metric::kHeartbeatAge, absl::ToDoubleSeconds(absl::Now() - entry.last_heartbeat), {id});
    }
  });
  watcher_ = std::jthread([this](std::stop_token stop) { watch(stop); });
}

WorkerPool::~WorkerPool() {
  collector_.reset();
  watcher_.request_stop();
  watcher_.join();
  const absl::MutexLock lock(&mutex_);
  for (auto& [id, entry] : entries_) entry.gone.request_stop();
}

absl::Status WorkerPool::add(const v1::RegisterRequest& request) {
  RETURN_IF_ERROR(validate(request));
  const absl::MutexLock lock(&mutex_);
  if (!entries_.contains(request.worker_id()) && entries_.size() >= kWorkersMax) forget_one_dead();
  if (!entries_.contains(request.worker_id()) && entries_.size() >= kWorkersMax) {
    return absl::ResourceExhaustedError(absl::StrCat("register: ", kWorkersMax, " workers are up, no more are taken"));
  }
  Entry& entry = entries_[request.worker_id()];
  if (entry.up && request.start_time_us() < entry.worker->start_time_us) {
    return absl::AlreadyExistsError(absl::StrCat("register: worker ", request.worker_id(), " started at ",
                                                 entry.worker->start_time_us, " is up, this one started at ",
                                                 request.start_time_us()));
  }
  const bool same_life = entry.worker != nullptr && entry.worker->start_time_us == request.start_time_us();
  if (!same_life) {
    entry.generated_tokens_before += std::exchange(entry.generated_tokens, 0);
    entry.idle_seconds_before += std::exchange(entry.idle_seconds, 0);
  }
  entry.last_heartbeat = absl::Now();
  entry.policy_version = request.policy_version();
  if (entry.up && same_life && entry.worker->address == request.address()) return absl::OkStatus();
  if (entry.up) leave(entry, "was replaced by its next life");
  entry.gone = std::stop_source();
  entry.worker = std::make_shared<Worker>(Worker{.id = request.worker_id(),
                                                 .address = request.address(),
                                                 .start_time_us = request.start_time_us(),
                                                 .max_concurrent = request.max_concurrent(),
                                                 .max_context = request.max_context(),
                                                 .gone = entry.gone.get_token()});
  join(entry);
  return absl::OkStatus();
}

absl::Status WorkerPool::heartbeat(const v1::HeartbeatRequest& request) {
  RETURN_IF_ERROR(validate_id("heartbeat", request.worker_id()));
  const absl::MutexLock lock(&mutex_);
  Entry* entry = find(request.worker_id(), request.start_time_us());
  if (entry == nullptr) {
    return absl::NotFoundError(absl::StrCat("heartbeat: worker ", request.worker_id(), " started at ",
                                            request.start_time_us(), " is not registered"));
  }
  entry->last_heartbeat = absl::Now();
  entry->policy_version = request.policy_version();
  entry->running = request.running();
  // A worker's counters only grow; a peer that says otherwise must not make ours run backwards.
  const uint64_t generated = static_cast<uint64_t>(std::max<int64_t>(request.generated_tokens(), 0));
  entry->generated_tokens = std::max(entry->generated_tokens, generated);
  const double idle = request.idle_seconds();
  if (idle > entry->idle_seconds && idle < 1e12) entry->idle_seconds = idle;
  if (request.draining() && !entry->draining) {
    log_->info("worker {} drains", request.worker_id());
    entry->draining = true;
    ring_.remove(entry->worker->id);
  }
  if (std::exchange(entry->suspected, false)) changed_.SignalAll();
  return absl::OkStatus();
}

void WorkerPool::remove(const v1::UnregisterRequest& request) {
  const absl::MutexLock lock(&mutex_);
  Entry* entry = find(request.worker_id(), request.start_time_us());
  if (entry == nullptr) return;
  entry->draining = true;
  leave(*entry, "unregistered");
}

absl::StatusOr<std::shared_ptr<const Worker>> WorkerPool::route(const std::string& session_id, absl::Time deadline,
                                                                std::stop_token cancel) {
  // Made before the lock is taken and gone after it is released: its callback takes the lock.
  const std::stop_callback wake(cancel, [this] {
    const absl::MutexLock lock(&mutex_);
    changed_.SignalAll();
  });
  const absl::Time began = absl::Now();
  const absl::MutexLock lock(&mutex_);
  while (true) {
    if (cancel.stop_requested()) return absl::CancelledError("cancelled while waiting for a rollout worker");
    if (std::shared_ptr<const Worker> worker = choose(session_id)) return worker;
    const absl::Time now = absl::Now();
    if (now >= deadline) return absl::DeadlineExceededError("no rollout worker is up");
    if (now >= began + kPatience) {
      if (const auto more = waits_.pass(now)) log_->warn("no rollout worker is up; episodes wait for one{}", *more);
    }
    changed_.WaitWithDeadline(&mutex_, std::min(deadline, now + kPatience));
  }
}

std::shared_ptr<const Worker> WorkerPool::choose(const std::string& session_id) {
  if (ring_.empty()) return nullptr;
  const auto held = sessions_.find(session_id);
  const std::string* now = held != sessions_.end() && usable(held->second.worker_id) ? &held->second.worker_id : nullptr;
  if (now != nullptr && held->second.epoch == epoch_) return entries_.at(*now).worker;

  const int64_t num_sessions = static_cast<int64_t>(sessions_.size()) + (held == sessions_.end() ? 1 : 0);
  const int64_t most = bounded_load(num_sessions, ring_.num_nodes());
  const std::string* best = ring_.find(session_id, [&](const std::string& id) {
    mutex_.AssertHeld();
    const int64_t others = entries_.at(id).sessions - (held != sessions_.end() && held->second.worker_id == id ? 1 : 0);
    return usable(id) && others < most;
  });
  // While some are suspected the others hold more than the bound.
  if (best == nullptr) best = ring_.find(session_id, [&](const std::string& id) { return mutex_.AssertHeld(), usable(id); });
  if (best == nullptr) return nullptr;
  // A session that has a worker leaves it for one that joined since, and for no other reason: loads that shift are none.
  const bool stays = now != nullptr && entries_.at(*best).joined <= held->second.epoch;
  assign(sessions_[session_id], stays ? std::string(*now) : *best);
  return entries_.at(sessions_[session_id].worker_id).worker;
}

void WorkerPool::assign(Assignment& assignment, const std::string& worker_id) {
  assignment.epoch = epoch_;
  if (assignment.worker_id == worker_id) return;
  if (const auto before = entries_.find(assignment.worker_id); before != entries_.end()) --before->second.sessions;
  if (!assignment.worker_id.empty()) metrics_.add(metric::kMovedSessions, 1);
  assignment.worker_id = worker_id;
  ++entries_.at(worker_id).sessions;
}

std::shared_ptr<const Worker> WorkerPool::release(const std::string& session_id) {
  const absl::MutexLock lock(&mutex_);
  const auto held = sessions_.find(session_id);
  if (held == sessions_.end()) return nullptr;
  const auto entry = entries_.find(held->second.worker_id);
  sessions_.erase(held);
  if (entry == entries_.end()) return nullptr;
  --entry->second.sessions;
  return entry->second.up ? entry->second.worker : nullptr;
}

void WorkerPool::suspect(const Worker& worker) {
  const absl::MutexLock lock(&mutex_);
  if (Entry* entry = find(worker.id, worker.start_time_us)) entry->suspected = true;
}

void WorkerPool::watch(std::stop_token stop) {
  const absl::Duration patience = absl::Milliseconds(int64_t{options_.heartbeat_ms} * options_.heartbeat_misses);
  const std::stop_callback wake(stop, [this] {
    const absl::MutexLock lock(&mutex_);
    changed_.SignalAll();
  });
  const absl::MutexLock lock(&mutex_);
  while (!stop.stop_requested()) {
    const absl::Time now = absl::Now();
    absl::Time next = now + patience;
    for (auto& [id, entry] : entries_) {
      if (!entry.up) continue;
      if (entry.last_heartbeat + patience <= now) {
        leave(entry, "is dead: its heartbeats stopped");
      } else {
        next = std::min(next, entry.last_heartbeat + patience);
      }
    }
    changed_.WaitWithDeadline(&mutex_, next);
  }
}

void WorkerPool::join(Entry& entry) {
  log_->info("worker {} at {} is up, policy version {}", entry.worker->id, entry.worker->address, entry.policy_version);
  entry.up = true;
  entry.draining = entry.suspected = false;
  entry.joined = ++epoch_;
  entry.running = 0;
  ring_.add(entry.worker->id);
  metrics_.set(metric::kWorkerUp, 1, {entry.worker->id});
  changed_.SignalAll();
}

void WorkerPool::leave(Entry& entry, const char* why) {
  const auto level = entry.draining ? spdlog::level::info : spdlog::level::warn;  // who said goodbye is no surprise
  log_->log(level, "worker {} at {} {}", entry.worker->id, entry.worker->address, why);
  entry.up = false;
  entry.running = 0;
  ring_.remove(entry.worker->id);
  metrics_.set(metric::kWorkerUp, 0, {entry.worker->id});
  entry.gone.request_stop();  // its callbacks cancel calls; none of them comes back here
}

void WorkerPool::forget_one_dead() {
  const auto dead = std::find_if(entries_.begin(), entries_.end(),
                                 [](const auto& item) { return !item.second.up && item.second.sessions == 0; });
  if (dead != entries_.end()) entries_.erase(dead);
}

WorkerPool::Entry* WorkerPool::find(const std::string& id, int64_t start_time_us) {
  const auto entry = entries_.find(id);
  const bool found = entry != entries_.end() && entry->second.up && entry->second.worker->start_time_us == start_time_us;
  return found ? &entry->second : nullptr;
}

bool WorkerPool::usable(const std::string& id) const {
  const auto entry = entries_.find(id);
  return entry != entries_.end() && entry->second.up && !entry->second.draining && !entry->second.suspected;
}

std::vector<v1::WorkerStatus> WorkerPool::status() const {
  const absl::MutexLock lock(&mutex_);
  std::vector<v1::WorkerStatus> out;
  for (const auto& [id, entry] : entries_) {
    v1::WorkerStatus& status = out.emplace_back();
    status.set_worker_id(id);
    status.set_address(entry.worker->address);
    status.set_up(entry.up);
    status.set_policy_version(entry.policy_version);
    status.set_running(entry.running);
  }
  return out;
}

uint64_t WorkerPool::generated_tokens() const {
  const absl::MutexLock lock(&mutex_);
  uint64_t sum = 0;
  for (const auto& [id, entry] : entries_) sum += entry.generated_tokens + entry.generated_tokens_before;
  return sum;
}

double WorkerPool::idle_seconds() const {
  const absl::MutexLock lock(&mutex_);
  double sum = 0;
  for (const auto& [id, entry] : entries_) sum += entry.idle_seconds + entry.idle_seconds_before;
  return entries_.empty() ? 0 : sum / static_cast<double>(entries_.size());
}

}  // namespace slipstream::gateway
