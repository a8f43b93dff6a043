// SPDX-License-Identifier: Apache-2.0
// Asynchronous 16-byte copies from global to shared memory.
#pragma once

// Copy 16 bytes past L1.
__device__ __forceinline__ void cp_async_16(unsigned smem, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

// Copy 16 bytes past L1, or fill them with zeros when `valid` is false; the source is then not read.
__device__ __forceinline__ void cp_async_16(unsigned smem, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// The same where `wanted` holds; nothing elsewhere. Predicated by hand: a branch around copies would keep them from being interleaved.
__device__ __forceinline__ void cp_async_16_if(bool wanted, unsigned smem, const void* global, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2; }" ::"r"(smem), "l"(global),
               "r"(valid ? 16 : 0), "r"(static_cast<int>(wanted))
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// One arrival on `barrier` once all copies that this thread started have landed. Whoever waits for that phase (acquire) sees them: PTX says
// so of waits, and needs no release here.
__device__ __forceinline__ void cp_async_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Wait until at most `kPending` of the newest groups of this thread are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
