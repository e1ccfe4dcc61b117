// Goal: weights that travel arrive bit for bit, converted or not; a stream that is cut, reordered, altered or
// of another model is refused by name.
#include "model/weight_stream.h"

#include <cstring>

#include "gtest/gtest.h"
#include "kernels/stream.h"
#include "model/load.h"
#include "model/testing/small_model.h"

namespace slipstream::model {
namespace {

using kernels::DType;

WeightStore random_store(int64_t hidden, DType dtype) {
  const std::unique_ptr<kernels::Stream> stream = *kernels::Stream::create_cpu(1);
  absl::StatusOr<LoadedWeights> loaded = random_weights(testing::small_model(9000, hidden), dtype, 3, *stream);
  CHECK_OK(loaded.status());
  return std::move(loaded->store);
}

struct Piece {
  int64_t tensor_index, offset;
  std::string data;
};

std::vector<Piece> pieces_of(const WeightStore& store, DType dtype, uint32_t* crc) {
  WeightPieces walk(store, dtype);
  std::vector<Piece> out;
  for (WeightPiece piece; walk.next(&piece);)
    out.push_back({piece.tensor_index, piece.offset, std::string(piece.data)});
  *crc = walk.crc32c();
  return out;
}

absl::Status assemble(WeightStore& into, const WeightStreamHeader& header, const std::vector<Piece>& pieces,
                      uint32_t crc) {
  ASSIGN_OR_RETURN(WeightAssembler assembler, WeightAssembler::create(into, header));
  for (const Piece& piece : pieces)
    RETURN_IF_ERROR(assembler.add({piece.tensor_index, piece.offset, piece.data}));
  return assembler.finish(crc);
}

void expect_same_bytes(const WeightStore& a, const WeightStore& b) {
  ASSERT_EQ(a.entries().size(), b.entries().size());
  for (size_t i = 0; i < a.entries().size(); ++i) {
    const Tensor &x = a.entries()[i].tensor, &y = b.entries()[i].tensor;
    ASSERT_EQ(x.bytes(), y.bytes());
    EXPECT_EQ(std::memcmp(x.raw(), y.raw(), static_cast<size_t>(x.bytes())), 0)
        << a.entries()[i].parameter.name;
  }
}

TEST(WeightStreamTest, ArrivesBitForBit) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const WeightStore sent = random_store(40, dtype);
    WeightStore got = *WeightStore::create_weights(testing::small_model(9000, 40), dtype, sent.with_mtp());
    uint32_t crc = 0;
    const std::vector<Piece> pieces = pieces_of(sent, dtype, &crc);
    for (const Piece& piece : pieces) EXPECT_LE(static_cast<int64_t>(piece.data.size()), kWeightPieceBytes);
    ASSERT_TRUE(assemble(got, weight_stream_header(sent, dtype), pieces, crc).ok());
    expect_same_bytes(sent, got);
  }
}

TEST(WeightStreamTest, ConvertsOnTheWay) {
  const WeightStore sent = random_store(40, DType::kF32);
  WeightStore got = *WeightStore::create_weights(testing::small_model(9000, 40), DType::kBf16, sent.with_mtp());
  uint32_t crc = 0;
  const std::vector<Piece> pieces = pieces_of(sent, DType::kBf16, &crc);
  ASSERT_TRUE(assemble(got, weight_stream_header(sent, DType::kBf16), pieces, crc).ok());
  for (size_t i = 0; i < sent.entries().size(); ++i) {
    const Tensor &x = sent.entries()[i].tensor, &y = got.entries()[i].tensor;
    for (int64_t j = 0; j < x.numel(); ++j) {
      if (y.dtype() == DType::kBf16) {
        ASSERT_EQ(y.bf()[j], kernels::to_bf16(x.f32()[j]));
      } else {
        ASSERT_EQ(y.f32()[j], x.f32()[j]);
      }
    }
  }
}

TEST(WeightStreamTest, RefusesWhatIsNotTheStream) {
  const WeightStore sent = random_store(40, DType::kF32);
  WeightStore got = *WeightStore::create_weights(testing::small_model(9000, 40), DType::kF32, sent.with_mtp());
  uint32_t crc = 0;
  const std::vector<Piece> pieces = pieces_of(sent, DType::kF32, &crc);
  const WeightStreamHeader header = weight_stream_header(sent, DType::kF32);
  ASSERT_GT(pieces.size(), 3u);
  const auto expect = [&](absl::StatusCode code, const WeightStreamHeader& h, const std::vector<Piece>& p,
                          uint32_t c) {
    const absl::Status status = assemble(got, h, p, c);
    EXPECT_EQ(status.code(), code) << status;
  };
  std::vector<Piece> cut = pieces;
  cut.pop_back();
  expect(absl::StatusCode::kDataLoss, header, cut, crc);
  std::vector<Piece> swapped = pieces;
  std::swap(swapped[0], swapped[1]);
  expect(absl::StatusCode::kDataLoss, header, swapped, crc);
  std::vector<Piece> flipped = pieces;
  flipped[2].data[0] ^= 1;
  expect(absl::StatusCode::kDataLoss, header, flipped, crc);
  std::vector<Piece> twice = pieces;
  twice.push_back(pieces.back());
  expect(absl::StatusCode::kDataLoss, header, twice, crc);
  std::vector<Piece> longer = pieces;
  longer[0].data += longer[0].data;
  expect(absl::StatusCode::kDataLoss, header, longer, crc);
  expect(absl::StatusCode::kFailedPrecondition,
         weight_stream_header(random_store(48, DType::kF32), DType::kF32), pieces, crc);
  expect(absl::StatusCode::kFailedPrecondition, weight_stream_header(sent, DType::kBf16), pieces, crc);
  expect(absl::StatusCode::kOk, header, pieces, crc);
}

}  // namespace
}  // namespace slipstream::model
