#include "model/tokenizer.h"

#include <array>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "common/crc32c.h"

namespace slipstream::model {
namespace {

// Ids 256, 257 .. in this order. Checkpoints trained on bytes depend on it: append only.
constexpr std::array<std::string_view, 17> kByteSpecials = {
    "<|endoftext|>", "<|user|>",    "<|observation|>", "<|assistant|>",   "<|system|>",      "[gMASK]",
    "<sop>",         "<think>",     "</think>",        "<tool_call>",     "</tool_call>",    "<arg_key>",
    "</arg_key>",    "<arg_value>", "</arg_value>",    "<tool_response>", "</tool_response>"};
constexpr int32_t kNumBytes = 256;

class ByteTokenizer : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids(text.size());
    for (size_t i = 0; i < text.size(); ++i) ids[i] = static_cast<unsigned char>(text[i]);
    return ids;
  }

  std::string decode(absl::Span<const int32_t> ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) {
      if (id < 0) continue;
      if (id < kNumBytes) {
        text.push_back(static_cast<char>(id));
      } else if (id < vocab_size()) {
        text.append(kByteSpecials[static_cast<size_t>(id - kNumBytes)]);
      }
    }
    return text;
  }

  absl::StatusOr<int32_t> special(std::string_view spelling) const override {
    for (size_t i = 0; i < kByteSpecials.size(); ++i) {
      if (kByteSpecials[i] == spelling) return kNumBytes + static_cast<int32_t>(i);
    }
    return absl::NotFoundError(absl::StrCat("tokenizer \"bytes\": no special token \"",
                                            absl::string_view(spelling.data(), spelling.size()), "\""));
  }

  int64_t vocab_size() const override { return kNumBytes + static_cast<int64_t>(kByteSpecials.size()); }

  std::string fingerprint() const override {
    std::string table;
    for (const std::string_view spelling : kByteSpecials) table.append(spelling).push_back('\0');
    return absl::StrFormat("bytes-%08x", crc32c(table));
  }
};

bool holds_tokenizer_json(const std::string& spec) {
  if (absl::EndsWith(spec, ".json")) return true;
  std::error_code error;
  return std::filesystem::exists(std::filesystem::path(spec) / "tokenizer.json", error);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> open_tokenizer(const std::string& spec) {
  if (spec == "bytes") return std::make_unique<ByteTokenizer>();
  if (holds_tokenizer_json(spec)) {
    return absl::UnimplementedError(
        absl::StrCat("tokenizer \"", spec, "\": tokenizer.json files are not read yet, expected \"bytes\""));
  }
  return absl::NotFoundError(absl::StrCat("tokenizer \"", spec, "\": unknown, expected \"bytes\""));
}

}  // namespace slipstream::model
