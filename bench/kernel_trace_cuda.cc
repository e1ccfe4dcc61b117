#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/kernel_trace.h"
#include "bench/measuring.h"

namespace slipstream::bench {
namespace {

struct Span {
  uint64_t begin, end;  // ns
  std::string name;
};

// CUPTI calls back without an argument of ours.
struct Recorded {
  std::mutex mutex;
  std::vector<Span> spans;
  Clock::time_point start;
};
Recorded& recorded() {
  static Recorded instance;
  return instance;
}

constexpr size_t kBufferBytes = size_t{1} << 20;

void give_buffer(uint8_t** buffer, size_t* size, size_t* records_max) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = kBufferBytes;
  *records_max = 0;
}

// The function's name without template arguments' spaces, parameters and namespaces of ours.
std::string short_name(const char* mangled) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : mangled;
  std::free(demangled);
  for (const std::string& noise : {std::string("slipstream::kernels::"), std::string("(anonymous namespace)::"), std::string("void ")}) {
    for (size_t at = name.find(noise); at != std::string::npos; at = name.find(noise)) name.erase(at, noise.size());
  }
  return name.substr(0, std::min(name.find('('), size_t{70}));
}

void take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  Recorded& to = recorded();
  const std::lock_guard lock(to.mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      to.spans.push_back({kernel->start, kernel->end, short_name(kernel->name)});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
      const char* const kind = copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD   ? "copy to the device"
                               : copy->copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? "copy to the host"
                                                                                   : "copy on the device";
      to.spans.push_back({copy->start, copy->end, kind});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* set = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      to.spans.push_back({set->start, set->end, "zero"});
    }
  }
  std::free(buffer);
}

absl::Status checked(CUptiResult result) {
  if (result == CUPTI_SUCCESS) return absl::OkStatus();
  const char* words = "";
  cuptiGetResultString(result, &words);
  return absl::UnimplementedError(absl::StrCat("CUPTI: ", words));
}

void print_timeline(const Span* first, const Span* last) {
  std::printf("  %10s %8s %8s  of one pass, us\n", "begin", "gap", "takes");
  if (first == last) return;
  uint64_t until = first->begin;
  for (const Span* span = first; span < last; ++span) {
    const auto us = [](uint64_t from, uint64_t to) { return static_cast<double>(static_cast<int64_t>(to - from)) * 1e-3; };
    std::printf("  %10.1f %8.1f %8.1f  %s\n", us(first->begin, span->begin), us(until, span->begin), us(span->begin, span->end),
                span->name.c_str());
    until = std::max(until, span->end);
  }
}

constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET};

}  // namespace

absl::Status KernelTrace::start() {
  RETURN_IF_ERROR(checked(cuptiActivityRegisterCallbacks(give_buffer, take_buffer)));
  for (const CUpti_ActivityKind kind : kKinds) RETURN_IF_ERROR(checked(cuptiActivityEnable(kind)));
  recorded().spans.clear();
  recorded().start = Clock::now();
  return absl::OkStatus();
}

void KernelTrace::report(const std::string& what, int passes, bool timeline, int most) {
  const double wall = seconds_since(recorded().start) * 1e3 / passes;
  cuptiActivityFlushAll(1);
  for (const CUpti_ActivityKind kind : kKinds) cuptiActivityDisable(kind);
  const std::lock_guard lock(recorded().mutex);
  std::vector<Span>& spans = recorded().spans;
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  struct Total {
    double ms = 0;
    int count = 0;
  };
  std::map<std::string, Total> totals;
  double busy = 0;
  uint64_t until = 0;
  for (const Span& span : spans) {
    totals[span.name].ms += static_cast<double>(span.end - span.begin) * 1e-6 / passes;
    ++totals[span.name].count;
    if (span.end > until) busy += static_cast<double>(span.end - std::max(span.begin, until)) * 1e-6 / passes;
    until = std::max(until, span.end);
  }
  std::printf("%s: %.3f ms wall, GPU busy %.3f ms (%.0f %%), %zu launches and copies\n", what.c_str(), wall, busy, 100 * busy / wall,
              spans.size() / static_cast<size_t>(passes));
  std::vector<std::pair<std::string, Total>> order(totals.begin(), totals.end());
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
  for (size_t i = 0; i < order.size() && i < static_cast<size_t>(most); ++i) {
    const auto& [name, total] = order[i];
    std::printf("  %10.3f ms %5.1f %% %6d x %s\n", total.ms, 100 * total.ms / busy, total.count / passes, name.c_str());
  }
  if (timeline) print_timeline(spans.data() + spans.size() - spans.size() / static_cast<size_t>(passes), spans.data() + spans.size());
  std::fflush(stdout);
}

}  // namespace slipstream::bench
