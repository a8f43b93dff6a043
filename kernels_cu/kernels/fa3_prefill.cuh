// SPDX-License-Identifier: Apache-2.0
// Attention on Hopper: one producer warp copies K and V tiles in bulk, warpgroups of 64 packed query rows each multiply them.
#pragma once

#include "tile/fa3_consumer.cuh"
#include "tile/fa3_producer.cuh"

template <int kRegisters>
__device__ __forceinline__ void give_up_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

extern "C" __global__ void __launch_bounds__(kCtaThreads, 1) attention(const __grid_constant__ Fa3Params params) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared shared(smem);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    give_up_registers<kProducerRegisters>();
    if (threadIdx.x < 32) produce(params, shared);
  } else {
    take_registers<kConsumerRegisters>();
    Consumer(params, shared).consume();
  }
}
