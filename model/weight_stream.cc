#include "model/weight_stream.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "common/crc32c.h"
#include "common/hash.h"
#include "model/stored_dtype.h"

namespace slipstream::model {
namespace {

using kernels::DType;

static_assert(std::endian::native == std::endian::little, "tensors travel as they lie in memory");

DType travel_dtype(const Parameter& parameter, DType matrices) {
  return parameter.storage == Storage::kMatrix ? matrices : DType::kF32;
}

int64_t travel_bytes(const Parameter& parameter, DType matrices) {
  return parameter.numel() * kernels::size_of(travel_dtype(parameter, matrices));
}

}  // namespace

uint64_t shape_hash(const std::vector<WeightStore::Entry>& entries, DType matrices) {
  // Every field ends in something no field contains or has a fixed length.
  uint64_t hash = fnv1a("");
  const auto number = [&](int64_t n) { hash = fnv1a({reinterpret_cast<const char*>(&n), sizeof n}, hash); };
  for (const WeightStore::Entry& entry : entries) {
    const Parameter& p = entry.parameter;
    hash = fnv1a(p.name, hash);
    number(-1);
    number(static_cast<int64_t>(p.shape.size()));
    for (const int64_t size : p.shape) number(size);
    hash = fnv1a(kernels::name_of(travel_dtype(p, matrices)), hash);
    number(-1);
  }
  return hash;
}

WeightStreamHeader weight_stream_header(const WeightStore& weights, DType matrices) {
  WeightStreamHeader header;
  for (const WeightStore::Entry& entry : weights.entries())
    header.num_bytes += travel_bytes(entry.parameter, matrices);
  header.num_tensors = static_cast<int64_t>(weights.entries().size());
  header.shape_hash = shape_hash(weights.entries(), matrices);
  return header;
}

bool WeightPieces::next(WeightPiece* piece) {
  const std::vector<WeightStore::Entry>& entries = weights_.entries();
  while (tensor_ < entries.size() && offset_ == travel_bytes(entries[tensor_].parameter, matrices_)) {
    ++tensor_;
    offset_ = 0;
  }
  if (tensor_ == entries.size()) return false;
  const WeightStore::Entry& entry = entries[tensor_];
  CHECK(!entry.tensor.empty() && entry.tensor.dense() && entry.tensor.dtype() != DType::kF8E4M3);
  const DType dtype = travel_dtype(entry.parameter, matrices_);
  const int64_t size = std::min(travel_bytes(entry.parameter, matrices_) - offset_, kWeightPieceBytes);
  if (dtype == entry.tensor.dtype()) {
    piece->data = {static_cast<const char*>(entry.tensor.raw()) + offset_, static_cast<size_t>(size)};
  } else {
    const DType from = entry.tensor.dtype();
    const int64_t begin = offset_ / kernels::size_of(dtype), count = size / kernels::size_of(dtype);
    const std::byte* elements = static_cast<const std::byte*>(entry.tensor.raw());
    converted_.resize(static_cast<size_t>(size));
    convert(stored_as(from), elements + begin * kernels::size_of(from), dtype, converted_.data(), count);
    piece->data = converted_;
  }
  piece->tensor_index = static_cast<int64_t>(tensor_);
  piece->offset = offset_;
  offset_ += size;
  crc32c_ = slipstream::crc32c(piece->data, crc32c_);
  return true;
}

absl::StatusOr<WeightAssembler> WeightAssembler::create(WeightStore& weights,
                                                        const WeightStreamHeader& header) {
  CHECK(weights.scales().empty());
  const WeightStreamHeader expected = weight_stream_header(weights, weights.dtype());
  const auto refuse = [](const char* field, auto value, auto wanted) {
    return absl::FailedPreconditionError(
        absl::StrCat("weight stream: ", field, ": ", value, ", expected ", wanted,
                     "; do both sides run the same model in the same dtype?"));
  };
  if (header.num_tensors != expected.num_tensors)
    return refuse("num_tensors", header.num_tensors, expected.num_tensors);
  if (header.num_bytes != expected.num_bytes)
    return refuse("num_bytes", header.num_bytes, expected.num_bytes);
  if (header.shape_hash != expected.shape_hash)
    return refuse("shape_hash", header.shape_hash, expected.shape_hash);
  return WeightAssembler(weights, expected.num_bytes);
}

absl::Status WeightAssembler::add(const WeightPiece& piece) {
  const std::vector<WeightStore::Entry>& entries = weights_->entries();
  while (tensor_ < entries.size() && offset_ == entries[tensor_].tensor.bytes()) {
    ++tensor_;
    offset_ = 0;
  }
  const auto refuse = [&](const char* field, int64_t value, const std::string& wanted) {
    return absl::DataLossError(absl::StrCat("weight stream: piece at byte ", received_bytes_, ": ", field,
                                            ": ", value, ", expected ", wanted));
  };
  const int64_t size = static_cast<int64_t>(piece.data.size());
  if (tensor_ == entries.size()) return refuse("tensor_index", piece.tensor_index, "no more pieces");
  if (piece.tensor_index != static_cast<int64_t>(tensor_)) {
    return refuse("tensor_index", piece.tensor_index, absl::StrCat(tensor_));
  }
  if (piece.offset != offset_) return refuse("offset", piece.offset, absl::StrCat(offset_));
  const Tensor& tensor = entries[tensor_].tensor;
  const int64_t most = std::min(tensor.bytes() - offset_, kWeightPieceBytes);
  if (size < 1 || size > most) return refuse("data", size, absl::StrCat("1..", most, " bytes"));
  std::memcpy(static_cast<char*>(tensor.raw()) + offset_, piece.data.data(), piece.data.size());
  offset_ += size;
  received_bytes_ += size;
  crc32c_ = slipstream::crc32c(piece.data, crc32c_);
  return absl::OkStatus();
}

absl::Status WeightAssembler::finish(uint32_t crc32c) {
  if (received_bytes_ != num_bytes_) {
    return absl::DataLossError(
        absl::StrCat("weight stream: ", received_bytes_, " bytes, expected ", num_bytes_));
  }
  if (crc32c != crc32c_) {
    return absl::DataLossError(absl::StrCat("weight stream: crc32c: ", crc32c, " in the trailer, ", crc32c_,
                                            " of the bytes that came"));
  }
  return absl::OkStatus();
}

}  // namespace slipstream::model
