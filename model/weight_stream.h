// A set of weights as a stream of bytes in one order that both ends know: how a learner's weights reach
// rollout engines. Every parameter in visit_parameters' order, its elements in memory order, little-endian,
// in pieces of at most 1 MiB.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "model/weights.h"

namespace slipstream::model {

constexpr int64_t kWeightPieceBytes = 1 << 20;

// What the receiver checks before it takes a byte.
struct WeightStreamHeader {
  int64_t num_bytes = 0;  // of all pieces
  int64_t num_tensors = 0;
  uint64_t shape_hash = 0;  // see shape_hash(): differs when the two sides run different models
};

// Of all names, shapes and dtypes in order, where matrices travel in `matrices` (f32 or bf16); islands always
// travel as f32.
uint64_t shape_hash(const std::vector<WeightStore::Entry>& entries, kernels::DType matrices);
WeightStreamHeader weight_stream_header(const WeightStore& weights, kernels::DType matrices);

struct WeightPiece {
  int64_t tensor_index = 0;
  int64_t offset = 0;     // bytes into the tensor as it travels
  std::string_view data;  // valid until the next call of next()
};

// Walks over weights, which outlive it and do not change meanwhile. Matrices of another dtype than `matrices`
// are converted piece by piece (f32 to bf16 rounds to nearest even, as the trainer's own copy does). One
// thread.
class WeightPieces {
 public:
  WeightPieces(const WeightStore& weights, kernels::DType matrices)
      : weights_(weights), matrices_(matrices) {}
  bool next(WeightPiece* piece);               // false: no more
  uint32_t crc32c() const { return crc32c_; }  // of the pieces so far, in order

 private:
  const WeightStore& weights_;
  kernels::DType matrices_;
  size_t tensor_ = 0;
  int64_t offset_ = 0;
  std::string converted_;
  uint32_t crc32c_ = 0;
};

// The other end: fills `weights` (of WeightStore::create_weights; it outlives the assembler) from a stream.
// Nothing is usable before finish() is OK; after any error the contents are undefined and the assembler is
// done. One thread.
class WeightAssembler {
 public:
  // FailedPrecondition: the header belongs to other weights than these.
  static absl::StatusOr<WeightAssembler> create(WeightStore& weights, const WeightStreamHeader& header);
  // DataLoss: a piece that is not the next one, too long, empty, or over its tensor's end.
  absl::Status add(const WeightPiece& piece);
  // DataLoss: bytes are missing, or the sum is not that of the bytes that came.
  absl::Status finish(uint32_t crc32c);

 private:
  WeightAssembler(WeightStore& weights, int64_t num_bytes) : weights_(&weights), num_bytes_(num_bytes) {}
  WeightStore* weights_;
  int64_t num_bytes_;
  int64_t received_bytes_ = 0;
  size_t tensor_ = 0;
  int64_t offset_ = 0;
  uint32_t crc32c_ = 0;
};

}  // namespace slipstream::model
