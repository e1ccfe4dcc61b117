// Charts of the report: lines over steps and stacked bars over wall time. Curves and bars are SVG that stretches with the
// page, words around them are HTML that does not: both stay readable on a telephone. Colours come from the page's style
// sheet (classes c1 .. c6), so that they follow light and dark.
#pragma once

#include <string>
#include <vector>

#include "cli/report_column.h"
#include "nlohmann/json.hpp"

namespace slipstream::cli {

enum class Unit { kNumber, kPercent };

struct Series {
  std::string name;
  Column y;               // NaN: a gap
  bool faint = false;     // behind the others, for raw values under a mean
  bool peak = false;      // many steps in one point: show the largest, not the mean
};

struct LineChart {
  std::string title;
  std::string explanation;  // one sentence for someone who does not know the words
  std::vector<Series> series;
  Unit unit = Unit::kNumber;
  bool from_zero = true;
  bool cut_peaks = false;  // a few values far above all others, which would flatten the rest: they end at the top, and the
                           // figure says how far they go
};

// A whole <figure>. `warmup` marks steps of the warm-up phase. What hovering shows is appended to *hover, which the page's
// script reads by the figure's position in it.
std::string render(const LineChart& chart, const std::vector<int64_t>& steps, const std::vector<bool>& warmup,
                   nlohmann::json* hover);

// One lane of bars over wall time: in each interval the shares of `parts`, which sum to 1 at most.
struct Lane {
  std::string name;
  std::vector<std::string> parts;           // names; their colours are `colours`
  std::vector<std::string> colours;         // c1 .. c6
  std::vector<std::vector<double>> shares;  // [interval][part]
};
struct LaneChart {
  std::vector<double> wall_seconds;  // ends of the intervals; the first begins at 0
  std::vector<Lane> lanes;
};
std::string render(const LaneChart& chart);

// "12.3k", "0.52", "3.1e-05".
std::string short_number(double value);
std::string percent(double share);     // 0.123 -> "12.3 %"
std::string duration(double seconds);  // "4 min 12 s", "1 h 20 min", "3.1 s", "20 s"
// Text inside an element or a quoted attribute. Control characters become visible; invalid UTF-8 becomes
// U+FFFD.
std::string escape(std::string_view text);

}  // namespace slipstream::cli
