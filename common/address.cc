#include "common/address.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace slipstream {
namespace {

bool is_printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c < 127; });
}

// For a message, whatever it holds.
std::string quoted(std::string_view text) {
  const std::string_view shown = text.substr(0, kNameBytesMax);
  return absl::StrCat("\"", absl::CHexEscape(absl::string_view(shown.data(), shown.size())),
                      shown.size() < text.size() ? "...\"" : "\"");
}

}  // namespace

std::string address_problem(std::string_view address, int least_port) {
  const std::string problem = absl::StrCat(quoted(address), ", expected host:port, port from ", least_port, " to 65535");
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return problem;
  std::string_view host = address.substr(0, colon);
  const bool bracketed = host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  const std::string_view forbidden = bracketed ? " /[]" : " /[]:";
  if (host.empty() || !is_printable(host) || host.find_first_of(forbidden) != std::string_view::npos) return problem;
  const std::string_view digits = address.substr(colon + 1);
  const bool number = !digits.empty() && digits.size() <= 5 &&
                      std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  int port = 0;
  if (!number || !absl::SimpleAtoi(absl::string_view(digits.data(), digits.size()), &port)) return problem;
  return port >= least_port && port <= 65'535 ? "" : problem;
}

std::string name_problem(std::string_view name) {
  if (name.empty() || name.size() > kNameBytesMax) {
    return absl::StrCat(name.size(), " bytes, expected 1 to ", kNameBytesMax);
  }
  return is_printable(name) ? "" : absl::StrCat(quoted(name), ", expected printable ASCII");
}

std::string file_name_problem(std::string_view name) {
  if (const std::string problem = name_problem(name); !problem.empty()) return problem;
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  });
  return plain && name[0] != '.' ? "" : absl::StrCat(quoted(name), ", expected letters, digits, '-', '_' and '.', not first");
}

}  // namespace slipstream
