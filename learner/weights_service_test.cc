// Goal: what a worker assembles from Fetch is the published weights, bit for bit, in the dtype it asked for;
// waiting ends with the next version, its deadline or the server; a snapshot is what it was when its stream
// began.
#include "learner/weights_service.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "gtest/gtest.h"
#include "learner/policy_weights.h"
#include "model/testing/small_model.h"
#include "model/weight_stream.h"
#include "proto/rpc.h"
#include "slipstream/v1/weights.grpc.pb.h"

namespace slipstream::learner {
namespace {

using kernels::DType;

struct Fetched {
  grpc::Status status;
  int32_t policy_version = -1;
};

class WeightsServiceTest : public ::testing::Test {
 protected:
  WeightsServiceTest()
      : stream(*kernels::Stream::create_cpu(1)),
        master(*model::random_weights(model::testing::small_model(500, 640), DType::kF32, 3, *stream)),
        server(*WeightsServer::start("127.0.0.1:0", publisher, {.weights_id = "a run", .dtype = DType::kF32}, quiet_logger())),
        stub(v1::Weights::NewStub(rpc::dial(server->address()))) {}

  Fetched fetch(int32_t have, DType dtype, model::WeightStore& into, int timeout_ms = 20'000) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
    v1::FetchRequest request;
    request.set_worker_id("w");
    request.set_have_version(have);
    request.set_dtype(dtype == DType::kF32 ? "fp32" : "bf16");
    const auto reader = stub->Fetch(&context, request);
    v1::WeightChunk chunk;
    Fetched out;
    std::optional<model::WeightAssembler> assembler;
    while (reader->Read(&chunk)) {
      if (chunk.has_header()) {
        out.policy_version = chunk.header().policy_version();
        assembler = *model::WeightAssembler::create(into, {.num_bytes = chunk.header().num_bytes(),
                                                           .num_tensors = chunk.header().num_tensors(),
                                                           .shape_hash = chunk.header().shape_hash()});
      } else if (chunk.has_piece()) {
        const absl::Status added = assembler->add({.tensor_index = chunk.piece().tensor_index(),
                                                   .offset = chunk.piece().offset(),
                                                   .data = chunk.piece().data()});
        EXPECT_TRUE(added.ok()) << added;
      } else {
        const absl::Status finished = assembler->finish(chunk.trailer().crc32c());
        EXPECT_TRUE(finished.ok()) << finished;
      }
    }
    out.status = reader->Finish();
    return out;
  }
  model::WeightStore store(DType dtype) {
    return *model::WeightStore::create_weights(master.config, dtype, false);
  }
  void scale(float by) {
    for (const auto& entry : master.store.entries()) {
      for (int64_t i = 0; i < entry.tensor.numel(); ++i) entry.tensor.f32()[i] *= by;
    }
  }
  static void expect_same(const model::WeightStore& a, const model::WeightStore& b) {
    for (size_t i = 0; i < a.entries().size(); ++i) {
      const kernels::Tensor &x = a.entries()[i].tensor, &y = b.entries()[i].tensor;
      ASSERT_EQ(x.dtype(), y.dtype());
      EXPECT_EQ(std::memcmp(x.raw(), y.raw(), static_cast<size_t>(x.bytes())), 0)
          << a.entries()[i].parameter.name;
    }
  }

  std::unique_ptr<kernels::Stream> stream;
  model::LoadedWeights master;
  Publisher publisher;
  std::unique_ptr<WeightsServer> server;
  std::unique_ptr<v1::Weights::Stub> stub;
};

TEST_F(WeightsServiceTest, WorkersGetTheMastersAndTheirRounding) {
  ASSERT_TRUE(publisher.publish(4, master, *stream).ok());
  model::WeightStore f32 = store(DType::kF32), bf16 = store(DType::kBf16), expected = store(DType::kBf16);
  EXPECT_EQ(fetch(-1, DType::kF32, f32).policy_version, 4);
  expect_same(f32, master.store);
  const Fetched rounded = fetch(3, DType::kBf16, bf16);
  EXPECT_TRUE(rounded.status.ok());
  convert_weights(master.store, expected, *stream);
  expect_same(bf16, expected);
}

TEST_F(WeightsServiceTest, WaitsForTheNextVersionAndTakesTheNewest) {
  ASSERT_TRUE(publisher.publish(1, master, *stream).ok());
  model::WeightStore got = store(DType::kF32);
  EXPECT_EQ(fetch(1, DType::kF32, got, 50).status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  Fetched waited;
  std::jthread waiting([&] { waited = fetch(1, DType::kF32, got); });
  scale(2.0f);
  ASSERT_TRUE(publisher.publish(2, master, *stream).ok());
  waiting.join();
  EXPECT_TRUE(waited.status.ok());
  EXPECT_EQ(waited.policy_version, 2);
  expect_same(got, master.store);
  ASSERT_TRUE(publisher.publish(3, master, *stream).ok());
  ASSERT_TRUE(publisher.publish(4, master, *stream).ok());
  EXPECT_EQ(fetch(2, DType::kF32, got).policy_version, 4);
}

// While nobody fetches, versions need no copy; who comes later gets the next one, and no older one before it.
TEST_F(WeightsServiceTest, WithheldVersionsAreWaitedOver) {
  ASSERT_TRUE(publisher.publish(1, master, *stream).ok());
  EXPECT_FALSE(publisher.asked());
  publisher.withhold();
  EXPECT_EQ(publisher.policy_version(), -1);
  model::WeightStore got = store(DType::kF32);
  Fetched waited;
  std::jthread waiting([&] { waited = fetch(-1, DType::kF32, got); });
  while (publisher.waiting() == 0) std::this_thread::yield();
  EXPECT_TRUE(publisher.asked());
  scale(2.0f);
  ASSERT_TRUE(publisher.publish(3, master, *stream).ok());
  waiting.join();
  EXPECT_EQ(waited.policy_version, 3);
  expect_same(got, master.store);
}

// Training goes on while a slow worker reads: it gets one version whole.
TEST_F(WeightsServiceTest, SnapshotsDoNotChangeUnderTheirReaders) {
  ASSERT_TRUE(publisher.publish(1, master, *stream).ok());
  const model::WeightStore first = store(DType::kF32);
  convert_weights(master.store, first, *stream);
  grpc::ClientContext context;
  v1::FetchRequest request;
  request.set_have_version(-1);
  request.set_dtype("fp32");
  const auto reader = stub->Fetch(&context, request);
  v1::WeightChunk chunk;
  ASSERT_TRUE(reader->Read(&chunk));
  scale(3.0f);
  ASSERT_TRUE(publisher.publish(2, master, *stream).ok());
  model::WeightStore got = store(DType::kF32);
  auto assembler = *model::WeightAssembler::create(got, {.num_bytes = chunk.header().num_bytes(),
                                                         .num_tensors = chunk.header().num_tensors(),
                                                         .shape_hash = chunk.header().shape_hash()});
  while (reader->Read(&chunk) && chunk.has_piece()) {
    ASSERT_TRUE(assembler
                    .add({.tensor_index = chunk.piece().tensor_index(),
                          .offset = chunk.piece().offset(),
                          .data = chunk.piece().data()})
                    .ok());
  }
  EXPECT_TRUE(assembler.finish(chunk.trailer().crc32c()).ok());
  EXPECT_TRUE(reader->Finish().ok());
  expect_same(got, first);
}

TEST_F(WeightsServiceTest, EndsWaitingAndBrokenReadersAtShutdown) {
  ASSERT_TRUE(publisher.publish(1, master, *stream).ok());
  model::WeightStore got = store(DType::kF32);
  Fetched waited;
  std::jthread waiting([&] { waited = fetch(1, DType::kF32, got); });
  {  // one that walks away in the middle
    grpc::ClientContext context;
    v1::FetchRequest request;
    request.set_have_version(-1);
    request.set_dtype("bf16");
    const auto reader = stub->Fetch(&context, request);
    v1::WeightChunk chunk;
    ASSERT_TRUE(reader->Read(&chunk));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  // A call that gRPC has not yet handed over when the server shuts down is cut, not answered.
  while (publisher.waiting() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  server.reset();
  waiting.join();
  EXPECT_EQ(waited.status.error_code(), grpc::StatusCode::UNAVAILABLE) << waited.status.error_message();
}

TEST_F(WeightsServiceTest, WeightsOfAnotherRunAreRefusedAtOnce) {
  ASSERT_TRUE(publisher.publish(1, master, *stream).ok());
  const auto ask = [&](const std::string& weights_id, v1::WeightChunk* first) {
    grpc::ClientContext context;
    v1::FetchRequest request;
    request.set_have_version(weights_id.empty() ? -1 : 20);
    request.set_dtype("bf16");
    request.set_weights_id(weights_id);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
    const auto reader = stub->Fetch(&context, request);
    while (reader->Read(first) && !first->has_trailer()) {
      if (!first->has_header()) continue;
      EXPECT_EQ(first->header().weights_id(), "a run");
      EXPECT_EQ(first->header().learner_dtype(), "fp32");
    }
    return reader->Finish().error_code();
  };
  v1::WeightChunk chunk;
  EXPECT_EQ(ask("another run", &chunk), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ask("a run", &chunk), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(ask("", &chunk), grpc::StatusCode::OK);
}

TEST_F(WeightsServiceTest, UnknownDtypeIsNamed) {
  grpc::ClientContext context;
  v1::FetchRequest request;
  request.set_dtype("int4");
  v1::WeightChunk chunk;
  const auto reader = stub->Fetch(&context, request);
  EXPECT_FALSE(reader->Read(&chunk));
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "dtype: \"int4\", expected fp32 or bf16");
}

}  // namespace
}  // namespace slipstream::learner
