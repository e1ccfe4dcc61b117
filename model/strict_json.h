// JSON read event by event, and its strings written. The reader (nlohmann's SAX interface) neither throws nor
// builds a tree, so a hostile document costs no more memory than what a handler keeps. Private to this
// folder's .cc files: slow to compile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "model/stored_dtype.h"
#include "nlohmann/json.hpp"

namespace slipstream::model {

// Refuses every event; a document's handler overrides those that it has a place for, and calls the base where
// they stand in the wrong place.
class StrictJson : public nlohmann::json_sax<nlohmann::json> {
 public:
  // InvalidArgument: text is no JSON object in UTF-8, or the handler refused something in it.
  absl::Status parse(std::string_view text) {
    // The lexer skips a byte-order mark and takes a NUL for the end of the text: both would hide what
    // follows.
    if (text.empty() || text[0] != '{') return fail("not a JSON object");
    if (text.find('\0') != std::string_view::npos) return fail("a NUL byte, expected JSON");
    const bool parsed = nlohmann::json::sax_parse(text.data(), text.data() + text.size(), this);
    if (!parsed && status_.ok()) return fail("not JSON");
    return status_;
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(int64_t value) override { return unexpected(absl::StrCat(value)); }
  bool number_unsigned(uint64_t value) override { return unexpected(absl::StrCat(value)); }
  bool number_float(double, const std::string& text) override { return unexpected(printable(text)); }
  bool string(std::string& value) override { return unexpected(absl::StrCat("\"", printable(value), "\"")); }
  bool binary(nlohmann::json::binary_t&) override { return unexpected("binary"); }
  bool start_object(std::size_t) override { return unexpected("an object"); }
  bool key(std::string& name) override { return unexpected(absl::StrCat("key \"", printable(name), "\"")); }
  bool end_object() override { return unexpected("the end of an object"); }
  bool start_array(std::size_t) override { return unexpected("an array"); }
  bool end_array() override { return unexpected("the end of an array"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& e) override {
    // The library's text starts with an id in brackets: "[json.exception.parse_error.101] parse error at
    // ...".
    const std::string_view text = e.what();
    return refuse(absl::StrCat("not JSON at byte ", position, ": ",
                               printable(text.substr(std::min(text.size(), text.find("] ") + 2)))));
  }

 protected:
  // Records what is wrong and stops the parser.
  bool refuse(std::string_view message) {
    status_ = fail(message);
    return false;
  }
  // refuse() with the place where the handler stands and what it expects there.
  virtual bool unexpected(std::string_view found) = 0;

 private:
  static absl::Status fail(std::string_view message) {
    return absl::InvalidArgumentError(absl::string_view(message.data(), message.size()));
  }
  absl::Status status_;
};

// The text as a JSON string, in its quotes; nothing if it is not UTF-8.
inline std::optional<std::string> to_json_string(std::string_view text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace slipstream::model
