// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that count arrivals and bytes of bulk copies, named barriers, and the fence between both worlds.
#pragma once

#include "ptx/sync.cuh"

// One thread, after it initialised barriers and before the CTA synchronises: bulk copies may then count on them.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrive once, and hold the phase until `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// As mbarrier_wait, but the thread sleeps while it waits.
__device__ __forceinline__ void mbarrier_sleep(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barrier `id` (0 is __syncthreads): wait for `threads` threads, or count towards them without waiting.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Ordinary writes to shared memory, by this thread or before what it has waited for, come before what the copy engine and the tensor cores
// do there afterwards.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
