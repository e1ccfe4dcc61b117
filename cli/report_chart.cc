#include "cli/report_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/report_data.h"

namespace slipstream::cli {
namespace {

constexpr double kSide = 1000;      // of a chart's square of SVG units, whatever its size on the page
constexpr size_t kPointsMax = 300;  // a series is averaged down to this many

std::string coordinate(double value) { return absl::StrFormat("%.1f", value); }

std::string in_unit(double value, Unit unit) {
  return unit == Unit::kPercent ? percent(value) : short_number(value);
}

// 1, 2 or 5 times a power of ten, so that about `count` steps cover `span`.
double tick_step(double span, double count) {
  const double rough = span / count, power = std::pow(10.0, std::floor(std::log10(rough)));
  const double scaled = rough / power;
  return (scaled <= 1 ? 1 : scaled <= 2 ? 2 : scaled <= 5 ? 5 : 10) * power;
}

// The same in what clocks and calendars divide into.
double time_step(double seconds) {
  constexpr double kSteps[] = {1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10'800, 21'600, 43'200};
  for (const double step : kSteps) {
    if (step >= seconds / 6) return seconds < 6 ? tick_step(seconds, 6) : step;
  }
  return 86'400 * std::max(1.0, tick_step(seconds / 86'400, 6));
}

struct Axis {
  double low = 0, high = 1, step = 0.25;
  double beyond = std::nan("");  // the largest value above `high`; NaN: none
};

Axis axis_of(const std::vector<Series>& series, bool from_zero, bool cut_peaks) {
  double low = std::numeric_limits<double>::infinity(), high = -low, usual = -low;
  for (const Series& one : series) {
    for (const double y : one.y) {
      if (!std::isfinite(y)) continue;
      low = std::min(low, y);
      high = std::max(high, y);
    }
    if (const double most = quantile_of(one.y, 0.95); most > usual) usual = most;
  }
  if (low > high) return {};
  Axis out;
  if (cut_peaks && usual > 0 && high > 4 * usual) {
    out.beyond = high;
    high = 1.2 * usual;
  }
  if (from_zero) low = std::min(low, 0.0), high = std::max(high, 0.0);
  if (high - low < 1e-12 * std::max(1.0, std::abs(high))) high = low + (low == 0 ? 1 : std::abs(low));
  out.step = tick_step(high - low, 4);
  out.low = std::floor(low / out.step + 1e-9) * out.step;
  out.high = std::ceil(high / out.step - 1e-9) * out.step;
  return out;
}

// One value for every `per_point` steps.
Column thinned(const Series& series, size_t per_point) {
  Column out;
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

// A line through what is not missing; a value between two gaps is a dot (a line of no length, which has round ends).
std::string path_of(const Column& xs, const Column& ys, const std::string& classes) {
  std::string path;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (!std::isfinite(ys[i])) continue;
    const bool before = i > 0 && std::isfinite(ys[i - 1]);
    const bool after = i + 1 < xs.size() && std::isfinite(ys[i + 1]);
    absl::StrAppend(&path, before ? "L" : "M", coordinate(xs[i]), " ", coordinate(ys[i]),
                    before || after ? "" : "h0");
  }
  return path.empty() ? "" : absl::StrCat("<path class=\"line ", classes, "\" d=\"", path, "\"/>");
}

std::string legend(const std::vector<std::string>& names, const std::vector<std::string>& colours) {
  std::string out = "<div class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i) {
    absl::StrAppend(&out, "<span><i class=\"", colours[i], "\"></i>", escape(names[i]), "</span>");
  }
  return out + "</div>";
}

std::string colour_of(size_t index) { return absl::StrCat("c", 1 + index % 6); }

std::string caption(const LineChart& chart) {
  return absl::StrCat("<figure><figcaption><b>", escape(chart.title), "</b><span>", escape(chart.explanation),
                      "</span></figcaption>");
}

// A label on the axis below; those at the ends stay inside.
std::string below(double x, const std::string& content) {
  return absl::StrCat("<span class=\"x", x > 0.97 * kSide ? " last" : x < 0.02 * kSide ? " first" : "",
                      "\" style=\"left:", coordinate(100 * x / kSide), "%\">", content, "</span>");
}

bool is_empty(const LineChart& chart) {
  return std::all_of(chart.series.begin(), chart.series.end(),
                     [](const Series& one) { return std::isnan(last_of(one.y)); });
}

// Where steps and values lie in the square.
struct Plot {
  double first, span;
  Axis axis;
  double x_of(double step) const { return (step - first) / span * kSide; }
  double y_of(double y) const {
    return (axis.high - std::min(y, axis.high)) / (axis.high - axis.low) * kSide;  // NaN stays NaN
  }
};

// Grid lines into *svg, their labels into *labels.
void draw_axes(const Plot& plot, Unit unit, std::string* svg, std::string* labels) {
  const Axis& axis = plot.axis;
  for (int i = 0; axis.low + i * axis.step <= axis.high + axis.step / 2; ++i) {
    const double value = axis.low + i * axis.step, shown = std::abs(value) < axis.step / 1e6 ? 0 : value;
    const std::string y = coordinate(plot.y_of(value));
    absl::StrAppend(svg, "<path class=\"grid\" d=\"M0 ", y, "H", kSide, "\"/>");
    absl::StrAppend(labels, "<span class=\"y\" style=\"top:", coordinate(100 * plot.y_of(value) / kSide), "%\">",
                    in_unit(shown, unit), "</span>");
  }
  const double step = std::max(1.0, tick_step(plot.span, 6));
  for (double tick = std::ceil(plot.first / step) * step; tick <= plot.first + plot.span + 1e-9; tick += step) {
    if (tick > plot.first + 0.03 * plot.span) *labels += below(plot.x_of(tick), absl::StrFormat("%.0f", tick));
  }
  *labels += "<span class=\"y unit\">step</span>";
}

void draw_warmup(const Plot& plot, const std::vector<int64_t>& steps, const std::vector<bool>& warmup, std::string* svg,
                 std::string* labels) {
  const auto rl = static_cast<size_t>(std::find(warmup.begin(), warmup.end(), false) - warmup.begin());
  if (rl == 0) return;
  const double end = rl < steps.size() ? plot.x_of(static_cast<double>(steps[rl - 1] + steps[rl]) / 2) : kSide;
  absl::StrAppend(svg, "<rect class=\"warmup\" x=\"0\" y=\"0\" width=\"", coordinate(end), "\" height=\"", kSide,
                  "\"/>");
  if (end > 0.25 * kSide) *labels += "<span class=\"note\">warm-up</span>";
}

}  // namespace

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
  const auto two = [](int64_t large, const char* unit, int64_t small, const char* small_unit) {
    return small == 0 ? absl::StrCat(large, unit) : absl::StrCat(large, unit, " ", small, small_unit);
  };
  if (whole >= 3600) return two(whole / 3600, " h", whole % 3600 / 60, " min");
  if (whole >= 60) return two(whole / 60, " min", whole % 60, " s");
  return absl::StrFormat(seconds < 10 && seconds != std::floor(seconds) ? "%.1f s" : "%.0f s", seconds);
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
  if (is_empty(chart)) return caption(chart) + "<p class=\"none\">Nothing recorded.</p></figure>\n";
  const size_t per_point = (steps.size() + kPointsMax - 1) / kPointsMax;
  std::vector<Series> series = chart.series;
  for (Series& one : series) one.y = thinned(one, per_point);
  const auto first = static_cast<double>(steps.front());
  const Plot plot{.first = first,
                  .span = std::max(1.0, static_cast<double>(steps.back()) - first),
                  .axis = axis_of(series, chart.from_zero, chart.cut_peaks)};
  std::string svg, labels;
  draw_warmup(plot, steps, warmup, &svg, &labels);
  draw_axes(plot, chart.unit, &svg, &labels);
  if (!std::isnan(plot.axis.beyond)) {
    absl::StrAppend(&labels, "<span class=\"note cut\">&#9650; up to ", in_unit(plot.axis.beyond, chart.unit), "</span>");
  }
  Column xs;
  nlohmann::json x_units = nlohmann::json::array(), shown_steps = nlohmann::json::array();
  for (size_t i = 0; i < steps.size(); i += per_point) {
    const size_t last = std::min(steps.size(), i + per_point) - 1;
    const double step = static_cast<double>(steps[i] + steps[last]) / 2;
    xs.push_back(plot.x_of(step));
    x_units.push_back(std::round(xs.back() * 10) / 10);
    shown_steps.push_back(std::llround(step));
  }
  std::vector<std::string> names, colours;
  nlohmann::json shown_series = nlohmann::json::array();
  for (const Series& one : series) {
    const std::string colour = colour_of(names.size());  // faint ones share the colour of what follows them
    if (!one.faint) {
      names.push_back(one.name);
      colours.push_back(colour);
    }
    Column ys;
    nlohmann::json values = nlohmann::json::array();
    for (const double y : one.y) {
      ys.push_back(plot.y_of(y));
      values.push_back(std::isfinite(y) ? nlohmann::json(in_unit(y, chart.unit)) : nlohmann::json(nullptr));
    }
    svg += path_of(xs, ys, one.faint ? colour + " faint" : colour);
    shown_series.push_back({{"name", valid_utf8(one.name)}, {"values", std::move(values)}});
  }
  const std::string box = absl::StrCat("0 0 ", kSide, " ", kSide);
  const std::string figure = absl::StrCat(
      caption(chart), names.size() > 1 ? legend(names, colours) : "", "<div class=\"plot\" data-hover=\"", hover->size(),
      "\"><svg viewBox=\"", box, "\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"", escape(chart.title), "\">",
      svg, "<path class=\"cursor\" d=\"\"/></svg>", labels, "</div></figure>\n");
  hover->push_back({{"x", std::move(x_units)}, {"steps", std::move(shown_steps)}, {"series", std::move(shown_series)}});
  return figure;
}

namespace {

// What the colours of all lanes mean; one that two lanes use has both names.
std::string legend_of(const std::vector<Lane>& lanes) {
  std::vector<std::string> names, colours;
  for (const Lane& lane : lanes) {
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
  }
  return legend(names, colours);
}

// The bars of one lane, stacked from the bottom.
std::string bars_of(const Lane& lane, const Column& wall_seconds) {
  constexpr double kGap = 1;
  std::string out;
  for (size_t i = 0; i < lane.shares.size(); ++i) {
    const double begin = i == 0 ? 0 : wall_seconds[i - 1] / wall_seconds.back() * kSide;
    const double width = wall_seconds[i] / wall_seconds.back() * kSide - begin;
    double bottom = kSide;
    std::string bars, tip = absl::StrCat(escape(lane.name), ", to ", duration(wall_seconds[i]));
    for (size_t p = 0; p < lane.parts.size(); ++p) {
      const double share = lane.shares[i][p];
      if (!(share > 0)) continue;
      bottom -= share * kSide;
      absl::StrAppend(&bars, "<rect class=\"", lane.colours[p], "\" x=\"", coordinate(begin), "\" y=\"", coordinate(bottom),
                      "\" width=\"", coordinate(std::max(0.5, width - (width > 4 * kGap ? kGap : 0))), "\" height=\"",
                      coordinate(share * kSide), "\"/>");
      absl::StrAppend(&tip, "&#10;", escape(lane.parts[p]), " ", percent(share));
    }
    absl::StrAppend(&out, "<g data-t=\"", tip, "\">", bars, "</g>");
  }
  return out;
}

}  // namespace

std::string render(const LaneChart& chart) {
  const double wall = chart.wall_seconds.empty() ? 0 : chart.wall_seconds.back();
  if (!(wall > 0)) return "<p class=\"none\">Nothing recorded.</p>\n";
  std::string out = legend_of(chart.lanes);
  for (const Lane& lane : chart.lanes) {
    absl::StrAppend(&out, "<div class=\"lane\"><b>", escape(lane.name), "</b><svg viewBox=\"0 0 ", kSide, " ", kSide,
                    "\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"", escape(lane.name), "\">",
                    bars_of(lane, chart.wall_seconds), "</svg></div>\n");
  }
  out += "<div class=\"times\">";
  const double step = time_step(wall);
  for (double tick = 0; tick <= wall * (1 + 1e-9); tick += step) out += below(tick / wall * kSide, duration(tick));
  return out + "</div>\n";
}

}  // namespace slipstream::cli
