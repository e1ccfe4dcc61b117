#include "rollout/weights_client.h"

#include "proto/rpc.h"
#include "slipstream/v1/weights.grpc.pb.h"

namespace slipstream::rollout {

namespace v1 = slipstream::v1;

struct WeightsClient::Impl {
  std::unique_ptr<v1::Weights::Stub> stub;
};

WeightsClient::WeightsClient(const std::string& address)
    : impl_(new Impl{v1::Weights::NewStub(rpc::dial(address))}) {}
WeightsClient::~WeightsClient() = default;

namespace {

enum class Stage { kHeader, kPieces, kOver };

absl::Status take(const v1::WeightChunk& chunk, Stage* stage, const WeightsClient::Handler& handler) {
  if (chunk.has_header() && *stage == Stage::kHeader) {
    *stage = Stage::kPieces;
    const v1::WeightHeader& header = chunk.header();
    return handler.header({.policy_version = header.policy_version(),
                           .weights_id = header.weights_id(),
                           .learner_dtype = header.learner_dtype()},
                          {.num_bytes = header.num_bytes(),
                                                    .num_tensors = header.num_tensors(),
                                                    .shape_hash = header.shape_hash()});
  }
  if (chunk.has_piece() && *stage == Stage::kPieces) {
    const v1::WeightPiece& piece = chunk.piece();
    return handler.piece(
        {.tensor_index = piece.tensor_index(), .offset = piece.offset(), .data = piece.data()});
  }
  if (chunk.has_trailer() && *stage == Stage::kPieces) {
    *stage = Stage::kOver;
    return handler.trailer(chunk.trailer().crc32c());
  }
  return absl::DataLossError("weight stream: a chunk out of order, expected a header, pieces and a trailer");
}

}  // namespace

absl::Status WeightsClient::fetch(const Ask& ask, std::stop_token stop, const Handler& handler) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(ask.deadline));
  const std::stop_callback cancel(stop, [&context] { context.TryCancel(); });
  v1::FetchRequest request;
  request.set_worker_id(ask.worker_id);
  request.set_have_version(ask.have_version);
  request.set_dtype(ask.dtype);
  request.set_weights_id(ask.weights_id);
  const std::unique_ptr<grpc::ClientReader<v1::WeightChunk>> reader = impl_->stub->Fetch(&context, request);
  Stage stage = Stage::kHeader;
  absl::Status taken;
  for (v1::WeightChunk chunk; taken.ok() && reader->Read(&chunk);) taken = take(chunk, &stage, handler);
  if (!taken.ok()) context.TryCancel();
  const absl::Status ended = rpc::from_grpc(reader->Finish());
  RETURN_IF_ERROR(taken);
  RETURN_IF_ERROR(ended);
  if (stage != Stage::kOver) return absl::DataLossError("weight stream: ended before its trailer");
  return absl::OkStatus();
}

}  // namespace slipstream::rollout
