// SPDX-License-Identifier: Apache-2.0
// Ordering between CTAs and cache-bypassing access to what other CTAs wrote.
#pragma once

// Add one with acquire and release order at GPU scope; returns the value before.
__device__ __forceinline__ int atomic_increment_acq_rel(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Loads of data another CTA wrote in this launch go to L2: L1 may hold an older line.
__device__ __forceinline__ float load_l2(const float* pointer) { return __ldcg(pointer); }
__device__ __forceinline__ float2 load_l2(const float2* pointer) { return __ldcg(pointer); }
