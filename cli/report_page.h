// The report's page: one HTML document that needs nothing else.
#pragma once

#include <string>

#include "cli/report_data.h"

namespace slipstream::cli {

std::string render_page(const RunData& run);
// One trajectory as a card: its facts and a strip of tokens (report_strip.cc).
std::string render_trajectory(const nlohmann::json& trajectory);

extern const char kReportPage[];  // report_page.html.in: {{TITLE}}, {{BODY}} and {{HOVER}} are filled in

}  // namespace slipstream::cli
