// SPDX-License-Identifier: Apache-2.0
// Warp-level matrix instructions on 16-bit operands with float accumulators.
#pragma once

// The 16-bit type matrix products run in: the query's own, or half for fp8 caches, whose values half holds exactly.
constexpr Element kMmaElement = (kKvElement == Element::kE4m3 || kKvElement == Element::kE5m2) ? Element::kFloat16 : kQElement;

// d += a b for a 16x16, b 16x8. Thread (g = lane / 4, c = lane % 4) holds d rows g, g + 8 at columns 2c, 2c + 1.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (kMmaElement == Element::kBfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
