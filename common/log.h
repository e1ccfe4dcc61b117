// Logs of a role: lines in runs/<id>/logs/<role>.log, warnings and errors also on stderr.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "common/status.h"
#include "spdlog/spdlog.h"

namespace slipstream {

using Logger = std::shared_ptr<spdlog::logger>;

// directory empty: stderr alone. Lines are on disk at once (a killed role loses none). PermissionDenied: the file cannot
// be written.
absl::StatusOr<Logger> make_logger(const std::string& role, const std::string& directory);
// Text from elsewhere on one line of a log or terminal: control characters as \n, \t or \x1b, bytes that are not UTF-8 as \xff.
// Loggers do this by themselves.
std::string one_line(std::string_view text);
// Drops everything; for tests.
Logger quiet_logger();

}  // namespace slipstream
