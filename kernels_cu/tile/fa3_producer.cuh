// SPDX-License-Identifier: Apache-2.0
// The warps that copy K and V: one walks the CTA's segments and publishes them, and each keeps its tiles arriving ahead of the consumers.
#pragma once

#include "tile/fa3_layout.cuh"

// Publish the next segment in slot `count` of the work ring.
__device__ __forceinline__ void publish_next(const AttentionParams& params, const Shared& shared, unsigned count) {
  unsigned slot = count % kWorkSlots, phase = count / kWorkSlots & 1;
  mbarrier_sleep(shared.barrier(kWorkEmpty + slot), phase ^ 1);
  QueuedWork& work = shared.work(slot);
  if (producer_lane() == 0) {
    Cursor& cursor = shared.control->cursor;
    work.segment.kv_begin = work.segment.kv_end = 0;
    work.valid = cursor.next(params, work.tile, work.segment);
    if (work.valid) work.group = load_merge_group(params, work.segment);
  }
  __syncwarp();
  if (producer_lane() < kConsumers && work.valid) {
    int first_row = producer_lane() * kWarpgroupRows, last_row = max(first_row, min(first_row + kWarpgroupRows, work.tile.num_rows) - 1);
    work.seen_from[producer_lane()] = make_row(params, work.tile, work.segment.kv_head, last_row).lo;
    work.seen_to[producer_lane()] = min(make_row(params, work.tile, work.segment.kv_head, first_row).hi, work.segment.kv_end - 1);
  }
  __syncwarp();
  if (producer_lane() < kConsumers) mbarrier_arrive(shared.barrier(kWorkFull + slot));
}

// Where the box of this lane lies for the tile that starts at `key_begin`: page and slot of its first key. Boxes without a key that the
// segment sees lie on a page that does not exist.
struct BoxOrigin {
  int page, slot;

  __device__ __forceinline__ BoxOrigin(const Fa3Params& params, const QueuedWork& work, int key_begin) {
    if constexpr (kPaged) {
      int key = key_begin + producer_lane() * params.box_rows;
      page = params.num_pages, slot = 0;
      if (key < work.segment.kv_end && key + params.box_rows > work.segment.first_seen) {
        int page_idx = divide(key, params.base.by_page_size);
        page = __ldg(params.base.page_indices + work.tile.kv_base + page_idx);
        slot = key - page_idx * params.base.page_size;
      }
    } else {
      page = 0, slot = work.tile.kv_base + key_begin;
    }
  }
};

// The warp: start copying a tile of kBlocks column blocks, lane l its l-th box of rows.
template <int kBlocks>
__device__ __forceinline__ void copy_tile(const Fa3Params& params, const TensorMap& map, unsigned tile, unsigned barrier, const BoxOrigin& origin, int kv_head) {
  if (producer_lane() == 0) mbarrier_arrive_expect(barrier, kBlocks * kKvBlockBytes);
  __syncwarp();
  if (producer_lane() * params.box_rows < kKvTile) {
    unsigned target = tile + producer_lane() * params.box_rows * kBlockRowBytes;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      tma_load_4d(target + block * kKvBlockBytes, map, barrier, block * kBlockColumns, origin.slot, kv_head, origin.page);
    }
  }
  __syncwarp();
}

// Start copying tile `count` of fp8 values from `key_begin` on, for the warps that turn it, which cannot know where it ends.
__device__ __forceinline__ void copy_values_to_turn(const Fa3Params& params, const Shared& shared, const QueuedWork& work, int key_begin, unsigned count,
                                                    const BoxOrigin& origin) {
  wait_empty(shared, kVTurned, count);
  if (producer_lane() == 0) {
    shared.control->copied[count % kCopyStages] = {work.segment.first_seen - key_begin, work.tile.kv_len - key_begin};
  }
  copy_tile<kVoBlocks>(params, params.v, shared.v_copy(count), shared.barrier(kVCopied + count % kCopyStages), origin, work.segment.kv_head);
}

// There are `count` tiles.
__device__ __forceinline__ void end_values_to_turn(const Shared& shared, unsigned count) {
  wait_empty(shared, kVTurned, count);
  if (producer_lane() == 0) {
    shared.control->copied[count % kCopyStages].first_missing = KeyBounds::kNoTile;
    mbarrier_arrive(shared.barrier(kVCopied + count % kCopyStages));
  }
}

// Copy every K tile of the CTA, of fp8 every V tile as well, and publish its segments. What it needs of a segment is read from shared
// memory each time: this warp has few registers, and publishing takes most of them.
__device__ __forceinline__ void produce_k(const Fa3Params& params, const Shared& shared) {
  // Before the first segment, one without keys: publishing has one place, behind the first tile of the segment before.
  if (producer_lane() == 0) {
    tma_prefetch_map(params.k);
    shared.control->cursor = Cursor(params.base);
    QueuedWork& none = shared.work(kWorkSlots - 1);
    none.segment.kv_begin = none.segment.kv_end = 0;
    none.valid = true;
  }
  __syncwarp();
  unsigned count = 0;
#pragma unroll 1
  for (unsigned slot = 0; shared.work(slot - 1).valid; ++slot) {
    // No other slot takes its place before it is left, since this warp fills them.
    const QueuedWork& work = shared.work(slot - 1);
    int key_begin = work.segment.kv_begin;
    BoxOrigin origin(params, work, key_begin);
#pragma unroll 1
    do {
      if (key_begin < work.segment.kv_end) {
        // The page table is read one tile ahead.
        BoxOrigin next_origin(params, work, key_begin + kKvTile);
        wait_empty(shared, kKEmpty, count);
        if constexpr (kQFp8 && !kPaged) origin = BoxOrigin(params, work, key_begin);  // a register less than one kept
        copy_tile<kQkBlocks>(params, params.k, shared.k_tile(count), shared.barrier(kKFull + count % kNumStages), origin, work.segment.kv_head);
        if constexpr (kQFp8) copy_values_to_turn(params, shared, work, key_begin, count, origin);
        origin = next_origin;
        ++count;
      }
      // Records of the next segment are read while the first tile of this one travels.
      if (key_begin == work.segment.kv_begin) publish_next(params.base, shared, slot);
      key_begin += kKvTile;
    } while (key_begin < work.segment.kv_end);
  }
  if constexpr (kQFp8) end_values_to_turn(shared, count);
}

// Copy every V tile of the CTA.
__device__ __forceinline__ void produce_v(const Fa3Params& params, const Shared& shared) {
  if (producer_lane() == 0) tma_prefetch_map(params.v);
  unsigned count = 0;
#pragma unroll 1
  for (unsigned slot = 0;; ++slot) {
    const QueuedWork& work = wait_for_work(shared, slot);
    if (!work.valid) return;
    int key_begin = work.segment.kv_begin;
    BoxOrigin origin(params, work, key_begin);
#pragma unroll 1
    for (; key_begin < work.segment.kv_end; key_begin += kKvTile, ++count) {
      BoxOrigin next_origin(params, work, key_begin + kKvTile);
      wait_empty(shared, kVEmpty, count);
      copy_tile<kVoBlocks>(params, params.v, shared.v_tile(count), shared.barrier(kVFull + count % kNumStages), origin, work.segment.kv_head);
      origin = next_origin;
    }
    release_work(shared, slot);
  }
}
