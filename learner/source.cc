#include "learner/source.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "common/check.h"
#include "zmq.hpp"

namespace slipstream::learner {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// Becomes readable when stop is requested, so that one poll waits for both.
class StopEvent {
 public:
  explicit StopEvent(const std::stop_token& stop)
      : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), callback_(stop, [this] { signal(); }) {
    CHECK_GE(fd_, 0);
  }
  ~StopEvent() { ::close(fd_); }
  StopEvent(const StopEvent&) = delete;
  StopEvent& operator=(const StopEvent&) = delete;
  int fd() const { return fd_; }

 private:
  void signal() const {
    const uint64_t one = 1;
    if (::write(fd_, &one, sizeof one) < 0) return;  // full: it is readable already
  }
  int fd_;
  std::stop_callback<std::function<void()>>
      callback_;  // after fd_: it may run at once, and is gone before fd_ closes
};

absl::Status refused(const v1::Refused& message, const std::string& what) {
  const int code = message.code() >= 1 && message.code() <= 16 ? message.code()
                                                               : static_cast<int>(absl::StatusCode::kUnknown);
  return absl::Status(static_cast<absl::StatusCode>(code),
                      absl::StrCat("gateway refused ", what, ": ", message.message()));
}

}  // namespace

// Exceptions of cppzmq end here.
struct Source::Socket {
  zmq::context_t context{1};
  zmq::socket_t socket{context, zmq::socket_type::dealer};

  absl::Status open(const std::string& address) {
    try {
      socket.set(zmq::sockopt::linger, 0);
      socket.set(zmq::sockopt::sndhwm, 16);  // requests to a gateway that is away are not worth keeping
      socket.set(zmq::sockopt::rcvhwm, 0);
      socket.set(zmq::sockopt::reconnect_ivl, 50);
      socket.set(zmq::sockopt::reconnect_ivl_max, 1'000);
      socket.connect(address);
      return absl::OkStatus();
    } catch (const zmq::error_t& error) {
      return absl::InvalidArgumentError(
          absl::StrCat("gateway address ", address, ": ", error.what(), ", expected tcp://host:port"));
    }
  }
  // A message that does not go is a message lost: the caller repeats it.
  void send(const std::string& bytes) {
    try {
      static_cast<void>(socket.send(zmq::buffer(bytes), zmq::send_flags::dontwait));
    } catch (const zmq::error_t&) {
    }
  }
  // The next message, if one is there.
  std::optional<std::string> receive() {
    try {
      zmq::message_t message;
      if (!socket.recv(message, zmq::recv_flags::dontwait)) return std::nullopt;
      return message.to_string();
    } catch (const zmq::error_t&) {
      return std::nullopt;
    }
  }
  void wait(int stop_fd, Milliseconds most) {
    zmq::pollitem_t items[] = {{socket.handle(), 0, ZMQ_POLLIN, 0}, {nullptr, stop_fd, ZMQ_POLLIN, 0}};
    try {
      zmq::poll(items, 2, std::max(most, Milliseconds(0)));
    } catch (const zmq::error_t&) {  // a signal: look again
    }
  }
};

absl::StatusOr<std::unique_ptr<Source>> Source::connect(const SourceOptions& options, Logger log) {
  auto socket = std::make_unique<Socket>();
  RETURN_IF_ERROR(socket->open(options.address));
  return std::unique_ptr<Source>(new Source(options, std::move(log), std::move(socket)));
}

Source::Source(const SourceOptions& options, Logger log, std::unique_ptr<Socket> socket)
    : options_(options), log_(std::move(log)), socket_(std::move(socket)) {}
Source::~Source() = default;

absl::Status Source::exchange(const v1::LearnerMessage& request, const std::string& what, int timeout_ms,
                              std::stop_token stop, absl::FunctionRef<bool(v1::GatewayMessage&)> take) {
  const StopEvent stopped(stop);
  const std::string bytes = request.SerializeAsString();
  const Clock::time_point begin = Clock::now(), deadline = begin + Milliseconds(timeout_ms);
  const Milliseconds reply_timeout(options_.reply_timeout_ms);
  const Milliseconds patience = reply_timeout * (request.has_batch_request() ? 30 : 5);
  Clock::time_point resend = begin, complain = begin + patience;
  while (true) {
    if (stop.stop_requested()) return absl::CancelledError(absl::StrCat(what, ": stopped"));
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      if (!request.has_batch_request()) {
        return absl::DeadlineExceededError(
            absl::StrCat("gateway ", options_.address, ": no answer to ", what, " within ", timeout_ms, " ms"));
      }
      return absl::DeadlineExceededError(absl::StrCat("no full batch from gateway ", options_.address, " within learner.batch_timeout_ms ",
                                                      timeout_ms, " (", what, "); its log says what became of the episodes"));
    }
    if (now >= complain) {
      log_->warn("gateway {}: no answer to {} for {:.0f} s; asking on", options_.address, what,
                 std::chrono::duration<double>(now - begin).count());
      complain = now + patience;
    }
    if (now >= resend) {
      socket_->send(bytes);
      resend = now + reply_timeout;
    }
    while (const std::optional<std::string> received = socket_->receive()) {
      v1::GatewayMessage answer;
      if (!answer.ParseFromString(*received)) {
        log_->warn("gateway {}: {} bytes that are no GatewayMessage, ignored", options_.address,
                   received->size());
        continue;
      }
      if (answer.has_refused()) {
        const absl::Status status = refused(answer.refused(), what);
        if (!absl::IsUnavailable(status)) return status;
        continue;  // asked again when the reply time-out is over
      }
      if (take(answer)) return absl::OkStatus();
    }
    Clock::time_point until = std::min(deadline, resend);
    if (options_.while_waiting) {
      RETURN_IF_ERROR(options_.while_waiting());
      until = std::min(until, Clock::now() + Milliseconds(100));
    }
    socket_->wait(stopped.fd(), std::chrono::duration_cast<Milliseconds>(until - Clock::now()) + Milliseconds(1));
  }
}

absl::StatusOr<v1::HelloReply> Source::hello(const v1::Hello& hello, std::stop_token stop) {
  v1::HelloReply reply;
  v1::LearnerMessage request;
  *request.mutable_hello() = hello;
  // A refusal does not say what it answers: one that says "who are you?" may be about a request repeated
  // before this Hello.
  constexpr int kAttempts = 5;
  absl::Status status;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    status = exchange(request, "Hello", options_.gateway_timeout_ms, stop, [&](v1::GatewayMessage& answer) {
      if (!answer.has_hello_reply() || answer.hello_reply().incarnation() != hello.incarnation()) return false;
      reply = std::move(*answer.mutable_hello_reply());
      return true;
    });
    if (status.ok()) return reply;
    if (!absl::IsFailedPrecondition(status)) return status;
  }
  return status;
}

absl::StatusOr<v1::Batch> Source::batch(const v1::BatchRequest& request, std::stop_token stop) {
  v1::LearnerMessage message;
  *message.mutable_batch_request() = request;
  std::vector<std::optional<v1::Batch>> parts;
  size_t missing = 0;
  const auto take = [&](v1::GatewayMessage& answer) {
    if (!answer.has_batch()) return false;
    v1::Batch& part = *answer.mutable_batch();
    if (part.incarnation() != request.incarnation() || part.step() != request.step())
      return false;  // an earlier answer, late
    const int count = std::max(1, part.num_parts());
    if (part.part() < 0 || part.part() >= count) return false;
    if (parts.size() !=
        static_cast<size_t>(count)) {  // the first part, or a gateway that cuts differently since its restart
      parts.assign(static_cast<size_t>(count), std::nullopt);
      missing = parts.size();
    }
    std::optional<v1::Batch>& slot = parts[static_cast<size_t>(part.part())];
    if (!slot) --missing;
    slot = std::move(part);
    return missing == 0;
  };
  RETURN_IF_ERROR(exchange(message, absl::StrCat("the BatchRequest of step ", request.step()),
                           options_.batch_timeout_ms, stop, take));
  v1::Batch out = *std::move(parts[0]);
  for (size_t i = 1; i < parts.size(); ++i) {
    for (v1::Group& group : *parts[i]->mutable_groups()) *out.add_groups() = std::move(group);
  }
  out.set_part(0);
  out.set_num_parts(1);
  return out;
}

absl::StatusOr<v1::CommitReply> Source::commit(const v1::Commit& commit, std::stop_token stop) {
  v1::LearnerMessage request;
  *request.mutable_commit() = commit;
  v1::CommitReply reply;
  RETURN_IF_ERROR(exchange(request, absl::StrCat("the Commit of step ", commit.step()),
                           options_.gateway_timeout_ms, stop, [&](v1::GatewayMessage& answer) {
                             if (!answer.has_commit_reply() ||
                                 answer.commit_reply().incarnation() != commit.incarnation() ||
                                 answer.commit_reply().step() != commit.step()) {
                               return false;
                             }
                             reply = std::move(*answer.mutable_commit_reply());
                             return true;
                           }));
  return reply;
}

}  // namespace slipstream::learner
