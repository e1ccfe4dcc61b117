// Goal: no bytes make the checkpoint readers crash, hang, read outside the file or take memory out of
// proportion. The first byte of an input says what the rest is:
//   0  a safetensors file
//   1  two bytes n, then a header: the file is its length, the header and n bytes of data, taken from the input
//   2  a model.safetensors.index.json
// The other values act as these do, modulo 3. A file that parses has all its tensors read, as FP8 too.
// Seeds: tests/fuzz/safetensors_seeds.py. Run with -dict=tests/fuzz/safetensors.dict.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/check.h"
#include "kernels/tensor.h"
#include "model/checkpoint.h"
#include "model/checkpoint_index.h"
#include "model/safetensors.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using kernels::Tensor;

// The input in a block of its own size, so that AddressSanitizer sees a read past its end.
std::vector<std::byte> file_of_header(const uint8_t* data, size_t size) {
  uint16_t data_bytes = 0;
  if (size < sizeof(data_bytes)) return {};
  std::memcpy(&data_bytes, data, sizeof(data_bytes));
  const uint64_t length = size - sizeof(data_bytes);
  std::vector<std::byte> file(sizeof(length) + length + data_bytes);
  std::memcpy(file.data(), &length, sizeof(length));
  std::memcpy(file.data() + sizeof(length), data + sizeof(data_bytes), length);
  for (size_t i = 0; i < data_bytes; ++i) file[sizeof(length) + length + i] = std::byte{data[i % size]};
  return file;
}

void read_everything(SafetensorsFile parsed) {
  absl::StatusOr<Checkpoint> checkpoint =
      Checkpoint::open_file(std::move(parsed), {.fp8_block_rows = 2, .fp8_block_cols = 3});
  CHECK_OK(checkpoint.status());
  for (const std::string& name : checkpoint->names()) {
    const StoredTensor* stored = checkpoint->find(name);
    CHECK(stored != nullptr);
    const int rank = static_cast<int>(stored->shape.size());
    const int64_t numel = static_cast<int64_t>(stored->bytes.size()) / size_of(stored->dtype);
    if (rank >= 1 && rank <= Tensor::kMaxRank) {
      std::vector<float> values(static_cast<size_t>(numel) + 1);
      for (const DType dtype : {DType::kF32, DType::kBf16, DType::kI32, DType::kF8E4M3}) {
        const Tensor dst(values.data(), dtype, stored->shape.data(), rank);
        checkpoint->read_into(name, dst).IgnoreError();  // either answer is right here
      }
    }
    const std::vector<std::byte> copy(stored->bytes.begin(), stored->bytes.end());
    CHECK_EQ(copy.size(), stored->bytes.size());
  }
}

void parse_file(const std::vector<std::byte>& file) {
  absl::StatusOr<SafetensorsFile> parsed = SafetensorsFile::parse(file, "input");
  if (parsed.ok()) return read_everything(*std::move(parsed));
  CHECK(!parsed.status().message().empty());
}

void parse_index(std::string_view text) {
  const absl::StatusOr<CheckpointIndex> index = parse_checkpoint_index(text, "input");
  if (!index.ok()) return;
  for (const auto& [tensor, file] : index->weight_map) CHECK(file.find('/') == std::string::npos);
  // What we write of it, we read back.
  const absl::StatusOr<CheckpointIndex> again =
      parse_checkpoint_index(format_checkpoint_index(*index, 0), "output");
  CHECK_OK(again.status());
  CHECK(again->weight_map == index->weight_map);
}

}  // namespace
}  // namespace slipstream::model

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace slipstream::model;
  if (size == 0) return 0;
  const std::byte* bytes = reinterpret_cast<const std::byte*>(data);
  switch (data[0] % 3) {
    case 0:
      parse_file(std::vector<std::byte>(bytes + 1, bytes + size));
      break;
    case 1:
      parse_file(file_of_header(data + 1, size - 1));
      break;
    case 2:
      parse_index({reinterpret_cast<const char*>(data) + 1, size - 1});
      break;
  }
  return 0;
}
