// What operator benchmarks share. Each reports its rate and that rate over a ceiling measured in the same process.
#pragma once

#include "benchmark/benchmark.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels::testing {

// The stream benchmarks run on: SLIPSTREAM_BENCH_THREADS threads (default 1).
Stream& bench_stream();

// Ceilings of this machine with bench_stream()'s threads, measured on first use.
double copy_bytes_per_second();    // a 256 MiB copy, bytes read + bytes written
double fma_flops_per_second();     // independent fp32 FMA chains in registers

// Per-iteration work -> counters "GB/s" and "of_copy", or "GFLOP/s" and "of_fma".
void report_bytes(benchmark::State& state, int64_t bytes);
void report_flops(benchmark::State& state, int64_t flops);

}  // namespace slipstream::kernels::testing
