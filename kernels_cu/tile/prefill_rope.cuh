// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of a whole 16-bit key tile in shared memory.
#pragma once

#include "tile/rope.cuh"
#include "tile/prefill_layout.cuh"

// All threads: rotate a 16-bit key tile in place. Synchronise before and after.
__device__ __forceinline__ void rotate_k_tile(unsigned char* tile, const float2* turns, int key_begin) {
  constexpr int kHalfChunks = kRopePairs / 8;
#pragma unroll 1
  for (int idx = threadIdx.x; idx < kKvTile * kHalfChunks; idx += kNumWarps * 32) {
    int key = idx / kHalfChunks, chunk = idx % kHalfChunks;
    uint4* low_chunk = reinterpret_cast<uint4*>(tile + Swizzle<kKRowBytes>::offset(key, chunk));
    uint4* high_chunk = reinterpret_cast<uint4*>(tile + Swizzle<kKRowBytes>::offset(key, chunk + kHalfChunks));
    uint4 low = *low_chunk, high = *high_chunk;
    float position = static_cast<float>(key_begin + key);
    const float2* turn = turns + chunk * 8;
    rotate_pair<kKvElement>(low.x, high.x, rope_cos_sin(turn[0], position), rope_cos_sin(turn[1], position));
    rotate_pair<kKvElement>(low.y, high.y, rope_cos_sin(turn[2], position), rope_cos_sin(turn[3], position));
    rotate_pair<kKvElement>(low.z, high.z, rope_cos_sin(turn[4], position), rope_cos_sin(turn[5], position));
    rotate_pair<kKvElement>(low.w, high.w, rope_cos_sin(turn[6], position), rope_cos_sin(turn[7], position));
    *low_chunk = low;
    *high_chunk = high;
  }
}
