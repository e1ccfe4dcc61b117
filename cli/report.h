#pragma once
#include <string>
#include "common/status.h"
namespace slipstream::cli { absl::Status write_report(const std::string& run, const std::string& out); }
