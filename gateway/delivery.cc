#include "gateway/delivery.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <zmq.hpp>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/throttle.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"

namespace slipstream::gateway {
namespace {

constexpr int64_t kRequestBytesMax = 64 << 20;  // a commit of a million rollout ids
constexpr size_t kAnswersMax = 64;              // that wait for learners to read them
constexpr std::chrono::milliseconds kTick{200}, kRetry{5};

// Maps in a fixed order: a repeated answer has the same bytes.
std::string serialize(const v1::GatewayMessage& message) {
  std::string out;
  {
    google::protobuf::io::StringOutputStream stream(&out);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    message.SerializeToCodedStream(&coded);
  }
  return out;
}

std::string refused(const absl::Status& status) {
  v1::GatewayMessage message;
  message.mutable_refused()->set_code(static_cast<int>(status.code()));
  message.mutable_refused()->set_message(std::string(status.message()));
  return serialize(message);
}

// What is to be sent to one learner; its parts are sent in order.
struct Answer {
  std::string identity;
  int64_t batch_step = -1;  // a batch's
  std::vector<std::string> parts;
  size_t sent = 0;
};

// Shared with the callbacks that the ledger holds, which may outlive the Delivery.
struct Outbox {
  Outbox() : event(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  ~Outbox() { ::close(event); }
  Throttle refusals{absl::Seconds(10)};
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  void push(Answer answer) {
    {
      const absl::MutexLock lock(&mutex);
      if (closed) return;
      answers.push_back(std::move(answer));
    }
    wake();
  }
  void wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(event, &one, sizeof(one));  // full: awake already
  }

  const int event;
  absl::Mutex mutex;
  std::deque<Answer> answers ABSL_GUARDED_BY(mutex);
  bool closed ABSL_GUARDED_BY(mutex) = false;
};

}  // namespace

absl::StatusOr<std::vector<std::string>> split_batch(v1::Batch batch, int64_t part_bytes) {
  std::vector<v1::GatewayMessage> messages(1);
  int64_t bytes = 0;
  for (v1::Group& group : *batch.mutable_groups()) {
    const auto size = static_cast<int64_t>(group.ByteSizeLong());
    if (size > int64_t{1} << 30) {
      return absl::ResourceExhaustedError(absl::StrCat("group ", group.group_number(), ": ", size, " bytes, at most ", 1 << 30));
    }
    if (bytes > 0 && bytes + size > part_bytes) {
      messages.emplace_back();
      bytes = 0;
    }
    bytes += size + 8;
    messages.back().mutable_batch()->add_groups()->Swap(&group);
  }
  std::vector<std::string> parts;
  for (v1::GatewayMessage& message : messages) {
    v1::Batch* part = message.mutable_batch();
    part->set_incarnation(batch.incarnation());
    part->set_step(batch.step());
    part->set_part(static_cast<int>(parts.size()));
    part->set_num_parts(static_cast<int>(messages.size()));
    *part->mutable_counts() = batch.counts();
    *part->mutable_activity() = batch.activity();
    parts.push_back(serialize(message));
    message.Clear();
  }
  return parts;
}

struct Delivery::Impl {
  Impl(Ledger& the_ledger, Logger the_logger, ActivitySource the_activity)
      : ledger(the_ledger), logger(std::move(the_logger)), activity(std::move(the_activity)) {}

  void run(const std::stop_token& stop) noexcept;
  void receive();
  void handle(const std::string& identity, const v1::LearnerMessage& message);
  void send_answers();
  bool send(Answer* answer);

  Ledger& ledger;
  const Logger logger;
  const ActivitySource activity;
  zmq::context_t context{1};
  zmq::socket_t socket{context, zmq::socket_type::router};
  std::string endpoint;
  std::shared_ptr<Outbox> outbox = std::make_shared<Outbox>();
  std::deque<Answer> sending;  // of the thread
};

absl::StatusOr<std::unique_ptr<Delivery>> Delivery::start(const std::string& address, Ledger& ledger, Logger logger,
                                                          ActivitySource activity) {
  try {
    auto impl = std::make_unique<Impl>(ledger, std::move(logger), std::move(activity));
    impl->socket.set(zmq::sockopt::linger, 0);
    impl->socket.set(zmq::sockopt::router_mandatory, true);  // a full pipe is an error, not a lost part
    impl->socket.set(zmq::sockopt::sndhwm, 16);
    impl->socket.set(zmq::sockopt::maxmsgsize, kRequestBytesMax);
    std::string bound = address.find("://") == std::string::npos ? "tcp://" + address : address;
    if (bound.ends_with(":0")) bound = bound.substr(0, bound.size() - 1) + "*";
    try {
      impl->socket.bind(bound);
    } catch (const zmq::error_t& error) {
      return absl::UnavailableError(absl::StrCat("gateway.learner_address: ", address, " cannot be bound: ", error.what()));
    }
    impl->endpoint = impl->socket.get(zmq::sockopt::last_endpoint);
    std::unique_ptr<Delivery> delivery(new Delivery(std::move(impl)));
    delivery->thread_ = std::jthread([raw = delivery->impl_.get()](const std::stop_token& stop) { raw->run(stop); });
    return delivery;
  } catch (const zmq::error_t& error) {
    return absl::InternalError(absl::StrCat("gateway.learner_address: ", address, ": ZeroMQ: ", error.what()));
  }
}

Delivery::Delivery(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Delivery::~Delivery() {
  thread_.request_stop();
  impl_->outbox->wake();
  if (thread_.joinable()) thread_.join();
  const absl::MutexLock lock(&impl_->outbox->mutex);
  impl_->outbox->closed = true;
  impl_->outbox->answers.clear();
}

const std::string& Delivery::endpoint() const { return impl_->endpoint; }

void Delivery::Impl::run(const std::stop_token& stop) noexcept {
  while (!stop.stop_requested()) {
    try {
      zmq::pollitem_t items[] = {{socket.handle(), 0, ZMQ_POLLIN, 0}, {nullptr, outbox->event, ZMQ_POLLIN, 0}};
      zmq::poll(items, 2, sending.empty() ? kTick : kRetry);
      if (items[0].revents != 0) receive();
      if (items[1].revents != 0) {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t got = ::read(outbox->event, &count, sizeof(count));
      }
      send_answers();
    } catch (const std::exception& error) {  // interrupted, or out of memory for one message
      logger->error("delivery to the learner: {}", error.what());
    }
  }
}

void Delivery::Impl::receive() {
  for (int i = 0; i < 64; ++i) {  // then look after the answers
    std::vector<zmq::message_t> frames;
    do {
      zmq::message_t frame;
      if (!socket.recv(frame, zmq::recv_flags::dontwait).has_value()) return;
      frames.push_back(std::move(frame));
    } while (frames.back().more());
    const std::string identity = frames[0].to_string();
    v1::LearnerMessage message;
    if (frames.size() != 2) {
      outbox->push({identity, -1, {refused(absl::InvalidArgumentError(absl::StrCat(
                                      frames.size() - 1, " frames, expected one LearnerMessage from a DEALER socket")))}});
    } else if (!message.ParseFromArray(frames[1].data(), static_cast<int>(frames[1].size())) ||
               message.message_case() == v1::LearnerMessage::MESSAGE_NOT_SET) {
      outbox->push({identity, -1, {refused(absl::InvalidArgumentError(absl::StrCat(
                                      "a frame of ", frames[1].size(), " bytes that is no LearnerMessage")))}});
    } else {
      handle(identity, message);
    }
  }
}

void Delivery::Impl::handle(const std::string& identity, const v1::LearnerMessage& message) {
  // Cancelled: somebody else got, or will get, the answer.
  const auto answer = [out = outbox, identity, log = logger](const absl::Status& status) {
    if (status.code() == absl::StatusCode::kCancelled) return;
    if (const auto more = out->refusals.pass()) log->warn("learner refused: {}{}", std::string(status.message()), *more);
    out->push({identity, -1, {refused(status)}});
  };
  switch (message.message_case()) {
    case v1::LearnerMessage::kHello:
      ledger.hello(message.hello(), [out = outbox, identity, answer](absl::StatusOr<v1::HelloReply> reply) {
        if (!reply.ok()) return answer(reply.status());
        v1::GatewayMessage reply_message;
        *reply_message.mutable_hello_reply() = *std::move(reply);
        out->push({identity, -1, {serialize(reply_message)}});
      });
      return;
    case v1::LearnerMessage::kBatchRequest: {
      const int64_t step = message.batch_request().step();
      const bool under_way = std::any_of(sending.begin(), sending.end(), [&](const Answer& waiting) {
        return waiting.identity == identity && waiting.batch_step == step;
      });
      if (under_way) return;  // the learner is slow to read what it asks for again
      ledger.request_batch(message.batch_request(), [out = outbox, identity, answer, step,
                                                     source = activity](absl::StatusOr<v1::Batch> batch) {
        if (!batch.ok()) return answer(batch.status());
        if (source) *batch->mutable_activity() = source();
        absl::StatusOr<std::vector<std::string>> parts = split_batch(*std::move(batch), kPartBytes);
        if (!parts.ok()) return answer(parts.status());
        out->push({identity, step, *std::move(parts)});
      });
      return;
    }
    case v1::LearnerMessage::kCommit:
      ledger.commit(message.commit(), [out = outbox, identity, answer,
                                       source = activity](absl::StatusOr<v1::CommitReply> reply) {
        if (!reply.ok()) return answer(reply.status());
        v1::GatewayMessage reply_message;
        *reply_message.mutable_commit_reply() = *std::move(reply);
        if (source) *reply_message.mutable_commit_reply()->mutable_activity() = source();
        out->push({identity, -1, {serialize(reply_message)}});
      });
      return;
    case v1::LearnerMessage::MESSAGE_NOT_SET: return;
  }
}

void Delivery::Impl::send_answers() {
  {
    const absl::MutexLock lock(&outbox->mutex);
    for (Answer& answer : outbox->answers) sending.push_back(std::move(answer));
    outbox->answers.clear();
  }
  while (sending.size() > kAnswersMax) sending.pop_front();  // nobody reads them; whoever does asks again
  std::vector<std::string> full;  // identities whose pipe is: their later answers wait behind
  for (auto answer = sending.begin(); answer != sending.end();) {
    const bool behind = std::find(full.begin(), full.end(), answer->identity) != full.end();
    if (behind || !send(&*answer)) {
      full.push_back(answer->identity);
      ++answer;
    } else {
      answer = sending.erase(answer);
    }
  }
}

// False: the learner's pipe is full, go on later. A learner that is gone needs no answer.
bool Delivery::Impl::send(Answer* answer) {
  try {
    while (answer->sent < answer->parts.size()) {
      std::string& part = answer->parts[answer->sent];
      const auto flags = zmq::send_flags::sndmore | zmq::send_flags::dontwait;
      if (!socket.send(zmq::buffer(answer->identity), flags).has_value()) return false;
      socket.send(zmq::buffer(part), zmq::send_flags::dontwait);
      part = std::string();
      ++answer->sent;
    }
  } catch (const zmq::error_t& error) {
    if (error.num() != EHOSTUNREACH) throw;
  }
  return true;
}

}  // namespace slipstream::gateway
