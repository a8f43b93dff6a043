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
__device__ __forceinline__ void tma_load_3d(unsigned smem, const TensorMap& map, unsigned barrier, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem), "l"(&map),
               "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

// One thread: start copying a box from shared memory, where other threads' writes have been fenced, to those coordinates.
__device__ __forceinline__ void tma_store_3d(unsigned smem, const TensorMap& map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%1, {%2, %3, %4}], [%0];" ::"r"(smem), "l"(&map), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

// The thread that started stores: wait until they have read shared memory, which may then be written again.
__device__ __forceinline__ void tma_wait_stores_read() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
