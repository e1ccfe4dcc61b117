// Goal: a well-formed file gives exactly its tensors; everything else is refused with file, tensor and field
// named, and no file, however cut or changed, is read outside its bytes (the sanitizer builds see to that).
#include "model/safetensors.h"

#include <sys/stat.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "model/testing/stored_files.h"

namespace slipstream::model {
namespace {

using testing::bytes_of;
using testing::stored_file;
using testing::TemporaryDirectory;

constexpr char kGoodHeader[] =
    R"({"__metadata__":{"format":"pt","note":"\u00e9"},)"
    R"("b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("a":{"shape":[],"data_offsets":[24,26],"dtype":"BF16"},)"
    R"("empty":{"dtype":"I64","shape":[4,0,2],"data_offsets":[26,26]},)"
    R"("c.weight":{"dtype":"F8_E4M3","shape":[1,2,1,3,1],"data_offsets":[26,32]}}  )";

std::string good_file() {
  std::string data(32, '\0');
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i);
  return stored_file(kGoodHeader, data);
}

std::string message_of(const std::string& file) {
  const absl::StatusOr<SafetensorsFile> parsed = SafetensorsFile::parse(bytes_of(file), "F");
  return parsed.ok() ? "OK" : std::string(parsed.status().message());
}

TEST(SafetensorsTest, ReadsAllThatTheHeaderSays) {
  const std::string file = good_file();
  absl::StatusOr<SafetensorsFile> parsed = SafetensorsFile::parse(bytes_of(file), "F");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const SafetensorsFile moved = *std::move(parsed);
  EXPECT_EQ(moved.path(), "F");
  EXPECT_EQ(moved.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"note", "\u00e9"}}));
  std::string listed;
  for (const StoredTensor& t : moved.tensors()) {
    absl::StrAppend(&listed, t.name, " ", t.describe(), " ", t.bytes.size(), "; ");
    EXPECT_EQ(moved.find(t.name), &t);
  }
  EXPECT_EQ(listed,
            "a BF16 [] 2; b F32 [2, 3] 24; c.weight F8_E4M3 [1, 2, 1, 3, 1] 6; empty I64 [4, 0, 2] 0; ");
  EXPECT_EQ(moved.find("b")->bytes[23], std::byte{23});
  EXPECT_EQ(moved.find("a")->bytes[0], std::byte{24});
  EXPECT_EQ(moved.find("c.weight")->bytes[5], std::byte{31});
  EXPECT_EQ(moved.find(""), nullptr);
  EXPECT_EQ(moved.find("bb"), nullptr);
}

TEST(SafetensorsTest, NoTensorsIsAFile) {
  EXPECT_EQ(message_of(stored_file("{}", "")), "OK");
  EXPECT_EQ(message_of(stored_file(R"({"__metadata__":{}})", "")), "OK");
}

TEST(SafetensorsTest, OpensAMappedFile) {
  const TemporaryDirectory dir;
  dir.write("x.safetensors", good_file());
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::open(dir.file("x.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->find("b")->bytes[23], std::byte{23});
}

TEST(SafetensorsTest, OpenNamesWhatIsNotAFile) {
  const TemporaryDirectory dir;
  const std::string path = dir.file("x");
  EXPECT_EQ(SafetensorsFile::open(path).status(), absl::NotFoundError(path + ": No such file or directory"));
  EXPECT_EQ(SafetensorsFile::open(dir.path()).status(),
            absl::InvalidArgumentError(dir.path() + ": not a regular file"));
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(SafetensorsFile::open(path).status(), absl::InvalidArgumentError(path + ": not a regular file"));
  dir.write("empty", "");
  EXPECT_EQ(SafetensorsFile::open(dir.file("empty")).status(),
            absl::DataLossError(dir.file("empty") + ": 0 bytes, expected at least 8"));
}

TEST(SafetensorsTest, RefusesEveryCut) {
  const std::string file = good_file();
  for (size_t size = 0; size < file.size(); ++size) {
    const std::string cut = file.substr(0, size);  // a copy: the sanitizer then knows where it ends
    const absl::StatusOr<SafetensorsFile> parsed = SafetensorsFile::parse(bytes_of(cut), "F");
    ASSERT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss) << size << " " << parsed.status();
  }
  EXPECT_EQ(message_of(file + '\0'), "F: the file has 33 bytes of data, expected 32");
}

// One changed byte in front of the data: parsed or refused with a message, but never worse.
TEST(SafetensorsTest, SurvivesEveryChangedByte) {
  const std::string file = good_file();
  const size_t header_end = file.size() - 32;
  int accepted = 0;
  for (size_t at = 0; at < header_end; ++at) {
    for (const int change : {0x01, 0x02, 0x10, 0x20, 0x80, 0xff}) {
      std::string changed = file;
      changed[at] = static_cast<char>(changed[at] ^ change);
      const absl::StatusOr<SafetensorsFile> parsed = SafetensorsFile::parse(bytes_of(changed), "F");
      if (!parsed.ok()) {
        ASSERT_TRUE(parsed.status().message().size() > 3);
        continue;
      }
      ++accepted;
      for (const StoredTensor& t : parsed->tensors()) {
        ASSERT_TRUE(t.bytes.empty() || (t.bytes.begin() >= bytes_of(changed).begin() + header_end &&
                                        t.bytes.end() <= bytes_of(changed).end()));
      }
    }
  }
  EXPECT_GT(accepted, 0);  // letters of names
}

TEST(SafetensorsTest, BoundsTheHeader) {
  const std::string good = good_file();
  const auto with_length = [&](uint64_t length) {
    std::string file = good;
    std::memcpy(file.data(), &length, sizeof(length));
    return message_of(file);
  };
  EXPECT_EQ(with_length(~uint64_t{0}),
            "F: a header of 18446744073709551615 bytes, expected at most 100000000");
  EXPECT_EQ(with_length(100'000'001), "F: a header of 100000001 bytes, expected at most 100000000");
  EXPECT_EQ(with_length(100'000'000), absl::StrCat("F: a header of 100000000 bytes, but the file has only ",
                                                   good.size() - 8, " after its length"));
  EXPECT_EQ(with_length(0), "F: not a JSON object");
}

struct Refusal {
  std::string header;
  size_t data_bytes;
  const char* message;
};

TEST(SafetensorsTest, RefusesByName) {
  const std::string a8 = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::string max = "9223372036854775807";
  const Refusal refusals[] = {
      // Not the JSON that the format has.
      {" {}", 0, "F: not a JSON object"},
      {"\xef\xbb\xbf{}", 0, "F: not a JSON object"},
      {"[]", 0, "F: not a JSON object"},
      {"{}x", 0,
       "F: not JSON at byte 3: parse error at line 1, column 3: syntax error while parsing value - "
       "invalid literal; last read: '{}x'; expected end of input"},
      {std::string("{}\0}", 4), 0, "F: a NUL byte, expected JSON"},
      {"{" + a8 + ",}", 8, nullptr},
      {"{" + a8, 8, nullptr},
      {"{'a':1}", 0, nullptr},
      {"{\"\xff\":{}}", 0, nullptr},
      {"{/**/}", 0, nullptr},
      // Things in the wrong place.
      {R"({"a":1})", 0, "F: a: 1, expected an object"},
      {R"({"a":null})", 0, "F: a: null, expected an object"},
      {R"({"a":[]})", 0, "F: a: an array, expected an object"},
      {R"({"__metadata__":{"x":1}})", 0, "F: __metadata__: 1, expected a string"},
      {R"({"__metadata__":[]})", 0, "F: __metadata__: an array, expected an object"},
      {R"({"__metadata__":{"x":"","x":""}})", 0, "F: __metadata__: duplicate key \"x\""},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "F: __metadata__: stands twice in the header"},
      // Fields.
      {"{" + a8 + "," + a8 + "}", 8, "F: a: stands twice in the header"},
      {R"({"a":{"dtype":"F32","dtype":"F32"}})", 0, "F: a: duplicate field \"dtype\""},
      {R"({"a":{"shape":[],"shape":[]}})", 0, "F: a: duplicate field \"shape\""},
      {R"({"a":{"data_offsets":[0,0],"data_offsets":[0,0]}})", 0, "F: a: duplicate field \"data_offsets\""},
      {R"({"a":{"stride":[1]}})", 0, "F: a: unknown field \"stride\""},
      {R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8, "F: a: dtype is missing"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8, "F: a: shape is missing"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", 8, "F: a: data_offsets is missing"},
      {R"({"a":{}})", 0, "F: a: dtype is missing"},
      {R"({"a":{"dtype":3}})", 0, "F: a: 3, expected a string in dtype"},
      {R"({"a":{"dtype":"F4"}})", 0, "F: a: unknown dtype \"F4\""},
      {R"({"a":{"dtype":"f32"}})", 0, "F: a: unknown dtype \"f32\""},
      // Shapes.
      {R"({"a":{"shape":2}})", 0, "F: a: 2, expected an array in shape"},
      {R"({"a":{"shape":[[2]]}})", 0, "F: a: an array, expected at most 8 sizes below 2^63 in shape"},
      {R"({"a":{"shape":[-1]}})", 0, "F: a: -1, expected at most 8 sizes below 2^63 in shape"},
      {R"({"a":{"shape":[2.0]}})", 0, "F: a: 2.0, expected at most 8 sizes below 2^63 in shape"},
      {R"({"a":{"shape":[2e0]}})", 0, "F: a: 2e0, expected at most 8 sizes below 2^63 in shape"},
      {R"({"a":{"shape":["2"]}})", 0, "F: a: \"2\", expected at most 8 sizes below 2^63 in shape"},
      {R"({"a":{"shape":[9223372036854775808]}})", 0,
       "F: a: 9223372036854775808, expected at most 8 sizes below 2^63 in shape"},
      {R"({"a":{"shape":[18446744073709551616]}})", 0,
       "F: a: 18446744073709551616, expected at most 8 sizes below 2^63 in shape"},
      {R"({"a":{"shape":[1,1,1,1,1,1,1,1,1]}})", 0, "F: a: 1, expected at most 8 sizes below 2^63 in shape"},
      {R"({"a":{"dtype":"F32","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0,
       "F: a: shape [2305843009213693952]: its size overflows 63 bits"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "F: a: shape [4294967296, 4294967296]: its size overflows 63 bits"},
      {R"({"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "F: a: shape [0, 4294967296, 4294967296]: its size overflows 63 bits"},
      // Offsets.
      {R"({"a":{"data_offsets":{}}})", 0, "F: a: an object, expected an array in data_offsets"},
      {R"({"a":{"data_offsets":[0]}})", 0,
       "F: a: the end of an array, expected two offsets below 2^63 in data_offsets"},
      {R"({"a":{"data_offsets":[0,1,2]}})", 0, "F: a: 2, expected two offsets below 2^63 in data_offsets"},
      {R"({"a":{"data_offsets":[-8,0]}})", 0, "F: a: -8, expected two offsets below 2^63 in data_offsets"},
      {R"({"a":{"data_offsets":[0,9223372036854775808]}})", 0,
       "F: a: 9223372036854775808, expected two offsets below 2^63 in data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8,
       "F: a: data_offsets [8, 0], expected begin <= end"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}})", 8,
       "F: a: data_offsets [0, 7] span 7 bytes, expected 8 for F32 [2]"},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,8]}})", 8,
       "F: a: data_offsets [0, 8] span 8 bytes, expected 4 for F32 []"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7,
       "F: a: data_offsets [0, 8], but the file has only 7 bytes of data"},
      {R"({"a":{"dtype":"U8","shape":[)" + max + R"(],"data_offsets":[0,)" + max + "]}}", 8,
       "F: a: data_offsets [0, 9223372036854775807], but the file has only 8 bytes of data"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[9223372036854775806,)" + max + "]}}", 8,
       "F: a: data_offsets [9223372036854775806, 9223372036854775807], but the file has only 8 bytes of "
       "data"},
      // Coverage.
      {"{" + a8 + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8,
       "F: b: data_offsets [4, 8], expected to begin at 8: tensors overlap"},
      {"{" + a8 + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8,
       "F: b: data_offsets [0, 8], expected to begin at 8: tensors overlap"},
      {"{" + a8 + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[9,13]}})", 13,
       "F: b: data_offsets [9, 13], expected to begin at 8: tensors leave a hole"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5,
       "F: a: data_offsets [1, 5], expected to begin at 0: tensors leave a hole"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[3,3]}})", 5,
       "F: a: data_offsets [3, 3], expected to begin at 0: tensors leave a hole"},
      {"{" + a8 + "}", 9, "F: the file has 9 bytes of data, expected 8"},
      {"{}", 1, "F: the file has 1 bytes of data, expected 0"},
      // Names are escaped in messages.
      {R"({"a\nb":1})", 0, "F: a\\x0ab: 1, expected an object"},
  };
  for (const Refusal& refusal : refusals) {
    const std::string message =
        message_of(stored_file(refusal.header, std::string(refusal.data_bytes, '\0')));
    if (refusal.message != nullptr) {
      EXPECT_EQ(message, refusal.message) << refusal.header;
    } else {
      EXPECT_TRUE(message.starts_with("F: not JSON at byte ")) << message;
    }
  }
}

TEST(SafetensorsTest, EmptyTensorsMayStandAnywhereInOrder) {
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
      R"("c":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})";
  EXPECT_EQ(message_of(stored_file(header, "xy")), "OK");
}

// Neither depth nor length of a hostile header costs stack or much memory.
TEST(SafetensorsTest, DeepAndLongHeaders) {
  EXPECT_EQ(message_of(stored_file("{\"a\":" + std::string(1'000'000, '['), "")),
            "F: a: an array, expected an object");
  const std::string name(1'000'000, 'x');
  EXPECT_EQ(message_of(stored_file("{\"" + name + "\":1}", "")),
            "F: " + std::string(200, 'x') + "...: 1, expected an object");
  EXPECT_LT(message_of(stored_file("{\"" + name, "")).size(), 300u);
  EXPECT_EQ(message_of(stored_file("{}" + std::string(1'000'000, ' '), "")), "OK");
}

}  // namespace
}  // namespace slipstream::model
