#include "cli/report_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/report_data.h"

namespace slipstream::cli {
namespace {

constexpr double kWidth = 600, kHeight = 210, kLeft = 52, kRight = 12, kTop = 10,
                 kBottom = 26;      // of a line chart
constexpr size_t kPointsMax = 300;  // a series is averaged down to this many
constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

std::string coordinate(double value) { return absl::StrFormat("%.1f", value); }

std::string in_unit(double value, Unit unit) {
  return unit == Unit::kPercent ? percent(value) : short_number(value);
}

// 1, 2 or 5 times a power of ten, so that about four steps cover `span`.
double tick_step(double span) {
  const double rough = span / 4, power = std::pow(10.0, std::floor(std::log10(rough)));
  const double scaled = rough / power;
  return (scaled <= 1 ? 1 : scaled <= 2 ? 2 : scaled <= 5 ? 5 : 10) * power;
}

struct Axis {
  double low = 0, high = 1, step = 0.25;
};

Axis axis_of(const std::vector<Series>& series, bool from_zero) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const Series& one : series) {
    for (const double y : one.y) {
      if (!std::isfinite(y)) continue;
      low = std::min(low, y);
      high = std::max(high, y);
    }
  }
  if (low > high) return {};
  if (from_zero) low = std::min(low, 0.0), high = std::max(high, 0.0);
  if (high - low < 1e-12 * std::max(1.0, std::abs(high))) high = low + (low == 0 ? 1 : std::abs(low));
  const double step = tick_step(high - low);
  return {std::floor(low / step + 1e-9) * step, std::ceil(high / step - 1e-9) * step, step};
}

// One value for every `per_point` steps.
std::vector<double> thinned(const Series& series, size_t per_point) {
  std::vector<double> out;
  for (size_t i = 0; i < series.y.size(); i += per_point) {
    const size_t end = std::min(series.y.size(), i + per_point);
    double value = mean_of(series.y, i, end);
    for (size_t j = i; series.peak && j < end; ++j) {
      if (series.y[j] > value) value = series.y[j];  // false for NaN
    }
    out.push_back(value);
  }
  return out;
}

// A line through what is not missing; a value between two gaps is a dot.
std::string path_of(const std::vector<double>& xs, const std::vector<double>& ys,
                    const std::string& classes) {
  std::string path, dots;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (!std::isfinite(ys[i])) continue;
    const bool before = i > 0 && std::isfinite(ys[i - 1]),
               after = i + 1 < xs.size() && std::isfinite(ys[i + 1]);
    if (!before && !after) {
      absl::StrAppend(&dots, "<circle class=\"dot ", classes, "\" cx=\"", coordinate(xs[i]), "\" cy=\"",
                      coordinate(ys[i]), "\" r=\"1.8\"/>");
    } else {
      absl::StrAppend(&path, before ? "L" : "M", coordinate(xs[i]), " ", coordinate(ys[i]));
    }
  }
  return path.empty() ? dots : absl::StrCat("<path class=\"line ", classes, "\" d=\"", path, "\"/>", dots);
}

std::string legend(const std::vector<std::string>& names, const std::vector<std::string>& colours) {
  std::string out = "<div class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i) {
    absl::StrAppend(&out, "<span><i class=\"", colours[i], "\"></i>", escape(names[i]), "</span>");
  }
  return out + "</div>";
}

std::string text(double x, double y, const char* anchor, const std::string& content) {
  return absl::StrCat("<text x=\"", coordinate(x), "\" y=\"", coordinate(y), "\" text-anchor=\"", anchor,
                      "\">", content, "</text>");
}

std::string colour_of(size_t index) { return absl::StrCat("c", 1 + index % 6); }

std::string empty_chart(const std::string& title, const std::string& explanation) {
  return absl::StrCat("<figure><figcaption><b>", escape(title), "</b><span>", escape(explanation),
                      "</span></figcaption><p class=\"none\">Nothing recorded.</p></figure>\n");
}

}  // namespace

double mean_of(const std::vector<double>& values, size_t begin, size_t end) {
  double sum = 0;
  size_t count = 0;
  for (size_t i = begin; i < std::min(end, values.size()); ++i) {
    if (!std::isfinite(values[i])) continue;
    sum += values[i];
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : kMissing;
}

std::string short_number(double value) {
  const double size = std::abs(value);
  if (!std::isfinite(value)) return "-";
  if (size == 0) return "0";
  if (size >= 1e9) return absl::StrFormat("%.3gG", value / 1e9);
  if (size >= 1e6) return absl::StrFormat("%.3gM", value / 1e6);
  if (size >= 1e4) return absl::StrFormat("%.3gk", value / 1e3);
  if (size >= 1e3) return absl::StrFormat("%.0f", value);
  if (size < 1e-3) return absl::StrFormat("%.1e", value);
  return absl::StrFormat("%.3g", value);
}

std::string percent(double share) {
  if (!std::isfinite(share)) return "-";
  const double value = 100 * share;
  return absl::StrFormat(std::abs(value) >= 10 || value == 0 ? "%.0f %%"
                         : std::abs(value) >= 0.1            ? "%.1f %%"
                                                             : "%.2g %%",
                         value);
}

std::string duration(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole >= 3600) return absl::StrCat(whole / 3600, " h ", whole % 3600 / 60, " min");
  if (whole >= 60) return absl::StrCat(whole / 60, " min ", whole % 60, " s");
  return absl::StrFormat(seconds < 10 ? "%.1f s" : "%.0f s", seconds);
}

std::string escape(std::string_view raw) {
  std::string out;
  for (const char c : valid_utf8(raw)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '\n':
      case '\t':
        out += c;
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          out += absl::StrFormat("\\x%02x", static_cast<unsigned char>(c));
        } else {
          out += c;
        }
    }
  }
  return out;
}

std::string render(const LineChart& chart, const std::vector<int64_t>& steps, const std::vector<bool>& warmup,
                   nlohmann::json* hover) {
  bool any = false;
  for (const Series& series : chart.series) {
    any |= std::any_of(series.y.begin(), series.y.end(), [](double y) { return std::isfinite(y); });
  }
  if (!any) return empty_chart(chart.title, chart.explanation);

  const size_t per_point = (steps.size() + kPointsMax - 1) / kPointsMax;
  const double first = static_cast<double>(steps.front()),
               span = std::max(1.0, static_cast<double>(steps.back()) - first);
  const auto x_of = [&](double step) { return kLeft + (step - first) / span * (kWidth - kLeft - kRight); };
  std::vector<Series> series = chart.series;
  for (Series& one : series) one.y = thinned(one, per_point);
  const Axis axis = axis_of(series, chart.from_zero);
  const auto y_of = [&](double y) {
    return kTop + (axis.high - y) / (axis.high - axis.low) * (kHeight - kTop - kBottom);
  };

  std::string svg = absl::StrCat("<svg viewBox=\"0 0 ", kWidth, " ", kHeight, "\" role=\"img\" aria-label=\"",
                                 escape(chart.title), "\" data-hover=\"", hover->size(), "\">");
  const auto rl = static_cast<size_t>(std::find(warmup.begin(), warmup.end(), false) - warmup.begin());
  if (rl > 0) {
    const double end =
        rl < steps.size() ? x_of((static_cast<double>(steps[rl - 1] + steps[rl])) / 2) : kWidth - kRight;
    absl::StrAppend(&svg, "<rect class=\"warmup\" x=\"", coordinate(kLeft), "\" y=\"", coordinate(kTop),
                    "\" width=\"", coordinate(end - kLeft), "\" height=\"",
                    coordinate(kHeight - kTop - kBottom), "\"/>");
    if (end - kLeft > 54) svg += text(kLeft + 5, kTop + 13, "start", "warm-up");
  }
  for (int i = 0; axis.low + i * axis.step <= axis.high + axis.step / 2; ++i) {
    const double value = axis.low + i * axis.step, shown = std::abs(value) < axis.step / 1e6 ? 0 : value;
    absl::StrAppend(&svg, "<path class=\"grid\" d=\"M", coordinate(kLeft), " ", coordinate(y_of(value)), "H",
                    coordinate(kWidth - kRight), "\"/>",
                    text(kLeft - 7, y_of(value) + 4, "end", in_unit(shown, chart.unit)));
  }
  const double x_step = std::max(1.0, tick_step(span));
  for (double tick = std::ceil((first + 0.04 * span) / x_step) * x_step; tick <= first + span + 1e-9;
       tick += x_step) {
    svg += text(x_of(tick), kHeight - 8, tick > first + 0.97 * span ? "end" : "middle",
                absl::StrFormat("%.0f", tick));
  }
  svg += text(kLeft - 7, kHeight - 8, "end", "step");
  std::vector<double> xs, shown_steps;
  for (size_t i = 0; i < steps.size(); i += per_point) {
    const size_t last = std::min(steps.size(), i + per_point) - 1;
    shown_steps.push_back(static_cast<double>(steps[i] + steps[last]) / 2);
    xs.push_back(x_of(shown_steps.back()));
  }
  nlohmann::json data = {{"x", nlohmann::json::array()},
                         {"steps", nlohmann::json::array()},
                         {"series", nlohmann::json::array()},
                         {"left", kLeft},
                         {"width", kWidth},
                         {"top", kTop},
                         {"bottom", kHeight - kBottom}};
  for (size_t i = 0; i < xs.size(); ++i) {
    data["x"].push_back(std::round(xs[i] * 10) / 10);
    data["steps"].push_back(std::llround(shown_steps[i]));
  }
  std::vector<std::string> names, colours;
  size_t strong = 0;
  for (const Series& one : series) {
    // Faint ones share the colour of what follows them.
    const std::string colour = colour_of(strong);
    if (!one.faint) {
      ++strong;
      names.push_back(one.name);
      colours.push_back(colour);
    }
    std::vector<double> ys;
    nlohmann::json values = nlohmann::json::array();
    for (const double y : one.y) {
      ys.push_back(y_of(y));
      values.push_back(std::isfinite(y) ? nlohmann::json(in_unit(y, chart.unit)) : nlohmann::json(nullptr));
    }
    svg += path_of(xs, ys, one.faint ? colour + " faint" : colour);
    data["series"].push_back(
        {{"name", valid_utf8(one.name)}, {"colour", colour}, {"values", std::move(values)}});
  }
  hover->push_back(std::move(data));
  return absl::StrCat("<figure><figcaption><b>", escape(chart.title), "</b><span>", escape(chart.explanation),
                      "</span></figcaption>", names.size() > 1 ? legend(names, colours) : "", svg,
                      "<path class=\"cursor\" d=\"\"/></svg></figure>\n");
}

std::string render(const LaneChart& chart) {
  constexpr double kWide = 1220, kLabel = 120, kLane = 54, kGap = 14, kFoot = 26;
  const double height = static_cast<double>(chart.lanes.size()) * (kLane + kGap) + kFoot;
  const double wall = chart.wall_seconds.empty() ? 0 : chart.wall_seconds.back();
  if (!(wall > 0)) return "<p class=\"none\">Nothing recorded.</p>\n";
  const auto x_of = [&](double seconds) { return kLabel + seconds / wall * (kWide - kLabel - 12); };
  std::string svg = absl::StrCat("<svg class=\"lanes\" viewBox=\"0 0 ", kWide, " ", height,
                                 "\" role=\"img\" aria-label=\"who waits for whom\">");
  std::vector<std::string> names, colours;
  for (size_t l = 0; l < chart.lanes.size(); ++l) {
    const Lane& lane = chart.lanes[l];
    const double top = static_cast<double>(l) * (kLane + kGap);
    absl::StrAppend(&svg, "<rect class=\"lane\" x=\"", coordinate(kLabel), "\" y=\"", coordinate(top),
                    "\" width=\"", coordinate(kWide - kLabel - 12), "\" height=\"", coordinate(kLane), "\"/>",
                    "<text class=\"lane-name\" x=\"0\" y=\"", coordinate(top + kLane / 2 + 4), "\">",
                    escape(lane.name), "</text>");
    for (size_t p = 0; p < lane.parts.size(); ++p) {
      const auto known = std::find(colours.begin(), colours.end(), lane.colours[p]);
      if (known == colours.end()) {
        names.push_back(lane.parts[p]);
        colours.push_back(lane.colours[p]);
      } else if (std::string& name = names[static_cast<size_t>(known - colours.begin())];
                 name.find(lane.parts[p]) == std::string::npos) {
        name += ", " + lane.parts[p];
      }
    }
    for (size_t i = 0; i < lane.shares.size(); ++i) {
      const double begin = x_of(i == 0 ? 0 : chart.wall_seconds[i - 1]), end = x_of(chart.wall_seconds[i]);
      double bottom = top + kLane;
      std::string bars, tip = absl::StrCat(escape(lane.name), ", to ", duration(chart.wall_seconds[i]));
      for (size_t p = 0; p < lane.parts.size(); ++p) {
        const double share = lane.shares[i][p];
        if (!(share > 0)) continue;
        bottom -= share * kLane;
        absl::StrAppend(&bars, "<rect class=\"", lane.colours[p], "\" x=\"", coordinate(begin), "\" y=\"",
                        coordinate(bottom), "\" width=\"",
                        coordinate(std::max(0.5, end - begin - (end - begin > 4 ? 1 : 0))), "\" height=\"",
                        coordinate(share * kLane), "\"/>");
        absl::StrAppend(&tip, "&#10;", escape(lane.parts[p]), " ", percent(share));
      }
      absl::StrAppend(&svg, "<g data-t=\"", tip, "\">", bars, "</g>");
    }
  }
  const double step = tick_step(wall);
  for (double tick = 0; tick <= wall * (1 + 1e-9); tick += step) {
    svg += text(x_of(tick), height - 8,
                tick == 0            ? "start"
                : tick > 0.97 * wall ? "end"
                                     : "middle",
                duration(tick));
  }
  return legend(names, colours) + svg + "</svg>\n";
}

}  // namespace slipstream::cli
