// Goal: a checkpoint, whole or in shards, gives each tensor's values to the bit in the dtype and place that
// the caller wants, refuses by name what is not as expected, and knows what nobody has read.
#include "model/checkpoint.h"

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/bf16.h"
#include "kernels/testing/op_test.h"
#include "model/checkpoint_index.h"
#include "model/testing/stored_files.h"

namespace slipstream::model {
namespace {

using kernels::bf16;
using kernels::DType;
using kernels::Tensor;
using kernels::testing::TensorPool;
using testing::bytes_of;
using testing::data_of;
using testing::stored_file;
using testing::TemporaryDirectory;

struct Item {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string data;
};

std::string file_of(const std::vector<Item>& items) {
  std::vector<std::string> entries;
  std::string data;
  for (const Item& item : items) {
    entries.push_back(absl::StrCat("\"", item.name, "\":{\"dtype\":\"", item.dtype, "\",\"shape\":[",
                                   absl::StrJoin(item.shape, ","), "],\"data_offsets\":[", data.size(), ",",
                                   data.size() + item.data.size(), "]}"));
    data += item.data;
  }
  return stored_file(absl::StrCat("{", absl::StrJoin(entries, ","), "}"), data);
}

// A checkpoint over items in memory; the file's bytes live as long as this.
struct InMemory {
  std::string file;
  Checkpoint checkpoint;
  explicit InMemory(const std::vector<Item>& items, const CheckpointOptions& options = {})
      : file(file_of(items)), checkpoint(open(file, options)) {}

  static Checkpoint open(const std::string& file, const CheckpointOptions& options) {
    absl::StatusOr<SafetensorsFile> parsed = SafetensorsFile::parse(bytes_of(file), "F");
    CHECK_OK(parsed.status());
    absl::StatusOr<Checkpoint> opened = Checkpoint::open_file(*std::move(parsed), options);
    CHECK_OK(opened.status());
    return *std::move(opened);
  }
};

Item f32(const std::string& name, const std::vector<int64_t>& shape, const std::vector<float>& values) {
  return {name, "F32", shape, data_of(values)};
}

Item one(const std::string& name) { return f32(name, {1}, {1.0f}); }

std::string message_of(const absl::Status& status) { return std::string(status.message()); }

TEST(CheckpointTest, ConvertsEachStoredType) {
  const std::vector<float> values = {1.0f,     -2.5f, 3.0e38f,
                                     1.0e-40f, 0.0f,  1.00390625f};  // the last: a tie in bf16
  std::vector<bf16> narrow;
  for (const float value : values) narrow.push_back(kernels::to_bf16(value));
  const std::vector<uint16_t> halves = {0x3c00, 0xc100, 0x0001, 0x83ff, 0x7bff, 0x3c01};
  InMemory m({f32("f", {2, 3}, values),
              {"b", "BF16", {2, 3}, data_of(narrow)},
              {"h", "F16", {2, 3}, data_of(halves)},
              {"i", "I32", {3}, data_of<int32_t>({-1, 7, 1 << 30})},
              {"e", "F8_E4M3", {3}, "\x01\x7f\x80"}});
  TensorPool pool(1);
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const char* name : {"f", "b", "h"}) {
      const Tensor dst = pool.output(dtype, {2, 3});
      ASSERT_TRUE(m.checkpoint.read_into(name, dst).ok());
      for (size_t i = 0; i < 6; ++i) {
        const float value = name[0] == 'f'   ? values[i]
                            : name[0] == 'b' ? to_f32(narrow[i])
                                             : f16_to_f32(halves[i]);
        if (dtype == DType::kF32) {
          EXPECT_EQ(dst.f32()[i], value) << name << i;
        } else {
          EXPECT_EQ(dst.bf()[i], kernels::to_bf16(value)) << name << i;
        }
      }
    }
  }
  const Tensor ints = pool.output(DType::kI32, {3});
  ASSERT_TRUE(m.checkpoint.read_into("i", ints).ok());
  EXPECT_EQ(std::vector<int32_t>(ints.i32(), ints.i32() + 3), (std::vector<int32_t>{-1, 7, 1 << 30}));
  uint8_t codes[3] = {};
  ASSERT_TRUE(m.checkpoint.read_into("e", Tensor(codes, DType::kF8E4M3, {3})).ok());
  EXPECT_EQ(codes[1], 0x7f);
  EXPECT_EQ(codes[2], 0x80);
  pool.expect_fences_intact();
}

TEST(CheckpointTest, FillsStridedSlices) {
  std::vector<float> values(2 * 3 * 4);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  InMemory m({f32("x", {2, 3, 4}, values), f32("none", {2, 0, 4}, {})});
  TensorPool pool(2);
  const Tensor whole = pool.output(DType::kF32, {3, 3, 9});
  const Tensor slice = whole.slice(0, 1, 3).slice(2, 2, 6);
  ASSERT_TRUE(m.checkpoint.read_into("x", slice).ok());
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 3; ++j) {
      for (int64_t k = 0; k < 9; ++k) {
        const float actual = whole[i].row(j)[k];
        if (i < 1 || k < 2 || k >= 6) {
          EXPECT_TRUE(std::isnan(actual));
        } else {
          EXPECT_EQ(actual, static_cast<float>(((i - 1) * 3 + j) * 4 + k - 2));
        }
      }
    }
  }
  ASSERT_TRUE(m.checkpoint.read_into("none", pool.output(DType::kF32, {2, 0, 4})).ok());
  pool.expect_fences_intact();
}

TEST(CheckpointTest, RefusesShapesAndTypesByName) {
  InMemory m({f32("w", {2, 3}, std::vector<float>(6)),
              {"long", "I64", {1}, std::string(8, '\0')},
              {"half", "F16", {1}, std::string(2, '\0')},
              f32("scalar", {}, {1.0f})});
  TensorPool pool(3);
  const auto refusal = [&](const char* name, const Tensor& dst) {
    return message_of(m.checkpoint.read_into(name, dst));
  };
  EXPECT_EQ(refusal("w", pool.output(DType::kF32, {2, 4})), "F: w: shape [2, 3], expected [2, 4]");
  EXPECT_EQ(refusal("w", pool.output(DType::kF32, {6})), "F: w: shape [2, 3], expected [6]");
  EXPECT_EQ(refusal("w", pool.output(DType::kF32, {2, 3, 1})), "F: w: shape [2, 3], expected [2, 3, 1]");
  EXPECT_EQ(refusal("scalar", pool.output(DType::kF32, {1})), "F: scalar: shape [], expected [1]");
  EXPECT_EQ(refusal("long", pool.output(DType::kF32, {1})),
            "F: long: dtype I64, expected one that converts to f32");
  EXPECT_EQ(refusal("long", pool.output(DType::kI32, {1})),
            "F: long: dtype I64, expected one that converts to i32");
  EXPECT_EQ(refusal("half", pool.output(DType::kI32, {1})),
            "F: half: dtype F16, expected one that converts to i32");
  EXPECT_EQ(m.checkpoint.read_into("v", pool.output(DType::kF32, {1})),
            absl::NotFoundError("F: v: no such tensor"));
  EXPECT_EQ(m.checkpoint.unread(), (std::vector<std::string>{"half", "long", "scalar", "w"}));
}

// FP8 with 2 x 3 blocks: [3, 4] codes under [2, 2] scales.
class Fp8CheckpointTest : public ::testing::Test {
 protected:
  static constexpr CheckpointOptions kOptions{.fp8_block_rows = 2, .fp8_block_cols = 3};
  std::vector<uint8_t> codes_ = {0x38, 0x39, 0x3a, 0x3b, 0xb8, 0x01, 0x08, 0x7e, 0x40, 0x41, 0x42, 0x43};
  std::vector<float> scales_ = {0.5f, 2.0f, 0.001f, 300.0f};

  std::vector<Item> items() const {
    return {{"x", "U8", {1}, "z"},  // the scales then lie unaligned
            f32("p.weight_scale_inv", {2, 2}, scales_),
            {"p.weight", "F8_E4M3", {3, 4}, data_of(codes_)}};
  }
  std::string refusal(const std::vector<Item>& items, const CheckpointOptions& options = kOptions) {
    InMemory m(items, options);
    std::vector<float> out(12, -7.0f);
    const absl::Status status = m.checkpoint.read_into("p.weight", Tensor(out.data(), DType::kF32, {3, 4}));
    EXPECT_EQ(out, std::vector<float>(12, -7.0f));
    EXPECT_EQ(m.checkpoint.unread().size(), items.size());
    return message_of(status);
  }
};

TEST_F(Fp8CheckpointTest, MultipliesByItsBlocksScale) {
  InMemory m(items(), kOptions);
  TensorPool pool(4);
  const Tensor wide = pool.output(DType::kF32, {3, 9});
  ASSERT_TRUE(m.checkpoint.read_into("p.weight", wide.slice(1, 1, 5)).ok());
  EXPECT_EQ(m.checkpoint.unread(), std::vector<std::string>{"x"});
  const float expected[3][4] = {{0.5f, 0.5f * 1.125f, 0.5f * 1.25f, 2.0f * 1.375f},
                                {-0.5f, 0.5f * 0x1p-9f, 0.5f * 0x1p-6f, 2.0f * 448.0f},
                                {0.001f * 2.0f, 0.001f * 2.25f, 0.001f * 2.5f, 300.0f * 2.75f}};
  const Tensor narrow = pool.output(DType::kBf16, {3, 4});
  ASSERT_TRUE(m.checkpoint.read_into("p.weight", narrow).ok());
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 4; ++j) {
      EXPECT_EQ(wide.row(i)[j + 1], expected[i][j]);
      EXPECT_EQ(narrow.bf()[i * 4 + j], kernels::to_bf16(expected[i][j]));
    }
  }
  pool.expect_fences_intact();
}

TEST_F(Fp8CheckpointTest, ReadsCodesAndScalesAsTheyAre) {
  std::vector<Item> with_plain = items();
  with_plain.push_back(f32("plain", {3, 4}, std::vector<float>(12)));
  InMemory m(with_plain, kOptions);
  std::vector<uint8_t> codes(12, 0x11);
  std::vector<float> scales(4, -7.0f);
  const auto read = [&](const char* name, int64_t rows, int64_t cols) {
    return m.checkpoint.read_fp8_into(name, Tensor(codes.data(), DType::kF8E4M3, {rows, cols}),
                                      Tensor(scales.data(), DType::kF32, {2, 2}));
  };
  EXPECT_EQ(message_of(read("p.weight", 4, 3)), "F: p.weight: shape [3, 4], expected [4, 3]");
  EXPECT_EQ(message_of(read("plain", 3, 4)), "F: plain: dtype F32, expected F8_E4M3");
  EXPECT_EQ(codes, std::vector<uint8_t>(12, 0x11));
  EXPECT_EQ(scales, std::vector<float>(4, -7.0f));
  ASSERT_TRUE(read("p.weight", 3, 4).ok());
  EXPECT_EQ(codes, codes_);
  EXPECT_EQ(scales, scales_);
  EXPECT_EQ(m.checkpoint.unread(), (std::vector<std::string>{"plain", "x"}));
}

TEST_F(Fp8CheckpointTest, ScaleReadAloneLeavesTheWeight) {
  InMemory m(items(), kOptions);
  TensorPool pool(5);
  ASSERT_TRUE(m.checkpoint.read_into("p.weight_scale_inv", pool.output(DType::kF32, {2, 2})).ok());
  EXPECT_EQ(m.checkpoint.unread(), (std::vector<std::string>{"p.weight", "x"}));
}

TEST_F(Fp8CheckpointTest, RefusesScalesByBlock) {
  const std::string where = "F: p.weight_scale_inv: block [1, 0]: scale ";
  const std::string rule = ", expected a finite one, above 0 where the block is not all zeros";
  const float inf = std::numeric_limits<float>::infinity();
  for (const float scale : {std::nanf(""), inf, -inf, 0.0f, -1.0f}) {
    scales_[2] = scale;
    EXPECT_EQ(refusal(items()), absl::StrCat(where, scale, rule));
  }
  for (size_t i = 8; i < 11; ++i) codes_[i] = 0x80;  // now all zeros: only what is not finite is refused
  for (const float scale : {std::nanf(""), inf}) {
    scales_[2] = scale;
    EXPECT_EQ(refusal(items()), absl::StrCat(where, scale, rule));
  }
  for (const float scale : {0.0f, -1.0f, 1.0f}) {
    scales_[2] = scale;
    InMemory m(items(), kOptions);
    std::vector<float> out(12, std::nanf(""));
    ASSERT_TRUE(m.checkpoint.read_into("p.weight", Tensor(out.data(), DType::kF32, {3, 4})).ok());
    for (size_t i = 8; i < 11; ++i) EXPECT_EQ(out[i], 0.0f);
  }
}

TEST_F(Fp8CheckpointTest, RefusesMissingAndMisshapenScales) {
  std::vector<Item> missing = items();
  missing.erase(missing.begin() + 1);
  EXPECT_EQ(refusal(missing), "F: p.weight: F8_E4M3 without its scales: no tensor p.weight_scale_inv");
  std::vector<Item> flat = items();
  flat[1].shape = {4};
  EXPECT_EQ(refusal(flat), "F: p.weight_scale_inv: F32 [4], expected F32 [2, 2]");
  EXPECT_EQ(refusal(items(), {}), "F: p.weight_scale_inv: F32 [2, 2], expected F32 [1, 1]");
  std::vector<Item> narrow = items();
  narrow[1] = {"p.weight_scale_inv", "BF16", {2, 2}, std::string(8, '\0')};
  EXPECT_EQ(refusal(narrow), "F: p.weight_scale_inv: BF16 [2, 2], expected F32 [2, 2]");
}

TEST_F(Fp8CheckpointTest, RefusesWhatIsNoMatrix) {
  std::vector<Item> cube = items();
  cube[2].shape = {1, 3, 4};
  InMemory m(cube, kOptions);
  std::vector<float> out(12);
  EXPECT_EQ(message_of(m.checkpoint.read_into("p.weight", Tensor(out.data(), DType::kF32, {1, 3, 4}))),
            "F: p.weight: shape [1, 3, 4], expected a matrix for F8_E4M3 with block scales");
}

TEST(CheckpointTest, RefusesBlockSizesBelowOne) {
  const TemporaryDirectory dir;
  dir.write("model.safetensors", file_of({one("a")}));
  EXPECT_EQ(message_of(Checkpoint::open(dir.path(), {.fp8_block_rows = 0, .fp8_block_cols = 128}).status()),
            "weight_block_size [0, 128], expected sizes of at least 1");
}

TEST(CheckpointTest, CarriesBytes) {
  InMemory m({f32("a", {2}, {1.0f, 2.0f}), {"odd", "F8_E5M2", {1, 1, 1, 1, 3}, "abc"}});
  const StoredTensor* odd = m.checkpoint.find("odd");
  ASSERT_NE(odd, nullptr);
  EXPECT_EQ(odd->describe(), "F8_E5M2 [1, 1, 1, 1, 3]");
  EXPECT_EQ(odd->bytes, bytes_of("abc"));
  EXPECT_EQ(m.checkpoint.unread(), (std::vector<std::string>{"a", "odd"}));  // a look is no reading
  EXPECT_EQ(m.checkpoint.names(), (std::vector<std::string>{"a", "odd"}));
  EXPECT_EQ(m.checkpoint.find("b"), nullptr);
}

// Directories.

std::string index_of(const std::string& weight_map) { return "{\"weight_map\":{" + weight_map + "}}"; }

class CheckpointDirectoryTest : public ::testing::Test {
 protected:
  TemporaryDirectory dir_;

  std::string open_message() const {
    const absl::StatusOr<Checkpoint> opened = Checkpoint::open(dir_.path(), {});
    if (opened.ok()) return absl::StrJoin(opened->names(), " ");
    std::string message(opened.status().message());
    for (size_t at = 0; (at = message.find(dir_.path(), at)) != std::string::npos;) {
      message.replace(at, dir_.path().size(), "DIR");
    }
    return message;
  }
  void write_shards() const {
    dir_.write("s1.safetensors", file_of({one("a"), one("c")}));
    dir_.write("s2.safetensors", file_of({one("b")}));
    dir_.write(kIndexFileName, index_of(R"("a":"s1.safetensors","b":"s2.safetensors","c":"s1.safetensors")"));
  }
};

TEST_F(CheckpointDirectoryTest, OpensShards) {
  write_shards();
  EXPECT_EQ(open_message(), "a b c");
  absl::StatusOr<Checkpoint> opened = Checkpoint::open(dir_.path(), {});
  TensorPool pool(6);
  const Tensor dst = pool.output(DType::kF32, {1});
  ASSERT_TRUE(opened->read_into("b", dst).ok());
  EXPECT_EQ(dst.f32()[0], 1.0f);
  EXPECT_EQ(message_of(opened->read_into("b", pool.output(DType::kF32, {2}))),
            dir_.path() + "/s2.safetensors: b: shape [1], expected [2]");
}

TEST_F(CheckpointDirectoryTest, TakesTheSingleFileFirst) {
  write_shards();
  dir_.write(kSingleFileName, file_of({one("single")}));
  EXPECT_EQ(open_message(), "single");
}

TEST_F(CheckpointDirectoryTest, RefusesWhatIsNotThere) {
  EXPECT_EQ(open_message(), "DIR: neither model.safetensors nor model.safetensors.index.json");
  write_shards();
  std::filesystem::remove(dir_.file("s2.safetensors"));
  EXPECT_EQ(open_message(), "DIR/s2.safetensors: No such file or directory");
  EXPECT_EQ(Checkpoint::open(dir_.path(), {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Checkpoint::open(dir_.file("nowhere"), {}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointDirectoryTest, RefusesATruncatedShard) {
  write_shards();
  const std::string file = dir_.read("s2.safetensors");
  dir_.write("s2.safetensors", file.substr(0, file.size() - 1));
  EXPECT_EQ(open_message(),
            "DIR/s2.safetensors: b: data_offsets [0, 4], but the file has only 3 bytes of data");
}

TEST_F(CheckpointDirectoryTest, RefusesAnIndexThatShardsContradict) {
  write_shards();
  dir_.write("s2.safetensors", file_of({one("d")}));
  EXPECT_EQ(open_message(),
            "DIR/model.safetensors.index.json: b: not in s2.safetensors, where weight_map has it");
  dir_.write("s2.safetensors", file_of({one("b"), one("c")}));
  EXPECT_EQ(open_message(),
            "DIR/s2.safetensors: c: stands in two shards; weight_map has it in s1.safetensors");
  dir_.write("s2.safetensors", file_of({one("b"), one("d")}));
  EXPECT_EQ(open_message(), "DIR/s2.safetensors: d: not in weight_map of the index");
}

TEST_F(CheckpointDirectoryTest, RefusesMalformedIndices) {
  const std::pair<const char*, const char*> refusals[] = {
      {"", "not a JSON object"},
      {"[]", "not a JSON object"},
      {"{}", "weight_map is missing"},
      {R"({"metadata":{}})", "weight_map is missing"},
      {R"({"weight_map":[]})", "index: an array, expected an object in weight_map"},
      {R"({"weight_map":{"a":1}})", "a: 1, expected a file name"},
      {R"({"weight_map":{"a":{}}})", "a: an object, expected a file name"},
      {R"({"weight_map":{"a":"s.safetensors","a":"s.safetensors"}})", "a: stands twice in weight_map"},
      {R"({"weight_map":{},"weight_map":{}})", "weight_map stands twice"},
  };
  for (const auto& [index, message] : refusals) {
    dir_.write(kIndexFileName, index);
    EXPECT_EQ(open_message(), absl::StrCat("DIR/model.safetensors.index.json: ", message)) << index;
  }
  for (const char* index :
       {R"({"weight_map":{"a":"s.safetensors"})", R"({"weight_map":{}}})", R"({"weight_map":{})"}) {
    dir_.write(kIndexFileName, index);
    EXPECT_TRUE(open_message().starts_with("DIR/model.safetensors.index.json: not JSON at byte ")) << index;
  }
}

// A shard that is there for the taking, but outside: the refusal must not depend on its absence.
TEST_F(CheckpointDirectoryTest, RefusesFilesOutsideTheDirectory) {
  dir_.write("outside.safetensors", file_of({one("a")}));
  const std::string inside = dir_.file("inside");
  std::filesystem::create_directory(inside);
  for (const std::string file :
       {"../outside.safetensors", "/outside.safetensors", "x/../../outside.safetensors", "..", ".", "",
        "a.bin", ".safetensors", "./a.safetensors"}) {
    dir_.write("inside/model.safetensors.index.json", index_of("\"a\":\"" + file + "\""));
    EXPECT_EQ(message_of(Checkpoint::open(inside, {}).status()),
              absl::StrCat(inside, "/model.safetensors.index.json: a: file \"", file,
                           "\", expected a name in this directory that ends in .safetensors"));
  }
  dir_.write("inside/model.safetensors.index.json", index_of(R"("a":"x\u0000/../outside.safetensors")"));
  EXPECT_FALSE(Checkpoint::open(inside, {}).ok());
}

TEST_F(CheckpointDirectoryTest, IgnoresMetadata) {
  write_shards();
  const std::string map = R"("weight_map":{"a":"s1.safetensors","b":"s2.safetensors","c":"s1.safetensors"})";
  for (const char* metadata : {R"("metadata":{"total_size":1e99,"x":[1,[-2],{"y":null}],"z":true})",
                               R"("metadata":3)", R"("a":"b","c":[],"d":{})"}) {
    dir_.write(kIndexFileName, absl::StrCat("{", metadata, ",", map, "}"));
    EXPECT_EQ(open_message(), "a b c");
    dir_.write(kIndexFileName, absl::StrCat("{", map, ",", metadata, "}"));
    EXPECT_EQ(open_message(), "a b c");
  }
}

// Two threads read all tensors, each in its own order, and look at unread() meanwhile; the thread sanitizer
// watches.
TEST_F(CheckpointDirectoryTest, TwoReadersAtOnce) {
  constexpr int kTensors = 40;
  std::vector<Item> items;
  for (int i = 0; i < kTensors; ++i) {
    items.push_back(f32(absl::StrCat("t", i), {64}, std::vector<float>(64, static_cast<float>(i))));
  }
  dir_.write(kSingleFileName, file_of(items));
  absl::StatusOr<Checkpoint> opened = Checkpoint::open(dir_.path(), {});
  ASSERT_TRUE(opened.ok());
  std::vector<float> values[2];
  const auto read_all = [&](int reader) {
    values[reader].resize(kTensors * 64);
    for (int i = 0; i < kTensors; ++i) {
      const int t = reader == 0 ? i : kTensors - 1 - i;
      CHECK_OK(
          opened->read_into(absl::StrCat("t", t), Tensor(values[reader].data() + t * 64, DType::kF32, {64})));
      CHECK_LE(opened->unread().size(), static_cast<size_t>(kTensors - 1 - i));
    }
  };
  {
    const std::jthread first(read_all, 0);
    const std::jthread second(read_all, 1);
  }
  EXPECT_EQ(values[0], values[1]);
  EXPECT_EQ(values[0][39 * 64 + 63], 39.0f);
  EXPECT_TRUE(opened->unread().empty());
}

}  // namespace
}  // namespace slipstream::model
