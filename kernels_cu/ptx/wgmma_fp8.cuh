// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix instructions on e4m3 operands with float accumulators: both operands lie with the summands of a row side by side.
#pragma once

#include "ptx/wgmma.cuh"

// What descriptors of an operand share whose rows are kRowBytes of summands long, 128, 64 or 32, in the swizzle of that width.
template <int kRowBytes>
__device__ __forceinline__ constexpr unsigned long long wgmma_rows_base() {
  constexpr unsigned long long kMode = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return kMode << 62 | static_cast<unsigned long long>(8 * kRowBytes >> 4) << 32 | 1ull << 16;
}

// d = a b (`accumulate` 0) or d += a b, 64 x kColumns x 32. Of the four registers of an a from registers, thread (g, c) holds summands
// 4c to 4c + 3 of rows g and g + 8, then the same 16 summands further.
template <int kColumns>
struct WgmmaFp8;

#define WGMMA_FP8_NAMES_64 WGMMA_NAMES_0
#define WGMMA_FP8_NAMES_128 WGMMA_NAMES_0 ", " WGMMA_NAMES_1
#define WGMMA_FP8_NAMES_160 WGMMA_FP8_NAMES_128 ", " WGMMA_NAMES_2A
#define WGMMA_FP8_NAMES_192 WGMMA_FP8_NAMES_128 ", " WGMMA_NAMES_2
#define WGMMA_FP8_NAMES_256 WGMMA_FP8_NAMES_192 ", " WGMMA_NAMES_3
#define WGMMA_ACCUMULATORS_192 WGMMA_ACCUMULATORS_128, WGMMA_BLOCK(d, 64)

#define WGMMA_FP8_SHAPE(columns, n0, n1, n2, n3, n4, n5)                                                                                  \
  template <>                                                                                                                             \
  struct WgmmaFp8<columns> {                                                                                                              \
    static __device__ __forceinline__ void smem(float (&d)[columns / 2], unsigned long long a_descriptor, unsigned long long b_descriptor, \
                                                int accumulate) {                                                                         \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n2 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {"          \
                   WGMMA_FP8_NAMES_##columns "}, %" #n0 ", %" #n1 ", p, 1, 1;}"                                                           \
                   : WGMMA_ACCUMULATORS_##columns                                                                                         \
                   : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate));                                                              \
    }                                                                                                                                     \
    static __device__ __forceinline__ void registers(float (&d)[columns / 2], const unsigned* a, unsigned long long b_descriptor,         \
                                                     int accumulate) {                                                                    \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #n5 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {"          \
                   WGMMA_FP8_NAMES_##columns "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1;}"                           \
                   : WGMMA_ACCUMULATORS_##columns                                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_descriptor), "r"(accumulate));                                     \
    }                                                                                                                                     \
  };

WGMMA_FP8_SHAPE(64, 32, 33, 34, 35, 36, 37)
WGMMA_FP8_SHAPE(128, 64, 65, 66, 67, 68, 69)
WGMMA_FP8_SHAPE(160, 80, 81, 82, 83, 84, 85)
WGMMA_FP8_SHAPE(192, 96, 97, 98, 99, 100, 101)
WGMMA_FP8_SHAPE(256, 128, 129, 130, 131, 132, 133)
