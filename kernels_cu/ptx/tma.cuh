// SPDX-License-Identifier: Apache-2.0
// Bulk copies of tensor boxes from global to shared memory.
#pragma once

// What the driver's cuTensorMapEncodeTiled makes; only the copy engine looks inside.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One thread: start copying the box at those coordinates; its bytes count on `barrier`. What lies outside the tensor becomes zeros.
__device__ __forceinline__ void tma_load_4d(unsigned smem, const TensorMap& map, unsigned barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem), "l"(&map),
      "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
