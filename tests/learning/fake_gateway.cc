#include "tests/learning/fake_gateway.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "zmq.hpp"

namespace slipstream::learner::testing {

FakeGateway::FakeGateway(FakeGatewayOptions options) : options_(std::move(options)) {
  std::promise<std::string> bound;
  std::future<std::string> address = bound.get_future();
  thread_ = std::jthread([this, bound = std::move(bound)](std::stop_token stop) mutable { serve(stop, bound); });
  address_ = address.get();
}

void FakeGateway::serve(std::stop_token stop, std::promise<std::string>& bound) {
  zmq::context_t context(1);
  zmq::socket_t socket(context, zmq::socket_type::router);
  socket.set(zmq::sockopt::linger, 0);
  socket.bind(options_.address);
  bound.set_value(socket.get(zmq::sockopt::last_endpoint));
  std::string last_peer;
  int received = 0;
  const auto send = [&](const std::string& bytes) {
    static_cast<void>(socket.send(zmq::buffer(last_peer), zmq::send_flags::sndmore));
    static_cast<void>(socket.send(zmq::buffer(bytes), zmq::send_flags::none));
  };
  while (!stop.stop_requested()) {
    zmq::pollitem_t item{socket.handle(), 0, ZMQ_POLLIN, 0};
    zmq::poll(&item, 1, std::chrono::milliseconds(5));
    if (garbage_.exchange(false) && !last_peer.empty()) send("\xff\xff no message");
    zmq::message_t peer, body;
    while (socket.recv(peer, zmq::recv_flags::dontwait)) {
      CHECK(socket.recv(body).has_value());
      last_peer = peer.to_string();
      if (options_.drop_every > 0 && ++received % options_.drop_every == 0) continue;
      v1::LearnerMessage message;
      CHECK(message.ParseFromString(body.to_string()));
      std::vector<v1::GatewayMessage> answers;
      {
        const absl::MutexLock lock(&mutex_);
        answers = answer(message);
      }
      if (message.has_commit() && lose_commit_reply_.exchange(false)) continue;
      for (int i = 0; i < options_.repeat_replies; ++i) {
        for (const v1::GatewayMessage& reply : answers) send(reply.SerializeAsString());
      }
    }
  }
}

FakeGateway::~FakeGateway() = default;

void FakeGateway::restart() {
  const absl::MutexLock lock(&mutex_);
  incarnation_ = 0;
  delivered_.clear();
}

void FakeGateway::send_garbage() { garbage_ = true; }

std::vector<v1::GatewayMessage> FakeGateway::answer(const v1::LearnerMessage& message) {
  v1::GatewayMessage reply;
  if (message.has_hello()) {
    hellos_.push_back(message.hello());
    record(message.hello().last_commit());
    incarnation_ = message.hello().incarnation();
    delivered_.clear();
    reply.mutable_hello_reply()->set_incarnation(incarnation_);
    reply.mutable_hello_reply()->set_log_id("log");
    return {reply};
  }
  const int64_t incarnation =
      message.has_commit() ? message.commit().incarnation() : message.batch_request().incarnation();
  if (incarnation != incarnation_) {
    reply.mutable_refused()->set_code(9);  // FAILED_PRECONDITION
    reply.mutable_refused()->set_message("say Hello first");
    return {reply};
  }
  if (message.has_batch_request()) return batch(message.batch_request());
  commits_.push_back(message.commit());
  record(message.commit());
  reply.mutable_commit_reply()->set_incarnation(incarnation);
  reply.mutable_commit_reply()->set_step(message.commit().step());
  *reply.mutable_commit_reply()->mutable_counts() = counts();
  return {reply};
}

void FakeGateway::record(const v1::Commit& commit) {
  trained_.insert(commit.trained_rollout_ids().begin(), commit.trained_rollout_ids().end());
  for (const auto& [reason, ids] : commit.dropped()) {
    for (const std::string& id : ids.rollout_ids()) dropped_[id] = reason;
  }
  final_ = final_ || commit.final();
  for (const auto& [step, groups] : delivered_) {
    if (step <= commit.step()) done_groups_.insert(groups.begin(), groups.end());
  }
}

std::vector<v1::GatewayMessage> FakeGateway::batch(const v1::BatchRequest& request) {
  requests_.push_back(request);
  const bool demonstrations = request.kind() == v1::TRAJECTORY_KIND_DEMONSTRATION;
  std::vector<v1::Group> groups;
  if (demonstrations) {
    for (int i = 0; i < request.num_groups(); ++i) {
      groups.push_back(options_.demonstration(static_cast<uint64_t>(request.step() * 1000 + i)));
    }
  } else {
    std::set<uint64_t> busy = done_groups_;
    for (const auto& [step, numbers] : delivered_) busy.insert(numbers.begin(), numbers.end());
    std::vector<uint64_t>& mine = delivered_[request.step()];
    for (uint64_t number = 0; static_cast<int>(mine.size()) < request.num_groups(); ++number) {
      if (busy.contains(number)) continue;
      const v1::Group group = options_.group(number, request.policy_version());
      bool settled = true;
      for (const v1::Trajectory& trajectory : group.trajectories()) {
        settled = settled &&
                  (trained_.contains(trajectory.rollout_id()) || dropped_.contains(trajectory.rollout_id()));
      }
      if (!settled) mine.push_back(number);
    }
    for (const uint64_t number : mine) groups.push_back(options_.group(number, request.policy_version()));
  }
  std::vector<v1::GatewayMessage> out(static_cast<size_t>(options_.parts));
  for (size_t i = 0; i < out.size(); ++i) {
    v1::Batch& part = *out[i].mutable_batch();
    part.set_incarnation(request.incarnation());
    part.set_step(request.step());
    part.set_part(static_cast<int>(i));
    part.set_num_parts(options_.parts);
    *part.mutable_counts() = counts();
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    *out[i * out.size() / groups.size()].mutable_batch()->add_groups() = std::move(groups[i]);
  }
  return out;
}

v1::Counts FakeGateway::counts() const {
  v1::Counts out;
  out.set_trained(trained_.size());
  for (const auto& [id, reason] : dropped_) ++(*out.mutable_dropped())[reason];
  out.set_produced(trained_.size() + dropped_.size());
  return out;
}

std::set<std::string> FakeGateway::trained() const {
  const absl::MutexLock lock(&mutex_);
  return trained_;
}
std::map<std::string, std::string> FakeGateway::dropped() const {
  const absl::MutexLock lock(&mutex_);
  return dropped_;
}
std::vector<v1::Hello> FakeGateway::hellos() const {
  const absl::MutexLock lock(&mutex_);
  return hellos_;
}
std::vector<v1::Commit> FakeGateway::commits() const {
  const absl::MutexLock lock(&mutex_);
  return commits_;
}
std::vector<v1::BatchRequest> FakeGateway::requests() const {
  const absl::MutexLock lock(&mutex_);
  return requests_;
}
bool FakeGateway::wait_for_commit(int64_t step) const {
  const auto came = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !commits_.empty() && commits_.back().step() >= step;
  };
  const absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(&came), absl::Minutes(1));
}
bool FakeGateway::heard_final() const {
  const absl::MutexLock lock(&mutex_);
  return final_;
}

}  // namespace slipstream::learner::testing
