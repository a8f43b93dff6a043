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
__device__ __forceinline__ float4 load_l2(const float4* pointer) { return __ldcg(pointer); }

__device__ __forceinline__ void prefetch_l2(const void* pointer) { asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer)); }

// Barriers in shared memory that threads can arrive at without waiting.
__device__ __forceinline__ void mbarrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

// Wait for the end of the phase with that parity.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  } while (!done);
}
