// SPDX-License-Identifier: Apache-2.0
// The warp that brings fp8 values: it copies tiles of V ahead, and turns each into the operand that 8-bit products need, its keys side
// by side.
#pragma once

#include "ptx/ldmatrix.cuh"
#include "tile/fa3_producer.cuh"

// 16-byte chunks that a lane has in flight on their way from one tile to the other.
constexpr int kTurnBatch = kFewRegisters ? 2 : 4;
static_assert(kHeadDimVo / 16 % kTurnBatch == 0, "batches run along a row");

// Keys of a copied tile that no row sees or that do not exist become zeros: they hold any bits at all, and 0 * NaN is NaN.
__device__ __forceinline__ void clear_copied_values(unsigned copy, const KeyBounds& bounds) {
  constexpr int kChunks = kBlockRowBytes / 16;
#pragma unroll 1
  for (int idx = producer_lane(); idx < kKvTile * kChunks; idx += 32) {
    int key = idx / kChunks;
    if (key >= bounds.first_seen && key < bounds.first_missing) continue;
#pragma unroll
    for (int block = 0; block < kVoBlocks; ++block) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(copy + block * kKvBlockBytes + idx * 16), "r"(0) : "memory");
    }
  }
  __syncwarp();
}

// One warp: V [keys][dims] to V^T [dims][keys], 32 keys by 16 dims at a time. A transposing load gives a thread dims 2g and 2g + 1 of keys
// 2c, 2c + 1, 2c + 8 and 2c + 9 of each 16, in pairs of dims; two byte permutations part even from odd dims. The four keys are stored as
// 4c to 4c + 3: that is the order in which a thread's own weights are summed (see pack_weights). Of 16 dims the even ones become rows 0
// to 7 and the odd ones rows 8 to 15, so that eight stored rows never share a bank; outputs are put back in order (see output_dims).
__device__ __forceinline__ void turn_values(unsigned copy, unsigned turned) {
  constexpr unsigned kChunks = kBlockRowBytes / 16, kTurnedChunks = kTurnedRowBytes / 16;
  unsigned lane = producer_lane(), row = lane % 16, half = lane / 16;
#pragma unroll 1
  for (unsigned keys = 0; keys < kKvTile / 32; ++keys) {
    unsigned source = copy + keys * 32 * kBlockRowBytes;
    unsigned target = turned + keys * 32 / kTurnedRowBytes * kTurnedBlockBytes + Swizzle<kTurnedRowBytes>::offset(row, (keys * 2 + half) % kTurnedChunks);
#pragma unroll
    for (unsigned first = 0; first < kHeadDimVo / 16; first += kTurnBatch) {
      unsigned r[kTurnBatch][4];
#pragma unroll
      for (unsigned i = 0; i < kTurnBatch; ++i) {
        unsigned chunk = first + i;
        ldmatrix_x4_trans(r[i], source + chunk / kChunks * kKvBlockBytes + Swizzle<kBlockRowBytes>::offset(lane, chunk % kChunks));
      }
#pragma unroll
      for (unsigned i = 0; i < kTurnBatch; ++i) {
        // 16 rows further the swizzle is the same.
        stmatrix_x4(target + (first + i) * 16 * kTurnedRowBytes, __byte_perm(r[i][0], r[i][1], 0x6420), __byte_perm(r[i][0], r[i][1], 0x7531),
                    __byte_perm(r[i][2], r[i][3], 0x6420), __byte_perm(r[i][2], r[i][3], 0x7531));
      }
    }
  }
}

// The tiles of V that a CTA needs, in order, as its published segments name them.
struct ValueTiles {
  const Fa3Params& params;
  const Shared& shared;
  unsigned slot = 0;   // of the segment
  bool begun = false;  // it has been read, and key_begin is the first key of its next tile
  int key_begin;

  __device__ __forceinline__ ValueTiles(const Fa3Params& params, const Shared& shared) : params(params), shared(shared) {}

  __device__ __forceinline__ const QueuedWork& work() const { return shared.work(slot); }

  // Go to the segment of the next tile. False when there is none, or `may_wait` is false and it is not published yet: it may depend on
  // tiles that are still to be turned.
  __device__ __forceinline__ bool find(bool may_wait) {
#pragma unroll 1
    while (true) {
      if (!begun) {
        if (!may_wait && !__all_sync(kFullWarp, mbarrier_test(shared.barrier(kWorkFull + slot % kWorkSlots), slot / kWorkSlots & 1))) return false;
        if (!wait_for_work(shared, slot).valid) return false;
        begun = true, key_begin = work().segment.kv_begin;
      }
      if (key_begin < work().segment.kv_end) return true;
      release_work(shared, slot++);
      begun = false;
    }
  }
};

// Copy every V tile of the CTA, two ahead, and turn it once the consumers have done with the one before the last.
__device__ __forceinline__ void produce_turned_v(const Fa3Params& params, const Shared& shared) {
  if (producer_lane() == 0) tma_prefetch_map(params.v);
  ValueTiles tiles(params, shared);
  unsigned num_copied = 0;
#pragma unroll 1
  for (unsigned count = 0;; ++count) {
    // This warp alone reads copies, so a stage is free once its last tile has been turned.
#pragma unroll 1
    while (num_copied - count < kNumStages && tiles.find(num_copied == count)) {
      if (producer_lane() == 0) {
        shared.control->copied[num_copied % kNumStages] = {tiles.work().segment.first_seen - tiles.key_begin,
                                                           tiles.work().tile.kv_len - tiles.key_begin};
      }
      copy_tile<kVoBlocks>(params, params.v, shared.v_copy(num_copied), shared.barrier(kVCopied + num_copied % kNumStages), BoxOrigin(params, tiles.work(), tiles.key_begin),
                           tiles.work().segment.kv_head);
      tiles.key_begin += kKvTile;
      ++num_copied;
    }
    if (num_copied == count) return;
    wait_full(shared, kVCopied, count);
    const KeyBounds& bounds = shared.control->copied[count % kNumStages];
    if (bounds.first_seen > 0 || bounds.first_missing < kKvTile) clear_copied_values(shared.v_copy(count), bounds);
    wait_empty(shared, kVEmpty, count);
    turn_values(shared.v_copy(count), shared.v_tile(count));
    fence_async_proxy();
    __syncwarp();
    if (producer_lane() == 0) mbarrier_arrive(shared.barrier(kVFull + count % kNumStages));
  }
}
