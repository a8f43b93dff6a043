// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix instructions on 16-bit operands with float accumulators, and the descriptors of their shared-memory operands.
#pragma once

#include "ptx/mma.cuh"

// Thread t of the warpgroup holds, with g = t % 32 / 4 and c = t % 4, element i of the accumulator: row t / 32 * 16 + g + i / 2 % 2 * 8,
// column i / 4 * 8 + c * 2 + i % 2.

// What all descriptors of a 128-byte swizzled operand share: 1024 bytes from 8 rows to the next 8, and `column_stride` bytes between
// blocks of 64 columns where the operand's rows are the summation's (transposed B); other operands do not read it.
__device__ __forceinline__ constexpr unsigned long long wgmma_descriptor_base(unsigned column_stride) {
  return 1ull << 62 | 64ull << 32 | static_cast<unsigned long long>(column_stride >> 4) << 16;
}

// `smem` is the same for all lanes, and is made so for ptxas too: from the descriptors of a whole batch in plain registers it would move
// each one to uniform registers between the products, five instructions for every one. What is shuffled is the low word as it will be: the
// uniform datapath is slow, and products wait for it.
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned long long base, unsigned smem) {
  return base >> 32 << 32 | __shfl_sync(0xffffffffu, static_cast<unsigned>(base) | (smem & 0x3ffff) >> 4, 0);
}

// Before the first product of a batch, and after touching registers that it reads or writes.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most `kPending` of the newest batches are in flight. Then bind_registers what the finished ones wrote.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving arithmetic on these registers across this point.
template <int kCount>
__device__ __forceinline__ void bind_registers(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// d = a b (`accumulate` 0) or d += a b, 64 x kColumns x 16. `smem` takes a from shared memory, rows of 16 summands; b likewise, by its
// columns. `registers` takes a from registers, and b by its rows.
template <int kColumns>
struct Wgmma;

#define WGMMA_PAIR(d, i) "+f"(d[i]), "+f"(d[i + 1])
#define WGMMA_OCTET(d, i) WGMMA_PAIR(d, i), WGMMA_PAIR(d, i + 2), WGMMA_PAIR(d, i + 4), WGMMA_PAIR(d, i + 6)
#define WGMMA_BLOCK(d, i) WGMMA_OCTET(d, i), WGMMA_OCTET(d, i + 8), WGMMA_OCTET(d, i + 16), WGMMA_OCTET(d, i + 24)

#define WGMMA_NAMES_0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_1 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_2 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_2A "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_3 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_SMEM(columns, type, names, a, b, p)                                                                     \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #p ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" names \
               "}, %" #a ", %" #b ", p, 1, 1, 0, 0;}"                                                                               \
               : WGMMA_ACCUMULATORS_##columns                                                                                                       \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate))
#define WGMMA_REGISTERS(columns, type, names, a0, a1, a2, a3, b, p)                                                   \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #p ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" names \
               "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, 1;}"                                                 \
               : WGMMA_ACCUMULATORS_##columns                                                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(accumulate))
#define WGMMA_SHAPE(columns, floats, names, n0, n1, n2, n3, n4, n5)                                                   \
  template <>                                                                                                                       \
  struct Wgmma<columns> {                                                                                                           \
    static __device__ __forceinline__ void smem(float (&d)[floats], unsigned long long a_descriptor, unsigned long long b_descriptor, int accumulate) { \
      if constexpr (kMmaElement == Element::kBfloat16) {                                                                            \
        WGMMA_SMEM(columns, "bf16", names, n0, n1, n2);                                                               \
      } else {                                                                                                                      \
        WGMMA_SMEM(columns, "f16", names, n0, n1, n2);                                                                \
      }                                                                                                                             \
    }                                                                                                                               \
    static __device__ __forceinline__ void registers(float (&d)[floats], const unsigned* a, unsigned long long b_descriptor, int accumulate) { \
      if constexpr (kMmaElement == Element::kBfloat16) {                                                                            \
        WGMMA_REGISTERS(columns, "bf16", names, n0, n1, n2, n3, n4, n5);                                              \
      } else {                                                                                                                      \
        WGMMA_REGISTERS(columns, "f16", names, n0, n1, n2, n3, n4, n5);                                               \
      }                                                                                                                             \
    }                                                                                                                               \
  };

#define WGMMA_ACCUMULATORS_64 WGMMA_BLOCK(d, 0)
#define WGMMA_ACCUMULATORS_128 WGMMA_BLOCK(d, 0), WGMMA_BLOCK(d, 32)
#define WGMMA_ACCUMULATORS_160 WGMMA_ACCUMULATORS_128, WGMMA_OCTET(d, 64), WGMMA_OCTET(d, 72)
#define WGMMA_ACCUMULATORS_256 WGMMA_ACCUMULATORS_128, WGMMA_BLOCK(d, 64), WGMMA_BLOCK(d, 96)

WGMMA_SHAPE(64, 32, WGMMA_NAMES_0, 32, 33, 34, 35, 36, 37)
WGMMA_SHAPE(128, 64, WGMMA_NAMES_0 ", " WGMMA_NAMES_1, 64, 65, 66, 67, 68, 69)
WGMMA_SHAPE(160, 80, WGMMA_NAMES_0 ", " WGMMA_NAMES_1 ", " WGMMA_NAMES_2A, 80, 81, 82, 83, 84, 85)
WGMMA_SHAPE(256, 128, WGMMA_NAMES_0 ", " WGMMA_NAMES_1 ", " WGMMA_NAMES_2 ", " WGMMA_NAMES_3, 128, 129, 130, 131, 132, 133)
