#include "common/log.h"

#include "spdlog/sinks/basic_file_sink.h"
#include "spdlog/sinks/null_sink.h"
#include "spdlog/sinks/stdout_sinks.h"

namespace slipstream {

absl::StatusOr<Logger> make_logger(const std::string& role, const std::string& directory) {
  auto console = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  console->set_level(spdlog::level::warn);
  console->set_pattern("slipstream %n: %l: %v");
  std::vector<spdlog::sink_ptr> sinks = {console};
  if (!directory.empty()) {
    const std::string path = directory + "/" + role + ".log";
    try {
      auto file = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
      file->set_pattern("%Y-%m-%dT%H:%M:%S.%f %L %v");
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
