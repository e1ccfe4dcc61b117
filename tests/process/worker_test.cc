// Goal: a worker as others see it, over real gRPC: streams, cancellation, refusals, garbage, drain, weights
// that arrive, break and arrive, a gateway that is away, comes, and forgets.
#include "rollout/worker.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <thread>

#include "absl/synchronization/notification.h"
#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"
#include "model/load.h"
#include "model/weight_stream.h"
#include "proto/rpc.h"
#include "slipstream/v1/rollout.grpc.pb.h"
#include "slipstream/v1/weights.grpc.pb.h"
#include "tests/property/fp8_checkpoint.h"
#include "tests/property/recording_sink.h"

namespace slipstream::rollout {
namespace {

namespace v1 = slipstream::v1;
using kernels::DType;

constexpr const char* kModel = "glm5_next";

// The checkpoint directory of the test model, made once.
const std::string& checkpoint() {
  static const slipstream::testing::TemporaryDirectory dir;
  static const bool saved = [] {
    CHECK_OK(model::save_weights(model::testing::make_test_model(kModel, DType::kF32, 1).loaded, dir.path(), {}));
    return true;
  }();
  static_cast<void>(saved);
  return dir.path();
}

// Serves weights by a script: what goes wrong with each of the first calls.
class FakeLearner : public v1::Weights::Service {
 public:
  enum class Fault { kCut, kFlipped, kForeign, kNoHeader, kOtherDtype, kOtherRun };
  explicit FakeLearner(std::vector<Fault> faults) : faults_(std::move(faults)) {
    server_ = *rpc::serve("learner", "127.0.0.1:0", {this});
  }
  ~FakeLearner() override { server_.server->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return server_.address; }
  void publish(std::shared_ptr<const model::WeightStore> weights, int32_t version) {
    const absl::MutexLock lock(&mutex_);
    weights_ = std::move(weights);
    version_ = version;
  }
  int calls() const {
    const absl::MutexLock lock(&mutex_);
    return calls_;
  }

  grpc::Status Fetch(grpc::ServerContext* context, const v1::FetchRequest* request,
                     grpc::ServerWriter<v1::WeightChunk>* writer) override {
    std::shared_ptr<const model::WeightStore> weights;
    int32_t version = 0;
    std::optional<Fault> fault;
    {
      const absl::MutexLock lock(&mutex_);
      const auto newer = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return version_ > request->have_version();
      };
      while (!mutex_.AwaitWithTimeout(absl::Condition(&newer), absl::Milliseconds(20))) {
        if (context->IsCancelled()) return grpc::Status(grpc::StatusCode::CANCELLED, "");
      }
      weights = weights_;
      version = version_;
      if (static_cast<size_t>(calls_) < faults_.size()) fault = faults_[static_cast<size_t>(calls_)];
      ++calls_;
    }
    if (fault == Fault::kOtherRun) return {grpc::StatusCode::FAILED_PRECONDITION, "of another run"};
    const DType dtype = request->dtype() == "bf16" ? DType::kBf16 : DType::kF32;
    const model::WeightStreamHeader header = model::weight_stream_header(*weights, dtype);
    v1::WeightChunk chunk;
    if (fault != Fault::kNoHeader) {
      v1::WeightHeader* out = chunk.mutable_header();
      out->set_policy_version(version);
      out->set_weights_id("run");
      out->set_learner_dtype(fault == Fault::kOtherDtype ? "bf16" : request->dtype());
      out->set_num_bytes(header.num_bytes);
      out->set_num_tensors(static_cast<int32_t>(header.num_tensors));
      out->set_shape_hash(header.shape_hash + (fault == Fault::kForeign ? 1 : 0));
      writer->Write(chunk);
    }
    model::WeightPieces pieces(*weights, dtype);
    int64_t sent = 0;
    for (model::WeightPiece piece; pieces.next(&piece); sent += static_cast<int64_t>(piece.data.size())) {
      if (fault == Fault::kCut && sent > header.num_bytes / 2) return {grpc::StatusCode::UNAVAILABLE, "cut"};
      chunk.mutable_piece()->set_tensor_index(static_cast<int32_t>(piece.tensor_index));
      chunk.mutable_piece()->set_offset(piece.offset);
      chunk.mutable_piece()->set_data(std::string(piece.data));
      if (fault == Fault::kFlipped && sent == 0) (*chunk.mutable_piece()->mutable_data())[0] ^= 1;
      if (!writer->Write(chunk)) return {grpc::StatusCode::CANCELLED, ""};
    }
    chunk.mutable_trailer()->set_crc32c(pieces.crc32c());
    writer->Write(chunk);
    return grpc::Status::OK;
  }

 private:
  mutable absl::Mutex mutex_;
  const std::vector<Fault> faults_;
  std::shared_ptr<const model::WeightStore> weights_ ABSL_GUARDED_BY(mutex_);
  int32_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  rpc::Server server_;
};

class FakeGateway : public v1::Workers::Service {
 public:
  explicit FakeGateway(const std::string& address = "127.0.0.1:0", int heartbeat_ms = 20) : heartbeat_ms_(heartbeat_ms) {
    server_ = *rpc::serve("gateway", address, {this});
  }
  ~FakeGateway() override { server_.server->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return server_.address; }

  grpc::Status Register(grpc::ServerContext*, const v1::RegisterRequest* request,
                        v1::RegisterResponse* response) override {
    const absl::MutexLock lock(&mutex_);
    worker_ = *request;
    known_ = true;
    ++registrations_;
    response->set_heartbeat_ms(heartbeat_ms_);
    return grpc::Status::OK;
  }
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse*) override {
    const absl::MutexLock lock(&mutex_);
    if (!known_) return {grpc::StatusCode::NOT_FOUND, "who?"};
    beat_ = *request;
    ++beats_;
    return grpc::Status::OK;
  }
  grpc::Status Unregister(grpc::ServerContext*, const v1::UnregisterRequest*,
                          v1::UnregisterResponse*) override {
    const absl::MutexLock lock(&mutex_);
    known_ = false;
    ++unregistrations_;
    return grpc::Status::OK;
  }
  void forget() {
    const absl::MutexLock lock(&mutex_);
    known_ = false;
  }
  struct Seen {
    v1::RegisterRequest worker;
    v1::HeartbeatRequest beat;
    int registrations = 0, beats = 0, unregistrations = 0;
  };
  // What there is once `enough` says so; dies after a minute.
  Seen wait(const std::function<bool(const Seen&)>& enough) {
    const absl::MutexLock lock(&mutex_);
    const auto now = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return Seen{worker_, beat_, registrations_, beats_, unregistrations_};
    };
    const auto ready = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return enough(now()); };
    CHECK(mutex_.AwaitWithTimeout(absl::Condition(&ready), absl::Minutes(1)));
    return now();
  }

 private:
  absl::Mutex mutex_;
  v1::RegisterRequest worker_ ABSL_GUARDED_BY(mutex_);
  v1::HeartbeatRequest beat_ ABSL_GUARDED_BY(mutex_);
  bool known_ ABSL_GUARDED_BY(mutex_) = false;
  int registrations_ ABSL_GUARDED_BY(mutex_) = 0, beats_ ABSL_GUARDED_BY(mutex_) = 0,
                     unregistrations_ ABSL_GUARDED_BY(mutex_) = 0;
  const int heartbeat_ms_;
  rpc::Server server_;
};

Worker::Config worker_config() {
  Worker::Config config;
  config.model.path = checkpoint();
  config.model.dtype = DType::kF32;
  return config;
}

v1::GenerateRequest request_of(const std::string& id, int max_tokens) {
  v1::GenerateRequest request;
  request.set_request_id(id);
  request.set_session_id("session of " + id);
  for (const int32_t token : {5, 9, 17}) request.add_prompt_ids(token);
  request.mutable_sampling()->set_temperature(1.0f);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.mutable_sampling()->set_seed(4);
  return request;
}

// A Generate call read to its end.
struct Reply {
  v1::GenerateEvent all;
  absl::Status status;
};

class WorkerTest : public ::testing::Test {
 protected:
  void start(const Worker::Config& config) {
    absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::start(config, metrics_, quiet_logger());
    CHECK_OK(worker.status());
    worker_ = *std::move(worker);
    channel_ = rpc::dial(worker_->address());
    // An attempt to connect lasts a second, which on a busy machine may not be enough.
    ASSERT_TRUE(channel_->WaitForConnected(absl::ToChronoTime(absl::Now() + absl::Minutes(1))));
    stub_ = v1::Rollout::NewStub(channel_);
  }
  Reply generate(const v1::GenerateRequest& request, absl::Duration timeout = absl::Minutes(1)) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    const auto reader = stub_->Generate(&context, request);
    Reply reply;
    for (v1::GenerateEvent event; reader->Read(&event);) reply.all.MergeFrom(event);
    reply.status = rpc::from_grpc(reader->Finish());
    return reply;
  }
  // A reply to request_of(.., 5) by these weights: an engine that starts on them says the same.
  void expect_engines_reply(const EngineConfig& config, const Engine::Weights& weights, const Reply& reply) {
    const std::unique_ptr<Engine> direct =
        *Engine::create(config, model::testing::test_config(kModel), weights, 1, metrics_, quiet_logger());
    const auto sink = std::make_shared<testing::RecordingSink>();
    Request same;
    same.request_id = "r";
    same.prompt_ids = {5, 9, 17};
    same.sampling = {.seed = 4, .max_tokens = 5};
    ASSERT_TRUE(direct->submit(same, sink).ok());
    ASSERT_TRUE(sink->wait().ok());
    ASSERT_EQ(sink->tokens.size(), 5u);
    ASSERT_EQ(reply.all.logprobs_size(), 5);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(sink->tokens[static_cast<size_t>(i)].logprob, reply.all.logprobs(i));
  }
  // Until the engine has nothing live; dies after a minute.
  void wait_idle() { CHECK(worker_->engine().wait_idle(absl::Now() + absl::Minutes(1))); }

  Metrics metrics_;
  std::unique_ptr<Worker> worker_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Rollout::Stub> stub_;
};

TEST_F(WorkerTest, StreamsColumnsAndReplay) {
  start(worker_config());
  v1::GenerateRequest request = request_of("r", 40);
  request.set_capture_experts(true);
  request.set_capture_selections(true);
  const Reply reply = generate(request);
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.all.ids_size(), 40);
  EXPECT_EQ(reply.all.logprobs_size(), 40);
  EXPECT_EQ(reply.all.policy_versions_size(), 40);
  EXPECT_EQ(reply.all.context_versions_size(), 40);
  EXPECT_EQ(reply.all.truncated_size(), 0);
  const v1::Finished& finished = reply.all.finished();
  EXPECT_EQ(finished.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(finished.prompt_tokens(), 3);
  EXPECT_EQ(finished.replay().num_rows(), 42);
  EXPECT_GT(finished.replay().experts().size(), 0u);
  EXPECT_GT(finished.replay().selections().size(), 0u);
  EXPECT_GT(metrics_.value(metric::kReplayBytes, {"experts"}), 0.0);
  EXPECT_GT(metrics_.value(metric::kReplayRawBytes), metrics_.value(metric::kReplayBytes, {"experts"}));
  // The same seed gives the same reply, and with the first half as prompt the second half.
  request.set_request_id("again");
  request.set_session_id("another");
  const Reply again = generate(request);
  EXPECT_EQ(again.all.SerializeAsString(), reply.all.SerializeAsString());
  v1::GenerateRequest rest = request_of("rest", 20);
  for (int i = 0; i < 20; ++i) rest.add_prompt_ids(reply.all.ids(i));
  const Reply half = generate(rest);
  ASSERT_EQ(half.all.ids_size(), 20);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(half.all.ids(i), reply.all.ids(20 + i));
}

TEST_F(WorkerTest, RefusalsNameTheField) {
  start(worker_config());
  v1::GenerateRequest empty = request_of("r", 5);
  empty.clear_prompt_ids();
  EXPECT_EQ(generate(empty).status,
            absl::InvalidArgumentError("prompt_ids: empty, expected at least one id"));
  v1::GenerateRequest no_tokens = request_of("r", 0);
  EXPECT_EQ(generate(no_tokens).status.code(), absl::StatusCode::kInvalidArgument);
  v1::GenerateRequest too_long = request_of("r", 5);
  for (int i = 0; i < 5000; ++i) too_long.add_prompt_ids(1);
  EXPECT_EQ(generate(too_long).status.code(), absl::StatusCode::kOutOfRange);
  // Unknown ids are no error.
  grpc::ClientContext context;
  v1::AbortRequest abort;
  abort.set_session_id("\xff\xfe");
  v1::AbortResponse response;
  EXPECT_TRUE(stub_->Abort(&context, abort, &response).ok());
  EXPECT_TRUE(generate(request_of("r", 5)).status.ok());
}

TEST_F(WorkerTest, GarbageIsHarmless) {
  start(worker_config());
  grpc::GenericStub stub(channel_);
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff"), std::string(1 << 16, '\x0a'), std::string()}) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(1)));
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer buffer(&slice, 1);
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareUnaryCall(&context, "/slipstream.v1.Rollout/Generate", buffer, &queue);
    grpc::ByteBuffer response;
    grpc::Status status;
    call->StartCall();
    call->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_FALSE(status.ok());
  }
  EXPECT_TRUE(generate(request_of("r", 5)).status.ok());
}

TEST_F(WorkerTest, OneRequestIdAtATimeAndCancellation) {
  start(worker_config());
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request_of("r", 4000));
  v1::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(generate(request_of("r", 5)).status.code(), absl::StatusCode::kAlreadyExists);
  context.TryCancel();
  while (reader->Read(&event)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  wait_idle();
  EXPECT_EQ(worker_->engine().status().cache.bytes_used, 0);
  EXPECT_TRUE(generate(request_of("r", 5)).status.ok());
}

TEST_F(WorkerTest, AbortAndDeadline) {
  start(worker_config());
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request_of("r", 4000));
  v1::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  grpc::ClientContext abort_context;
  v1::AbortRequest abort;
  abort.set_session_id("session of r");
  v1::AbortResponse response;
  ASSERT_TRUE(stub_->Abort(&abort_context, abort, &response).ok());
  while (reader->Read(&event)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(event.finished().reason(), v1::FINISH_REASON_ABORTED);
  v1::GenerateRequest waits = request_of("waits", 5);
  waits.set_min_policy_version(7);
  EXPECT_EQ(generate(waits, absl::Milliseconds(200)).status.code(), absl::StatusCode::kDeadlineExceeded);
  wait_idle();
  EXPECT_EQ(worker_->engine().status().cache.bytes_used, 0);
}

TEST_F(WorkerTest, WeightsThatWillNeverFitAreAFailure) {
  const std::pair<FakeLearner::Fault, const char*> cases[] = {
      {FakeLearner::Fault::kForeign, "shape_hash"},
      {FakeLearner::Fault::kOtherDtype, "model.dtype: the learner computes in bf16, this worker in fp32; expected the same"},
      {FakeLearner::Fault::kOtherRun, "of another run"}};
  for (const auto& [fault, expected] : cases) {
    FakeLearner learner({fault, fault});
    Worker::Config config = worker_config();
    config.learner_address = learner.address();
    absl::Notification failed;
    absl::Status failure;
    absl::StatusOr<std::unique_ptr<Worker>> worker =
        Worker::start(config, metrics_, quiet_logger(), [&](absl::Status status) {
          failure = std::move(status);
          failed.Notify();
        });
    ASSERT_TRUE(worker.ok()) << worker.status();
    learner.publish(std::make_shared<const model::WeightStore>(
                        std::move(model::testing::make_test_model(kModel, DType::kF32, 2).loaded.store)),
                    1);
    ASSERT_TRUE(failed.WaitForNotificationWithTimeout(absl::Minutes(1)));
    EXPECT_EQ(failure.code(), absl::StatusCode::kFailedPrecondition);
    for (const std::string& text : {"model.path: " + config.model.path, learner.address(), std::string(expected)}) {
      EXPECT_NE(failure.message().find(text), absl::string_view::npos) << failure;
    }
    EXPECT_EQ(learner.calls(), 1);  // told once, and no more asked for
  }
}

TEST_F(WorkerTest, WeightsArriveWhateverHappensToTheStream) {
  using Fault = FakeLearner::Fault;
  FakeLearner learner({Fault::kCut, Fault::kFlipped, Fault::kNoHeader});
  Worker::Config config = worker_config();
  config.learner_address = learner.address();
  start(config);
  const auto second = std::make_shared<const model::WeightStore>(
      std::move(model::testing::make_test_model(kModel, DType::kF32, 2).loaded.store));
  learner.publish(second, 1);
  v1::GenerateRequest request = request_of("r", 5);
  request.set_min_policy_version(1);
  const Reply reply = generate(request);
  ASSERT_TRUE(reply.status.ok()) << reply.status;
  EXPECT_EQ(reply.all.policy_versions(0), 1);
  EXPECT_EQ(learner.calls(), 4);
  EXPECT_EQ(metrics_.value(metric::kPolicyVersion, {"rollout"}), 1.0);
  const double bytes = static_cast<double>(model::weight_stream_header(*second, DType::kF32).num_bytes);
  EXPECT_GT(metrics_.value(metric::kWeightSyncBytes), bytes);
  expect_engines_reply({}, second, reply);
  learner.publish(second, 2);
  request.set_request_id("later");
  request.set_min_policy_version(2);
  EXPECT_EQ(generate(request).all.policy_versions(0), 2);
}

// Version 0 is the codes of the file; what the learner sends is quantised as anywhere.
TEST_F(WorkerTest, StartsFromAnFp8Checkpoint) {
  const slipstream::testing::TemporaryDirectory dir;
  model::testing::save_fp8(model::testing::make_test_model(kModel, DType::kF32, 1).loaded, dir.path());
  FakeLearner learner({});
  Worker::Config config = worker_config();
  config.model.path = dir.path();
  config.engine.fp8_weights = true;
  config.learner_address = learner.address();
  start(config);
  const std::unique_ptr<kernels::Stream> stream = *kernels::Stream::create_cpu(2);
  const model::LoadOptions options{.keep_fp8_for = kernels::DeviceKind::kCpu};
  const auto first = std::make_shared<const model::WeightStore>(
      std::move(model::load_weights(dir.path(), DType::kF32, *stream, options)->store));
  ASSERT_FALSE(first->scales().empty());
  expect_engines_reply({.fp8_weights = true}, first, generate(request_of("first", 5)));
  const auto second = std::make_shared<const model::WeightStore>(
      std::move(model::testing::make_test_model(kModel, DType::kF32, 2).loaded.store));
  learner.publish(second, 1);
  v1::GenerateRequest request = request_of("second", 5);
  request.set_min_policy_version(1);
  expect_engines_reply({.fp8_weights = true}, second, generate(request));
}

TEST_F(WorkerTest, StaysKnownToTheGateway) {
  Worker::Config config = worker_config();
  std::string address;
  {
    FakeGateway first;
    address = first.address();
    config.gateway_address = address;
    start(config);
    const FakeGateway::Seen seen = first.wait([](const auto& s) { return s.beats >= 2; });
    EXPECT_EQ(seen.worker.worker_id(), "worker-0");
    EXPECT_EQ(seen.worker.address(), worker_->address());
    EXPECT_EQ(seen.worker.max_concurrent(), 64 + 1024);
    EXPECT_EQ(seen.worker.max_context(), 4096);
    EXPECT_GT(seen.worker.start_time_us(), 0);
    EXPECT_GE(seen.beat.idle_seconds(), 0.0);
    first.forget();
    // A call that a slow machine times out is repeated, so there may have been more than one before.
    first.wait([&](const auto& s) { return s.registrations > seen.registrations; });
  }
  EXPECT_TRUE(generate(request_of("r", 5)).status.ok());  // a gateway that is away stops nobody
  FakeGateway second(address);
  const FakeGateway::Seen seen =
      second.wait([](const auto& s) { return s.beats >= 1 && s.beat.generated_tokens() == 5; });
  EXPECT_GE(seen.registrations, 1);
  worker_->drain(absl::Now() + absl::Minutes(1));
  EXPECT_EQ(second.wait([](const auto&) { return true; }).unregistrations, 1);
  EXPECT_EQ(generate(request_of("r", 5), absl::Seconds(5)).status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(WorkerTest, DrainLetsRunningOnesEnd) {
  FakeGateway gateway;
  Worker::Config config = worker_config();
  config.gateway_address = gateway.address();
  start(config);
  gateway.wait([](const auto& s) { return s.registrations >= 1; });
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, request_of("r", 300));
  v1::GenerateEvent event;
  ASSERT_TRUE(reader->Read(&event));
  int tokens = event.ids_size();
  grpc::ClientContext drain_context;
  v1::DrainResponse response;
  ASSERT_TRUE(stub_->Drain(&drain_context, {}, &response).ok());
  EXPECT_TRUE(worker_->draining());
  EXPECT_EQ(generate(request_of("new", 5)).status.code(), absl::StatusCode::kUnavailable);
  while (reader->Read(&event)) tokens += event.ids_size();
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, 300);
  gateway.wait([](const auto& s) { return s.unregistrations == 1; });
}

// With a heartbeat a minute: the drain itself is what the gateway hears of.
TEST_F(WorkerTest, DrainIsToldAtOnce) {
  FakeGateway gateway("127.0.0.1:0", 60'000);
  Worker::Config config = worker_config();
  config.gateway_address = gateway.address();
  start(config);
  gateway.wait([](const auto& s) { return s.registrations >= 1; });
  grpc::ClientContext context;
  v1::GenerateRequest request = request_of("r", 5);
  request.set_min_policy_version(9);  // for ever
  const auto reader = stub_->Generate(&context, request);
  const absl::Time begin = absl::Now();
  // A drain that overtakes the request finds nothing to wait for, and the worker leaves without another word.
  while (worker_->engine().status().waiting == 0) {
    ASSERT_LT(absl::Now() - begin, absl::Seconds(30));
    absl::SleepFor(absl::Milliseconds(1));
  }
  grpc::ClientContext drain_context;
  v1::DrainResponse response;
  ASSERT_TRUE(stub_->Drain(&drain_context, {}, &response).ok());
  gateway.wait([](const auto& s) { return s.beat.draining(); });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
  context.TryCancel();
  reader->Finish();
}

TEST_F(WorkerTest, DrainCutsOffAtItsDeadline) {
  start(worker_config());
  grpc::ClientContext context;
  v1::GenerateRequest request = request_of("r", 5);
  request.set_min_policy_version(9);  // for ever
  const auto reader = stub_->Generate(&context, request);
  grpc::ClientContext second_context;
  const auto second = stub_->Generate(&second_context, request_of("s", 4000));
  v1::GenerateEvent event;
  ASSERT_TRUE(second->Read(&event));
  worker_->drain(absl::Now());
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  while (second->Read(&event)) {
  }
  EXPECT_EQ(second->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(WorkerTest, StartRefuses) {
  Worker::Config config = worker_config();
  config.model.path = "/nowhere";
  EXPECT_FALSE(Worker::start(config, metrics_, quiet_logger()).ok());
  start(worker_config());
  config = worker_config();
  config.address = worker_->address();
  const absl::Status busy = Worker::start(config, metrics_, quiet_logger()).status();
  EXPECT_EQ(busy.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(busy.message()).find(config.address), std::string::npos) << busy;
}

TEST(WorkerConfigTest, ReadsItsSections) {
  ConfigNode root = *ConfigNode::parse(
      "model: {path: /m, dtype: fp32}\n"
      "rollout: {worker_id: w, max_running: 8, step_tokens_max: 16, on_update: keep, cache_tokens: 640}\n",
      "job.yaml");
  const Worker::Config config = Worker::Config::from(root);
  ASSERT_TRUE(root.finish().ok()) << root.finish();
  EXPECT_EQ(config.model.path, "/m");
  EXPECT_EQ(config.model.dtype, DType::kF32);
  EXPECT_EQ(config.engine.worker_id, "w");
  EXPECT_EQ(config.engine.on_update, OnUpdate::kKeep);
  EXPECT_EQ(config.engine.cache_tokens, 640);
  EXPECT_EQ(config.engine.prefix_sessions_max, 8);
  ConfigNode bad = *ConfigNode::parse("model: {path: /m}\nrollout: {max_running: 100, step_tokens_max: 99}\n", "job.yaml");
  Worker::Config::from(bad);
  EXPECT_EQ(bad.finish().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace slipstream::rollout
