// SPDX-License-Identifier: Apache-2.0
// Attention on Hopper: warpgroup 0 moves data, K and V tiles in bulk, the others multiply them with 64 packed query rows each.
#pragma once

#include "tile/fa3_consumer.cuh"
#include "tile/fa3_fp8_values.cuh"
#include "tile/fa3_producer.cuh"
#include "tile/fa3_rows.cuh"

template <int kRegisters>
__device__ __forceinline__ void give_up_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

extern "C" __global__ void __launch_bounds__(kCtaThreads, 1) attention(const __grid_constant__ Fa3Params params) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared shared(smem);
  if (threadIdx.x == 0) init_barriers(params, shared);
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    give_up_registers<kProducerRegisters>();
    int warp = threadIdx.x / 32;
    if (warp == kKWarp) {
      produce_k(params, shared);
    } else if (kQFp8 && warp >= kFirstTurner) {
      if constexpr (kQFp8) turn_all_values(shared);
    } else if (!kQFp8 && warp == kVWarp) {
      produce_v(params, shared);
    } else {
      carry_rows(params, shared, (warp - kFirstRowsWarp) * kRowsOfWarp);
    }
  } else {
    take_registers<kConsumerRegisters>();
    Consumer(params, shared).consume();
  }
}
