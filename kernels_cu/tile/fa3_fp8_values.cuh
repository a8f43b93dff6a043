// SPDX-License-Identifier: Apache-2.0
// The warps that turn fp8 values: tiles of V as they were copied become the operand that 8-bit products need, its keys side by side.
#pragma once

#include "ptx/ldmatrix.cuh"
#include "tile/fa3_layout.cuh"

// A warp turns these 16-byte chunks of every key, so many at a time, with as many on their way.
constexpr unsigned kTurnerChunks = kHeadDimVo / 16 / kTurners, kTurnBatch = kConsumers == 3 ? 1 : 2;
static_assert(kTurnerChunks % kTurnBatch == 0 && kBlockRowBytes / 16 % kTurnerChunks == 0, "a warp's chunks lie in one block");

// Keys of a copied tile that no row sees or that do not exist become zeros: they hold any bits at all, and 0 * NaN is NaN. Each warp
// clears what it turns: `first_chunk` on of the block at `source`.
__device__ __forceinline__ void clear_copied_values(unsigned source, unsigned first_chunk, const KeyBounds& bounds) {
#pragma unroll 1
  for (int key = producer_lane(); key < kKvTile; key += 32) {
    if (key >= bounds.first_seen && key < bounds.first_missing) continue;
#pragma unroll
    for (unsigned i = 0; i < kTurnerChunks; ++i) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(source + Swizzle<kBlockRowBytes>::offset(key, first_chunk + i)), "r"(0) : "memory");
    }
  }
  __syncwarp();
}

// One warp's share of V [keys][dims] to V^T [dims][keys], 32 keys by 16 dims at a time. A transposing load gives a thread dims 2g and
// 2g + 1 of keys 2c, 2c + 1, 2c + 8 and 2c + 9 of each 16, in pairs of dims; two byte permutations part even from odd dims. The four keys
// are stored as 4c to 4c + 3: that is the order in which a thread's own weights are summed (see pack_weights). Of 16 dims the even ones
// become rows 0 to 7 and the odd ones rows 8 to 15, so that eight stored rows never share a bank; outputs are put back in order (see
// run_element).
__device__ __forceinline__ void turn_values(unsigned source, unsigned first_chunk, unsigned turned) {
  constexpr unsigned kTurnedChunks = kTurnedRowBytes / 16, kBatches = kKvTile / 32 * kTurnerChunks / kTurnBatch;
  unsigned lane = producer_lane(), row = lane % 16, half = lane / 16;
  source += Swizzle<kBlockRowBytes>::offset(lane, first_chunk);
  turned += Swizzle<kTurnedRowBytes>::offset(row, half);
  unsigned r[2][kTurnBatch][4];
  // Loads are a batch ahead of what is made of them.
#pragma unroll
  for (unsigned batch = 0; batch <= kBatches; ++batch) {
    if (batch < kBatches) {
#pragma unroll
      for (unsigned i = 0; i < kTurnBatch; ++i) {
        unsigned item = batch * kTurnBatch + i;
        ldmatrix_x4_trans(r[batch % 2][i], Swizzle<kBlockRowBytes>::advance(source, item % kTurnerChunks) + item / kTurnerChunks * 32 * kBlockRowBytes);
      }
    }
    if (batch == 0) continue;
#pragma unroll
    for (unsigned i = 0; i < kTurnBatch; ++i) {
      unsigned item = (batch - 1) * kTurnBatch + i, chunk = item / kTurnerChunks * 2;
      const unsigned (&from)[4] = r[(batch - 1) % 2][i];
      // 16 rows further the swizzle is the same.
      unsigned target = Swizzle<kTurnedRowBytes>::advance(turned, chunk % kTurnedChunks) + chunk / kTurnedChunks * kTurnedBlockBytes +
                        item % kTurnerChunks * 16 * kTurnedRowBytes;
      stmatrix_x4(target, __byte_perm(from[0], from[1], 0x6420), __byte_perm(from[0], from[1], 0x7531), __byte_perm(from[2], from[3], 0x6420),
                  __byte_perm(from[2], from[3], 0x7531));
    }
  }
}

// The first chunk that a turner turns, read anew like its lane.
__device__ __forceinline__ unsigned turner_chunk() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return (thread / 32 - kFirstTurner) * kTurnerChunks;
}

// A turner: its share of every V tile of the CTA.
__device__ __forceinline__ void turn_all_values(const Shared& shared) {
  constexpr unsigned kChunks = kBlockRowBytes / 16;
#pragma unroll 1
  for (unsigned count = 0;; ++count) {
    wait_full(shared, kVCopied, count);
    // One lane reads them and says so, as one lane writes them.
    KeyBounds bounds;
    if (producer_lane() == 0) bounds = shared.control->copied[count % kCopyStages];
    bounds.first_seen = __shfl_sync(kFullWarp, bounds.first_seen, 0), bounds.first_missing = __shfl_sync(kFullWarp, bounds.first_missing, 0);
    if (bounds.first_missing == KeyBounds::kNoTile) return;
    unsigned first_chunk = turner_chunk(), source = shared.v_copy(count) + first_chunk / kChunks * kKvBlockBytes;
    if (bounds.first_seen > 0 || bounds.first_missing < kKvTile) clear_copied_values(source, first_chunk % kChunks, bounds);
    wait_empty(shared, kVEmpty, count);
    turn_values(source, first_chunk % kChunks, shared.v_tile(count) + first_chunk * 16 * kTurnedRowBytes);
    fence_async_proxy();
    __syncwarp();
    if (producer_lane() == 0) {
      unsigned done = recompute_from(count);
      mbarrier_arrive(shared.barrier(kVFull + done % kNumStages));
      mbarrier_arrive(shared.barrier(kVTurned + done % kCopyStages));
    }
  }
}
