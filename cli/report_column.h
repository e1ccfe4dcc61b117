// Arithmetic on what a run recorded: one value a step, NaN where a step recorded none. NaN never counts.
#pragma once

#include <cstddef>
#include <vector>

namespace slipstream::cli {

using Column = std::vector<double>;

// Over steps [begin, end); NaN when nothing was recorded there.
double sum_of(const Column& values, size_t begin, size_t end);
double mean_of(const Column& values, size_t begin, size_t end);

// Over the whole column; NaN when it is empty.
double last_of(const Column& values);
double max_of(const Column& values);
// What `share` of the values do not exceed: 0.95 is all but the largest twentieth.
double quantile_of(Column values, double share);

// Growth of a running total by step; a total that fell began again at 0 (its role was restarted).
Column increments(const Column& total);
// The mean over a window that ends at each step.
Column smoothed(const Column& values, size_t window);
// amount / seconds by step; NaN where no time passed.
Column rate(const Column& amount, const Column& seconds);

}  // namespace slipstream::cli
