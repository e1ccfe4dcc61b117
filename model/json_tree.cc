#include "model/json_tree.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace slipstream::model {
namespace {

using nlohmann::ordered_json;

// Copying, comparing and printing a tree recurse: a text of nothing but brackets must not decide how deep.
constexpr size_t kDepthMax = 100;

// Accepts what parse_json_tree accepts, and builds nothing; returning false ends the parse.
class TreeCheck : public nlohmann::json_sax<ordered_json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(); }
  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    const std::string quoted = ordered_json(name).dump(-1, ' ', true, ordered_json::error_handler_t::replace);
    what = absl::StrCat(quoted.substr(0, 80), ": stands twice in one object");
    return false;
  }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

  std::string what = "is not valid JSON";  // why the parse ended, if it did

 private:
  bool open() {
    keys_.emplace_back();
    if (keys_.size() <= kDepthMax) return true;
    what = absl::StrCat("expected at most ", kDepthMax, " levels of nesting");
    return false;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of the objects around the place being read
};

}  // namespace

absl::StatusOr<ordered_json> parse_json_tree(std::string_view text) {
  TreeCheck check;
  // The lexer takes a NUL for the end of the text and skips a byte-order mark: both would pass as JSON here
  // and be none where the text itself is passed on.
  const bool hidden = text.find('\0') != std::string_view::npos || text.substr(0, 3) == "\xef\xbb\xbf";
  if (hidden || !ordered_json::sax_parse(text.begin(), text.end(), &check)) {
    return absl::InvalidArgumentError(check.what);
  }
  ordered_json tree = ordered_json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (tree.is_discarded()) return absl::InvalidArgumentError(check.what);
  return tree;
}

}  // namespace slipstream::model
