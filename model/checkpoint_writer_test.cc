// Goal: what is saved reads back to the bit, in files of the published form and of bounded size; whatever
// stops a save, at any of its steps, the directory never loads as a mixture of two checkpoints.
#include "model/checkpoint_writer.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/bf16.h"
#include "kernels/testing/op_test.h"
#include "model/checkpoint.h"
#include "model/checkpoint_index.h"
#include "model/testing/stored_files.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using kernels::Tensor;
using kernels::testing::TensorPool;
using testing::bytes_of;
using testing::TemporaryDirectory;

Checkpoint open_checkpoint(const std::string& dir) {
  absl::StatusOr<Checkpoint> opened = Checkpoint::open(dir, {});
  CHECK_OK(opened.status());
  return *std::move(opened);
}

int64_t size_of_file(const std::string& path) {
  return static_cast<int64_t>(std::filesystem::file_size(path));
}

TEST(CheckpointWriterTest, WritesThePublishedForm) {
  const float values[] = {1.0f, -2.0f};
  const TemporaryDirectory dir;
  CheckpointWriter writer({});
  Tensor tensor(const_cast<float*>(values), DType::kF32, {1, 2});
  ASSERT_TRUE(writer.add("model.norm.weight", tensor, DType::kF32).ok());
  ASSERT_TRUE(writer.save(dir.path()).ok());
  std::string header =
      R"({"__metadata__":{"format":"pt"},"model.norm.weight":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";
  header.append((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(dir.read(kSingleFileName), testing::stored_file(header, testing::data_of<float>({1.0f, -2.0f})));
  EXPECT_EQ(dir.names(), std::vector<std::string>{kSingleFileName});
}

TEST(CheckpointWriterTest, RoundTripsEachType) {
  TensorPool pool(1);
  const Tensor wide = pool.random(DType::kF32, {3, 5, 7}).slice(2, 1, 6);  // strided
  const Tensor narrow = pool.random(DType::kBf16, {4, 9});
  const Tensor ints = pool.random_ints({11}, -1000, 1000);
  uint8_t codes[] = {0, 0x7f, 0x80, 0xff, 1};
  const Tensor fp8(codes, DType::kF8E4M3, {5});
  const StoredTensor conv{.name = "visual.conv",
                          .dtype = StoredDType::kF16,
                          .shape = {1, 1, 2, 1, 3},
                          .bytes = bytes_of("abcdefghijkl")};
  const StoredTensor scalar{
      .name = "scalar", .dtype = StoredDType::kF64, .shape = {}, .bytes = bytes_of("12345678")};
  const StoredTensor nothing{.name = "nothing", .dtype = StoredDType::kI64, .shape = {3, 0}, .bytes = {}};
  const TemporaryDirectory dir;
  CheckpointWriter writer({});
  ASSERT_TRUE(
      writer.add("fp8", fp8, DType::kF8E4M3).ok());  // odd sizes first: what follows must be aligned still
  ASSERT_TRUE(writer.add("wide.f32", wide, DType::kF32).ok());
  ASSERT_TRUE(writer.add("wide.bf16", wide, DType::kBf16).ok());
  ASSERT_TRUE(writer.add("narrow.f32", narrow, DType::kF32).ok());
  ASSERT_TRUE(writer.add("narrow.bf16", narrow, DType::kBf16).ok());
  ASSERT_TRUE(writer.add("ints", ints, DType::kI32).ok());
  for (const StoredTensor& raw : {conv, scalar, nothing}) ASSERT_TRUE(writer.add_raw(raw).ok());
  ASSERT_TRUE(writer.save(dir.path()).ok());

  Checkpoint checkpoint = open_checkpoint(dir.path());
  const std::string file = dir.read(kSingleFileName);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  EXPECT_EQ(header_bytes % 8, 0u);
  const absl::StatusOr<SafetensorsFile> parsed = SafetensorsFile::parse(bytes_of(file), "F");
  ASSERT_TRUE(parsed.ok());
  for (const StoredTensor& t : parsed->tensors()) {
    const int64_t begin = reinterpret_cast<const char*>(t.bytes.data()) - file.data() - 8;
    if (t.bytes.empty()) continue;
    EXPECT_EQ((begin - static_cast<int64_t>(header_bytes)) % size_of(t.dtype), 0) << t.name;
  }

  const auto read = [&](const char* name, DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor dst = pool.output(dtype, shape);
    CHECK_OK(checkpoint.read_into(name, dst));
    return dst;
  };
  const Tensor wide_back = read("wide.f32", DType::kF32, {3, 5, 5});
  const Tensor wide_narrow_back = read("wide.bf16", DType::kBf16, {3, 5, 5});
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 5; ++j) {
      for (int64_t k = 0; k < 5; ++k) {
        const float expected = wide[i].row(j)[k];
        EXPECT_EQ(wide_back[i].row(j)[k], expected);
        EXPECT_EQ(wide_narrow_back.bf()[(i * 5 + j) * 5 + k], kernels::to_bf16(expected));
      }
    }
  }
  const Tensor narrow_wide_back = read("narrow.f32", DType::kF32, {4, 9});
  const Tensor narrow_back = read("narrow.bf16", DType::kBf16, {4, 9});
  for (int64_t i = 0; i < 36; ++i) {
    EXPECT_EQ(narrow_back.bf()[i], narrow.bf()[i]);
    EXPECT_EQ(narrow_wide_back.f32()[i], to_f32(narrow.bf()[i]));
  }
  const Tensor ints_back = read("ints", DType::kI32, {11});
  EXPECT_EQ(std::memcmp(ints_back.raw(), ints.raw(), 44), 0);
  EXPECT_EQ(checkpoint.find("fp8")->describe(), "F8_E4M3 [5]");
  EXPECT_EQ(std::memcmp(checkpoint.find("fp8")->bytes.data(), codes, 5), 0);
  for (const StoredTensor& raw : {conv, scalar, nothing}) {
    const StoredTensor& back = *checkpoint.find(raw.name);
    EXPECT_EQ(back.describe(), raw.describe());
    EXPECT_EQ(back.bytes, raw.bytes);
  }
  // What was only looked at.
  EXPECT_EQ(checkpoint.unread(), (std::vector<std::string>{"fp8", "nothing", "scalar", "visual.conv"}));
}

// Runs longer than the writer's buffer, dense and strided.
TEST(CheckpointWriterTest, TensorsLargerThanTheBuffer) {
  constexpr int64_t kRows = 3;
  constexpr int64_t kCols = 700'001;
  std::vector<float> values(kRows * (kCols + 1));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const Tensor tensor(values.data(), DType::kF32, {kRows, kCols + 1});
  const TemporaryDirectory dir;
  CheckpointWriter writer({});
  ASSERT_TRUE(writer.add("dense", tensor, DType::kF32).ok());
  ASSERT_TRUE(writer.add("strided", tensor.slice(1, 1, kCols + 1), DType::kF32).ok());
  ASSERT_TRUE(writer.save(dir.path()).ok());
  Checkpoint checkpoint = open_checkpoint(dir.path());
  std::vector<float> back(values.size());
  ASSERT_TRUE(checkpoint.read_into("dense", Tensor(back.data(), DType::kF32, {kRows, kCols + 1})).ok());
  EXPECT_EQ(back, values);
  std::fill(back.begin(), back.end(), 0.0f);
  const Tensor slice = Tensor(back.data(), DType::kF32, {kRows, kCols + 1}).slice(1, 1, kCols + 1);
  ASSERT_TRUE(checkpoint.read_into("strided", slice).ok());
  for (int64_t i = 0; i < kRows; ++i) values[static_cast<size_t>(i * (kCols + 1))] = 0.0f;
  EXPECT_EQ(back, values);
}

// A checkpoint of `count` tensors "t0".. of one row of 64 values, all of which are `generation`.
struct Uniform {
  std::vector<float> values;
  CheckpointWriter writer;

  Uniform(int count, float generation, CheckpointWriterOptions options)
      : values(64, generation), writer(std::move(options)) {
    for (int i = 0; i < count; ++i) {
      CHECK_OK(writer.add(absl::StrCat("t", i), Tensor(values.data(), DType::kF32, {64}), DType::kF32));
    }
  }
};

// Two tensors of Uniform fit in a file of 800 bytes, three do not.
constexpr int64_t kTwoFit = 800;

absl::Status save_uniform(const std::string& dir, int count, float generation, int64_t shard_bytes_max) {
  return Uniform(count, generation, {.shard_bytes_max = shard_bytes_max, .before_step = {}}).writer.save(dir);
}

TEST(CheckpointWriterTest, ShardsStayWithinTheirBound) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(save_uniform(dir.path(), 5, 1.0f, kTwoFit).ok());
  EXPECT_EQ(dir.names(),
            (std::vector<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                      "model-00003-of-00003.safetensors", kIndexFileName}));
  for (const std::string& name : dir.names()) {
    if (name == kIndexFileName) continue;
    EXPECT_LE(size_of_file(dir.file(name)), kTwoFit) << name;
  }
  EXPECT_EQ(dir.read(kIndexFileName), R"({
  "metadata": {
    "total_size": 1280
  },
  "weight_map": {
    "t0": "model-00001-of-00003.safetensors",
    "t1": "model-00001-of-00003.safetensors",
    "t2": "model-00002-of-00003.safetensors",
    "t3": "model-00002-of-00003.safetensors",
    "t4": "model-00003-of-00003.safetensors"
  }
}
)");
  EXPECT_EQ(absl::StrJoin(open_checkpoint(dir.path()).names(), " "), "t0 t1 t2 t3 t4");
}

TEST(CheckpointWriterTest, ALargerTensorHasItsOwnShard) {
  const TemporaryDirectory dir;
  std::vector<float> large(1000);
  Uniform uniform(1, 1.0f, {.shard_bytes_max = kTwoFit, .before_step = {}});
  ASSERT_TRUE(uniform.writer.add("large", Tensor(large.data(), DType::kF32, {1000}), DType::kF32).ok());
  ASSERT_TRUE(uniform.writer.add("last", Tensor(large.data(), DType::kF32, {1}), DType::kF32).ok());
  ASSERT_TRUE(uniform.writer.save(dir.path()).ok());
  const Checkpoint checkpoint = open_checkpoint(dir.path());
  const absl::StatusOr<SafetensorsFile> second =
      SafetensorsFile::open(dir.file("model-00002-of-00003.safetensors"));
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->tensors().size(), 1u);
  EXPECT_EQ(second->tensors()[0].name, "large");
}

TEST(CheckpointWriterTest, NamesOfAnyText) {
  const std::vector<std::string> names = {"\"quoted\"",
                                          "back\\slash",
                                          "tab\tnewline\n\x01\x7f",
                                          "\u00e9\u4e2d\U0001f600",
                                          "a/b",
                                          std::string("nul\0nul", 7),
                                          std::string(1024, 'x')};
  const TemporaryDirectory dir;
  float value = 1.0f;
  CheckpointWriter writer({.shard_bytes_max = 1, .before_step = {}});
  for (const std::string& name : names) {
    ASSERT_TRUE(writer.add(name, Tensor(&value, DType::kF32, {1}), DType::kF32).ok());
  }
  ASSERT_TRUE(writer.save(dir.path()).ok());
  const Checkpoint checkpoint = open_checkpoint(dir.path());
  EXPECT_EQ(checkpoint.names().size(), names.size());
  for (const std::string& name : names) EXPECT_NE(checkpoint.find(name), nullptr) << name;
}

TEST(CheckpointWriterTest, RefusesByName) {
  float value = 1.0f;
  const Tensor tensor(&value, DType::kF32, {1});
  CheckpointWriter writer({});
  EXPECT_EQ(writer.save("/nowhere"), absl::InvalidArgumentError("a checkpoint without tensors"));
  ASSERT_TRUE(writer.add("a", tensor, DType::kF32).ok());
  EXPECT_EQ(writer.add("a", tensor, DType::kF32), absl::AlreadyExistsError("a: added twice"));
  EXPECT_EQ(writer.add("b", tensor, DType::kI32).message(), "b: f32 [1] cannot be written as i32");
  EXPECT_EQ(writer.add("b", tensor, DType::kF8E4M3).message(), "b: f32 [1] cannot be written as f8_e4m3");
  for (const std::string name : {"", "__metadata__", "\xff", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                 "\xe4\xb8", "\xf8\x88\x80\x80\x80"}) {
    EXPECT_EQ(writer.add(name, tensor, DType::kF32).message(),
              absl::StrCat("tensor name \"", name,
                           "\", expected 1 to 1024 bytes of UTF-8 other than __metadata__"));
  }
  EXPECT_FALSE(writer.add(std::string(1025, 'x'), tensor, DType::kF32).ok());
  EXPECT_EQ(
      writer.add_raw({.name = "c", .dtype = StoredDType::kF32, .shape = {2}, .bytes = bytes_of("1234567")})
          .message(),
      "c: F32 [2] with 7 bytes");
  EXPECT_FALSE(
      writer.add_raw({.name = "c", .dtype = StoredDType::kF32, .shape = {1ll << 62}, .bytes = {}}).ok());
  EXPECT_FALSE(writer.add_raw({.name = "c", .dtype = StoredDType::kF32, .shape = {-1, 0}, .bytes = {}}).ok());
}

TEST(CheckpointWriterTest, RefusesMoreShardsThanNamesCanCount) {
  float value = 1.0f;
  CheckpointWriter writer({.shard_bytes_max = 1, .before_step = {}});
  for (int i = 0; i < 100'000; ++i) {
    ASSERT_TRUE(writer.add(absl::StrCat(i), Tensor(&value, DType::kF32, {1}), DType::kF32).ok());
  }
  EXPECT_EQ(writer.save("/nowhere").message(),
            "shard_bytes_max 1 makes 100000 shards, expected at most 99999");
}

TEST(CheckpointWriterTest, MakesTheDirectoryOrSaysWhyNot) {
  const TemporaryDirectory dir;
  EXPECT_TRUE(save_uniform(dir.file("run/step-10"), 1, 1.0f, kTwoFit).ok());
  EXPECT_EQ(open_checkpoint(dir.file("run/step-10")).names().size(), 1u);
  dir.write("file", "");
  EXPECT_EQ(save_uniform(dir.file("file/x"), 1, 1.0f, kTwoFit).message(),
            absl::StrCat(dir.file("file/x"), ": Not a directory"));
}

// The value that all tensors of the checkpoint have; NaN if they do not all have one.
float generation_of(Checkpoint& checkpoint) {
  float generation = std::nanf("");
  for (const std::string& name : checkpoint.names()) {
    float values[64];
    CHECK_OK(checkpoint.read_into(name, Tensor(values, DType::kF32, {64})));
    if (name == checkpoint.names().front()) generation = values[0];
    for (const float value : values) {
      if (value != generation) return std::nanf("");
    }
  }
  return generation;
}

struct Change {
  int old_count;
  int new_count;
};

class CheckpointReplaceTest : public ::testing::TestWithParam<Change> {
 protected:
  TemporaryDirectory dir_;

  // The old checkpoint and files that no save may touch.
  void prepare() const {
    for (const std::string& name : dir_.names()) std::filesystem::remove(dir_.file(name));
    for (const char* name : {"config.json", "optimizer.safetensors", "model-1-of-2.safetensors",
                             "model-00001-of-00002.safetensors.bak"}) {
      dir_.write(name, "other");
    }
    CHECK_OK(save_uniform(dir_.path(), GetParam().old_count, 1.0f, kTwoFit));
    dir_.write("model-00007-of-00009.safetensors.tmp", "left by a crash");
  }
  void expect_generation(float generation) const {
    Checkpoint checkpoint = open_checkpoint(dir_.path());
    EXPECT_EQ(generation_of(checkpoint), generation);
  }
  void expect_new_and_nothing_else() const {
    Checkpoint checkpoint = open_checkpoint(dir_.path());
    EXPECT_EQ(generation_of(checkpoint), 2.0f);
    EXPECT_EQ(static_cast<int>(checkpoint.names().size()), GetParam().new_count);
    const size_t shards = static_cast<size_t>(GetParam().new_count + 1) / 2;
    EXPECT_EQ(dir_.names().size(), 4 + (shards == 1 ? 1 : shards + 1)) << absl::StrJoin(dir_.names(), " ");
    EXPECT_EQ(dir_.read("model-00001-of-00002.safetensors.bak"), "other");
  }
};

TEST_P(CheckpointReplaceTest, TheOldOneGoes) {
  prepare();
  ASSERT_TRUE(save_uniform(dir_.path(), GetParam().new_count, 2.0f, kTwoFit).ok());
  expect_new_and_nothing_else();
}

TEST_P(CheckpointReplaceTest, ACrashAtAnyStepLeavesOldOrNewOrNothing) {
  int olds = 0;
  int news = 0;
  for (int stop = 0;; ++stop) {
    prepare();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int step = 0;
      Uniform uniform(GetParam().new_count, 2.0f,
                      {.shard_bytes_max = kTwoFit, .before_step = [&](std::string_view) {
                         if (step++ == stop) ::_exit(9);
                       }});
      ::_exit(uniform.writer.save(dir_.path()).ok() ? 0 : 1);
    }
    int result = 0;
    ASSERT_EQ(::waitpid(child, &result, 0), child);
    ASSERT_TRUE(WIFEXITED(result));
    if (WEXITSTATUS(result) == 0) break;  // there was no such step
    ASSERT_EQ(WEXITSTATUS(result), 9);

    absl::StatusOr<Checkpoint> opened = Checkpoint::open(dir_.path(), {});
    if (opened.ok()) {
      const float generation = generation_of(*opened);
      ASSERT_TRUE(generation == 1.0f || generation == 2.0f) << "step " << stop;
      const int count = generation == 1.0f ? GetParam().old_count : GetParam().new_count;
      ASSERT_EQ(static_cast<int>(opened->names().size()), count) << "step " << stop;
      ++(generation == 1.0f ? olds : news);
    } else {
      // Only where a new shard takes an old one's name.
      ASSERT_EQ((GetParam().old_count + 1) / 2, (GetParam().new_count + 1) / 2);
      ASSERT_EQ(opened.status().code(), absl::StatusCode::kNotFound) << opened.status();
    }
    ASSERT_TRUE(save_uniform(dir_.path(), GetParam().new_count, 2.0f, kTwoFit).ok());
    expect_new_and_nothing_else();
  }
  EXPECT_GT(olds, 0);
  EXPECT_GT(news, 0);
}

// Weights and config.json are each other's after a crash at any step, or one of them does not load.
TEST_P(CheckpointReplaceTest, ConfigGoesWithItsWeights) {
  int olds = 0;
  int news = 0;
  for (int stop = 0;; ++stop) {
    prepare();
    dir_.write("config.json", "1");
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      int step = 0;
      Uniform uniform(GetParam().new_count, 2.0f,
                      {.shard_bytes_max = kTwoFit, .before_step = [&](std::string_view) {
                         if (step++ == stop) ::_exit(9);
                       }});
      uniform.writer.set_config("2");
      ::_exit(uniform.writer.save(dir_.path()).ok() ? 0 : 1);
    }
    int result = 0;
    ASSERT_EQ(::waitpid(child, &result, 0), child);
    ASSERT_TRUE(WIFEXITED(result));
    if (WEXITSTATUS(result) == 0) break;  // there was no such step
    ASSERT_EQ(WEXITSTATUS(result), 9);
    absl::StatusOr<Checkpoint> opened = Checkpoint::open(dir_.path(), {});
    if (!opened.ok() || !std::filesystem::exists(dir_.file("config.json"))) continue;
    ASSERT_EQ(absl::StrCat(generation_of(*opened)), dir_.read("config.json")) << "step " << stop;
    ++(generation_of(*opened) == 1.0f ? olds : news);
  }
  EXPECT_EQ(dir_.read("config.json"), "2");
  EXPECT_GT(olds, 0);
  EXPECT_EQ(news, 0);  // the new config is the last step

  // The same config again is never gone.
  Uniform uniform(GetParam().new_count, 3.0f, {.shard_bytes_max = kTwoFit, .before_step = [&](std::string_view) {
                    EXPECT_EQ(dir_.read("config.json"), "2");
                  }});
  uniform.writer.set_config("2");
  ASSERT_TRUE(uniform.writer.save(dir_.path()).ok());
  expect_generation(3.0f);
}

TEST_P(CheckpointReplaceTest, AFullDiskLeavesTheOld) {
  prepare();
  const std::vector<std::string> before = dir_.names();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // A file may not grow beyond 400 bytes: writing fails in the middle of a shard, as on a full disk.
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 400, .rlim_max = 400};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(2);
    const absl::Status saved = save_uniform(dir_.path(), GetParam().new_count, 2.0f, kTwoFit);
    ::_exit(!saved.ok() && saved.message().find(".safetensors.tmp: File too large") != std::string::npos ? 0
                                                                                                         : 1);
  }
  int result = 0;
  ASSERT_EQ(::waitpid(child, &result, 0), child);
  ASSERT_EQ(result, 0);
  EXPECT_EQ(dir_.names(), before);
  Checkpoint checkpoint = open_checkpoint(dir_.path());
  EXPECT_EQ(generation_of(checkpoint), 1.0f);
}

INSTANTIATE_TEST_SUITE_P(Counts, CheckpointReplaceTest,
                         ::testing::Values(Change{1, 2}, Change{2, 5}, Change{5, 2}, Change{5, 6},
                                           Change{3, 8}, Change{8, 3}),
                         [](const auto& param) {
                           return absl::StrCat(param.param.old_count, "to", param.param.new_count);
                         });

// What is carried through may lie in the very files that the save replaces.
TEST(CheckpointWriterTest, SavesOverTheFilesItReads) {
  const TemporaryDirectory dir;
  ASSERT_TRUE(save_uniform(dir.path(), 4, 3.0f, kTwoFit).ok());
  Checkpoint source = open_checkpoint(dir.path());
  CheckpointWriter writer({.shard_bytes_max = kTwoFit, .before_step = {}});
  for (const std::string& name : source.names()) ASSERT_TRUE(writer.add_raw(*source.find(name)).ok());
  ASSERT_TRUE(writer.save(dir.path()).ok());
  Checkpoint again = open_checkpoint(dir.path());
  EXPECT_EQ(again.names().size(), 4u);
  EXPECT_EQ(generation_of(again), 3.0f);
  EXPECT_EQ(generation_of(source), 3.0f);
}

TEST(CopySideFileTest, CopiesWholeFiles) {
  const TemporaryDirectory from;
  const TemporaryDirectory to;
  from.write("config.json", "{\"new\":1}");
  to.write("config.json", "{\"old\":1}");
  ASSERT_TRUE(copy_side_file(from.path(), to.path(), "config.json").ok());
  EXPECT_EQ(to.read("config.json"), "{\"new\":1}");
  EXPECT_EQ(to.names(), std::vector<std::string>{"config.json"});
  ASSERT_TRUE(copy_side_file(from.path(), from.path(), "config.json").ok());
  ASSERT_TRUE(copy_side_file(from.path(), to.file("made/here"), "config.json").ok());
  EXPECT_EQ(copy_side_file(from.path(), to.path(), "generation_config.json").code(),
            absl::StatusCode::kNotFound);
  for (const char* name : {"", "..", "../config.json", "a/b"}) {
    EXPECT_EQ(copy_side_file(from.path(), to.path(), name).code(), absl::StatusCode::kInvalidArgument)
        << name;
  }
}

}  // namespace
}  // namespace slipstream::model
