#include "common/log.h"

#include "absl/strings/str_format.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/basic_file_sink.h"
#include "spdlog/sinks/null_sink.h"
#include "spdlog/sinks/stdout_sinks.h"

namespace slipstream {
namespace {

// Bytes of the UTF-8 character that begins `text`; 0: none does. Overlong forms and surrogates pass: a terminal shows them as
// unknown characters, which is no harm.
size_t utf8_length(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text[0]);
  const size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return 0;
  }
  return length;
}

// The message of a pattern, as %*.
class OneLine final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& out) override {
    const std::string text = one_line({message.payload.data(), message.payload.size()});
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<OneLine>(); }
};

std::unique_ptr<spdlog::formatter> pattern(const char* text) {
  auto out = std::make_unique<spdlog::pattern_formatter>();
  out->add_flag<OneLine>('*').set_pattern(text);
  return out;
}

}  // namespace

std::string one_line(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const auto byte = static_cast<unsigned char>(text[0]);
    if (length == 0 || byte < ' ' || byte == 0x7f) {
      out += byte == '\n' ? "\\n" : byte == '\t' ? "\\t" : absl::StrFormat("\\x%02x", byte);
      text.remove_prefix(1);
    } else {
      out += text.substr(0, length);
      text.remove_prefix(length);
    }
  }
  return out;
}

absl::StatusOr<Logger> make_logger(const std::string& role, const std::string& directory) {
  auto console = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  console->set_level(spdlog::level::warn);
  console->set_formatter(pattern("slipstream %n: %l: %*"));
  std::vector<spdlog::sink_ptr> sinks = {console};
  if (!directory.empty()) {
    const std::string path = directory + "/" + role + ".log";
    try {
      auto file = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
      file->set_formatter(pattern("%Y-%m-%dT%H:%M:%S.%f %L %*"));
      sinks.push_back(file);
    } catch (const spdlog::spdlog_ex& error) {
      return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be written: ", error.what()));
    }
  }
  auto logger = std::make_shared<spdlog::logger>(role, sinks.begin(), sinks.end());
  logger->flush_on(spdlog::level::info);
  return logger;
}

Logger quiet_logger() {
  return std::make_shared<spdlog::logger>("quiet", std::make_shared<spdlog::sinks::null_sink_mt>());
}

}  // namespace slipstream
