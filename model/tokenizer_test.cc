// Goal: bytes are their own ids, special tokens have fixed ids that no text can reach, and decode undoes
// encode.
#include "model/tokenizer.h"

#include "gtest/gtest.h"

namespace slipstream::model {
namespace {

TEST(ByteTokenizerTest, EveryByteIsItsOwnId) {
  const auto tokenizer = open_tokenizer("bytes").value();
  std::string text;
  for (int i = 0; i < 256; ++i) text.push_back(static_cast<char>(i));
  const std::vector<int32_t> ids = tokenizer->encode(text);
  ASSERT_EQ(ids.size(), 256u);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(ids[static_cast<size_t>(i)], i);
  EXPECT_EQ(tokenizer->decode(ids), text);
}

// Checkpoints depend on these numbers.
TEST(ByteTokenizerTest, SpecialTokensHaveFixedIds) {
  const auto tokenizer = open_tokenizer("bytes").value();
  const char* spellings[] = {
      "<|endoftext|>", "<|user|>",    "<|observation|>", "<|assistant|>",   "<|system|>",      "[gMASK]",
      "<sop>",         "<think>",     "</think>",        "<tool_call>",     "</tool_call>",    "<arg_key>",
      "</arg_key>",    "<arg_value>", "</arg_value>",    "<tool_response>", "</tool_response>"};
  int32_t id = 256;
  for (const char* spelling : spellings) {
    EXPECT_EQ(tokenizer->special(spelling).value(), id) << spelling;
    EXPECT_EQ(tokenizer->decode({id}), spelling);
    for (const int32_t each : tokenizer->encode(spelling)) EXPECT_LT(each, 256);
    ++id;
  }
  EXPECT_EQ(tokenizer->vocab_size(), id);
  const auto missing = tokenizer->special("<|image|>");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find("<|image|>"), absl::string_view::npos);
}

TEST(ByteTokenizerTest, IdsOutsideTheVocabularyGiveNothing) {
  const auto tokenizer = open_tokenizer("bytes").value();
  EXPECT_EQ(tokenizer->decode({'a', -1, INT32_MIN, 273, INT32_MAX, 'b'}), "ab");
  EXPECT_EQ(tokenizer->decode({}), "");
}

TEST(OpenTokenizerTest, SaysWhatItCannotOpen) {
  const auto file = open_tokenizer("checkpoint/tokenizer.json");
  EXPECT_EQ(file.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(file.status().message().find("checkpoint/tokenizer.json"), absl::string_view::npos);
  EXPECT_EQ(open_tokenizer("words").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(open_tokenizer("").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace slipstream::model
