// Text to token ids and back. Ids come from the tokenizer's own table, never from constants elsewhere.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "common/status.h"

namespace slipstream::model {

// Immutable; any number of threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Ids of ordinary text: the spelling of a special token in it is ordinary text too.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // Bytes of the ids, special tokens by their spelling; ids outside the vocabulary give nothing. A token may hold part of a
  // character, so the result need not be valid UTF-8.
  virtual std::string decode(absl::Span<const int32_t> ids) const = 0;
  // NotFound: names the token.
  virtual absl::StatusOr<int32_t> special(std::string_view spelling) const = 0;
  virtual int64_t vocab_size() const = 0;
  virtual std::string fingerprint() const = 0;  // differs when any id would
};

// "bytes": ids 0..255 are bytes, 256.. the special tokens of the GLM chat format in a fixed order, <|endoftext|> first.
// Unimplemented: a tokenizer.json (not read yet). NotFound: anything else.
absl::StatusOr<std::unique_ptr<Tokenizer>> open_tokenizer(const std::string& spec);

}  // namespace slipstream::model
