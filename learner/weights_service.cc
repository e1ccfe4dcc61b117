#include "learner/weights_service.h"

#include <chrono>
#include <optional>

#include "model/model_section.h"
#include "model/weight_stream.h"
#include "proto/rpc.h"
#include "slipstream/v1/weights.grpc.pb.h"

namespace slipstream::learner {
namespace {

// One Fetch: waits for a snapshot, then writes header, pieces and trailer, one message after the other. It
// ends on exactly one of three ways: refused, given up while waiting, or after its last write (which fails
// when the peer is gone).
class Fetch final : public grpc::ServerWriteReactor<v1::WeightChunk> {
 public:
  Fetch(const v1::FetchRequest& request, Publisher& publisher, const WeightsOrigin& origin, Logger log)
      : publisher_(publisher), origin_(origin), log_(std::move(log)), worker_(rpc::printable(request.worker_id())) {
    if (!request.weights_id().empty() && request.weights_id() != origin.weights_id) {
      Finish(rpc::to_grpc(absl::FailedPreconditionError(
          absl::StrCat("the worker's policy version ", request.have_version(), " is of another run than this learner's: start it again"))));
      return;
    }
    const absl::StatusOr<kernels::DType> matrices = model::parse_weight_dtype(request.dtype());
    if (!matrices.ok()) {
      Finish(rpc::to_grpc(absl::InvalidArgumentError(absl::StrCat("dtype: ", matrices.status().message()))));
      return;
    }
    matrices_ = *matrices;
    waiting_ = publisher_.wait(
        request.have_version(),
        [this](std::shared_ptr<const WeightSnapshot> snapshot) { begin(std::move(snapshot)); });
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::CANCELLED);
    if (trailer_written_) return Finish(grpc::Status::OK);
    write_next();
  }
  void OnCancel() override {
    if (waiting_ > 0 && publisher_.cancel(waiting_)) Finish(grpc::Status::CANCELLED);
  }
  void OnDone() override { delete this; }

 private:
  void begin(std::shared_ptr<const WeightSnapshot> snapshot) {
    if (snapshot == nullptr)
      return Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the learner is shutting down"));
    snapshot_ = std::move(snapshot);
    pieces_.emplace(snapshot_->weights, matrices_);
    const model::WeightStreamHeader header = model::weight_stream_header(snapshot_->weights, matrices_);
    v1::WeightHeader& out = *chunk_.mutable_header();
    out.set_policy_version(snapshot_->policy_version);
    out.set_num_bytes(header.num_bytes);
    out.set_num_tensors(static_cast<int32_t>(header.num_tensors));
    out.set_shape_hash(header.shape_hash);
    out.set_weights_id(origin_.weights_id);
    out.set_learner_dtype(model::weight_dtype_word(origin_.dtype));
    log_->debug("weights: version {} to {}, {} bytes", snapshot_->policy_version, worker_, header.num_bytes);
    StartWrite(&chunk_);
  }

  void write_next() {
    model::WeightPiece piece;
    if (pieces_->next(&piece)) {
      v1::WeightPiece& out = *chunk_.mutable_piece();
      out.set_tensor_index(static_cast<int32_t>(piece.tensor_index));
      out.set_offset(piece.offset);
      out.set_data(piece.data.data(), piece.data.size());
    } else {
      chunk_.mutable_trailer()->set_crc32c(pieces_->crc32c());
      trailer_written_ = true;
    }
    StartWrite(&chunk_);
  }

  Publisher& publisher_;
  const WeightsOrigin& origin_;
  Logger log_;
  std::string worker_;
  kernels::DType matrices_ = kernels::DType::kF32;
  int64_t waiting_ = 0;
  std::shared_ptr<const WeightSnapshot> snapshot_;
  std::optional<model::WeightPieces> pieces_;
  v1::WeightChunk chunk_;
  bool trailer_written_ = false;
};

class WeightsService final : public v1::Weights::CallbackService {
 public:
  WeightsService(Publisher& publisher, WeightsOrigin origin, Logger log)
      : publisher_(publisher), origin_(std::move(origin)), log_(std::move(log)) {}
  grpc::ServerWriteReactor<v1::WeightChunk>* Fetch(grpc::CallbackServerContext*,
                                                   const v1::FetchRequest* request) override {
    return new learner::Fetch(*request, publisher_, origin_, log_);  // deletes itself in OnDone
  }

 private:
  Publisher& publisher_;
  const WeightsOrigin origin_;
  Logger log_;
};

}  // namespace

struct WeightsServer::Impl {
  Impl(Publisher& weights, WeightsOrigin origin, Logger log)
      : publisher(weights), service(weights, std::move(origin), std::move(log)) {}
  Publisher& publisher;
  WeightsService service;
  rpc::Server server;
};

absl::StatusOr<std::unique_ptr<WeightsServer>> WeightsServer::start(const std::string& address,
                                                                    Publisher& publisher, WeightsOrigin origin,
                                                                    Logger log) {
  auto impl = std::make_unique<Impl>(publisher, std::move(origin), std::move(log));
  ASSIGN_OR_RETURN(impl->server, rpc::serve("learner weights", address, {&impl->service}));
  return std::unique_ptr<WeightsServer>(new WeightsServer(std::move(impl)));
}

WeightsServer::WeightsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

WeightsServer::~WeightsServer() {
  impl_->publisher.close();
  impl_->server.server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
}

const std::string& WeightsServer::address() const { return impl_->server.address; }

}  // namespace slipstream::learner
