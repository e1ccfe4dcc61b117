// Hopper's asynchronous units (sm_90a), as PTX: barriers in shared memory, the copy engine (TMA) and the
// tensor cores' products by warpgroups of 128 threads (wgmma). PTX ISA 8.0: mbarrier, cp.async.bulk.tensor,
// wgmma.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/mma.cuh"

namespace slipstream::kernels {

// --- Barriers: a phase ends when `count` threads have arrived and all expected bytes are there
// ---------------

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}
// Initialised barriers become visible to the copy engine.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Counts as `arrivals` threads.
__device__ __forceinline__ void barrier_arrive_as(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// A warp's arrival, by its first lane for all: no lane needs any more what the barrier guards, and the lanes are together (after
// __syncwarp() or a wait for products). racecheck knows only what the arriving thread itself did before, so a build for it
// (preset racecheck) has every lane arrive. Such a barrier is for barrier_init(..., kArrivalsOfWarp * warps).
#ifdef SLIPSTREAM_RACECHECK
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif
__device__ __forceinline__ void barrier_arrive_warp(uint64_t* barrier, bool first_lane, int arrivals = 1) {
  if (first_lane || kArrivalsOfWarp > 1) barrier_arrive_as(barrier, arrivals);
}
// Whether the phase of this parity has ended: phases count 0, 1, 0, 1 from the barrier's initialisation. Looks at once.
__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, int parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits until it has.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// --- Copies of a tensor map's boxes; what lies beyond the tensor is 0
// -----------------------------------------

// To 1024-byte aligned shared memory; `barrier` counts the bytes.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// One value to shared memory, in the background.
__device__ __forceinline__ void copy_float(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// Arrives, once, when this thread's copies so far are there.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y,
                                         int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// Consecutive bytes: 16-byte aligned, a multiple of 16. In: `barrier` counts them. Out: returns once they are written.
__device__ __forceinline__ void copy_bytes_in(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void copy_bytes_out(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}
// After a thread's own writes to shared memory that the tensor cores read or the copy engine overwrites.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A warpgroup's registers a thread. All its threads call; the kernel must be compiled with a limit in
// between.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- wgmma: D[64, N] = A[64, 16] B[16, N] (+ D), bf16 factors in shared memory, f32 sums in registers
// --------------

// A factor in shared memory as the copy engine leaves it with CU_TENSOR_MAP_SWIZZLE_128B: 128 bytes a row,
// eight rows every 1024 bytes. Rows along k: each is a row of A or a column of B, and `leading` is not read.
// Rows across k: k counts them downwards, and `leading` bytes lie between one 64 of the other index and the
// next.
__device__ __forceinline__ uint64_t factor_descriptor(const void* shared, uint32_t leading) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{leading >> 4} << 16 | (shared_address(shared) & 0x3ffffu) >> 4;
}

// A factor whose rows run along k, in pieces of 8 rows x 8 values (128 bytes): the next eight along k and the
// next eight rows are that many bytes further.
__device__ __forceinline__ uint64_t eights_descriptor(const void* shared, uint32_t along_k, uint32_t down) {
  return uint64_t{down >> 4} << 32 | uint64_t{along_k >> 4} << 16 | (shared_address(shared) & 0x3ffffu) >> 4;
}

// Before the first product after threads wrote the sums' registers or shared memory.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Between products in flight and other code with the same sums: the compiler moves nothing past it.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// PTX wants every register of the sums spelled out: their names in the instruction, and the operands, sixteen at a time.
#define SUMS_16(d, i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),  \
      "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), "+f"(d[i + 12]),       \
      "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define SUMS_32(d, i) SUMS_16(d, i), SUMS_16(d, i + 16)
#define SUMS_64(d, i) SUMS_32(d, i), SUMS_32(d, i + 32)
#define NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 NAMES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_96 NAMES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128 NAMES_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Columns N are twice the size of d: for every eight, thread t of the warpgroup holds d[4j .. 4j + 3], which
// are columns 8j + 2 (t % 4) and + 1 of row 16 (t / 32) + t % 32 / 4, then of the row 8 below. kTransposeA: A
// is stored [k, m] rather than [m, k]; kTransposeB: B is stored [n, k] rather than [k, n]. add = 0: D's
// values are not read.
template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{" NAMES_16 "}, %16, %17, add, 1, 1, %19, %20;\n}"
      : SUMS_16(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 0 : 1));
}

template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" NAMES_32 "}, %32, %33, add, 1, 1, %35, %36;\n}"
      : SUMS_32(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 0 : 1));
}

// A in registers: of a warp's sixteen rows, as mma() takes them. They are read until the product is awaited, and
// the compiler does not know it: keep them in use for longer, or wait at once.
template <bool kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
      : SUMS_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposeB ? 0 : 1));
}

template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{" NAMES_64 "}, %64, %65, add, 1, 1, %67, %68;\n}"
      : SUMS_64(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 0 : 1));
}

template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[96], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{" NAMES_96 "}, %96, %97, add, 1, 1, %99, %100;\n}"
      : SUMS_64(d, 0), SUMS_32(d, 64)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 0 : 1));
}

template <bool kTransposeA, bool kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{" NAMES_128 "}, %128, %129, add, 1, 1, %131, %132;\n}"
      : SUMS_64(d, 0), SUMS_64(d, 64)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 0 : 1));
}

// The same of e4m3 factors, thirty-two k at a time: A stored [m, k], B stored [n, k].
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{" NAMES_32 "}, %32, %33, add, 1, 1;\n}"
      : SUMS_32(d, 0)
      : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{" NAMES_64 "}, %64, %65, add, 1, 1;\n}"
      : SUMS_64(d, 0)
      : "l"(a), "l"(b), "r"(add));
}

#undef SUMS_16
#undef SUMS_32
#undef SUMS_64
#undef NAMES_16
#undef NAMES_32
#undef NAMES_64
#undef NAMES_96
#undef NAMES_128

}  // namespace slipstream::kernels
