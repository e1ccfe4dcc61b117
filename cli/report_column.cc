#include "cli/report_column.h"

#include <algorithm>
#include <cmath>

namespace slipstream::cli {

double sum_of(const Column& values, size_t begin, size_t end) {
  double sum = std::nan("");
  for (size_t i = begin; i < std::min(end, values.size()); ++i) {
    if (std::isfinite(values[i])) sum = (std::isnan(sum) ? 0 : sum) + values[i];
  }
  return sum;
}

double mean_of(const Column& values, size_t begin, size_t end) {
  size_t count = 0;
  for (size_t i = begin; i < std::min(end, values.size()); ++i) count += std::isfinite(values[i]) ? 1 : 0;
  return sum_of(values, begin, end) / static_cast<double>(count);  // NaN / 0 is NaN
}

double last_of(const Column& values) {
  for (size_t i = values.size(); i-- > 0;) {
    if (std::isfinite(values[i])) return values[i];
  }
  return std::nan("");
}

double max_of(const Column& values) {
  double out = std::nan("");
  for (const double value : values) {
    if (std::isfinite(value) && !(value <= out)) out = value;
  }
  return out;
}

double quantile_of(Column values, double share) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return std::nan("");
  const auto at = static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}

Column increments(const Column& total) {
  Column out;
  double before = 0;
  for (const double now : total) {
    out.push_back(now >= before ? now - before : now);  // NaN stays NaN
    if (!std::isnan(now)) before = now;
  }
  return out;
}

Column smoothed(const Column& values, size_t window) {
  Column out;
  for (size_t i = 0; i < values.size(); ++i) {
    out.push_back(mean_of(values, i + 1 - std::min(i + 1, window), i + 1));
  }
  return out;
}

Column rate(const Column& amount, const Column& seconds) {
  Column out;
  for (size_t i = 0; i < amount.size(); ++i) {
    out.push_back(seconds[i] > 0 ? amount[i] / seconds[i] : std::nan(""));
  }
  return out;
}

}  // namespace slipstream::cli
