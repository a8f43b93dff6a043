// SPDX-License-Identifier: Apache-2.0
// The ring of K and V tiles in shared memory that all warps of a prefill CTA read.
#pragma once

#include "tile/prefill_load.cuh"

// K runs a tile ahead of V, so that an iteration has its one barrier between the products (prefill_ahead.cuh). Rows that are copied as they
// are, and logits that are all made at once, allow it; elsewhere the barrier comes first. Three CTAs to an SM leave no registers for it but
// for ragged keys on Hopper.
constexpr bool kAheadFitsThreeCtas = !kPaged && __CUDA_ARCH__ == 900;
constexpr bool kKeysAhead = kNextRows && !kRope && kLogitKeys == kKvTile && (!kThreeCtas || kAheadFitsThreeCtas);
// Queries leave for shared memory before the rows of the segment ahead of them are written, where there are registers for it.
constexpr bool kEarlyQueries = kKeysAhead || kThreeCtas;

// The K and V tiles of one segment on their way through the ring: tile i, which starts at its `key_begin`, lies in stage
// i % kNumStages. The next tile's keys are looked up in the page table one iteration before they are needed.
struct KvPipeline {
  unsigned ring;
  KvSlot slot;    // of the next K tile, and the next V tile unless kKeysAhead
  KvSlot v_slot;  // of the next V tile, if kKeysAhead

  __device__ __forceinline__ unsigned k_stage(int iter) const { return ring + (kNumStages == 2 ? (iter & 1) * kStageBytes : 0); }
  __device__ __forceinline__ unsigned v_stage(int iter) const { return k_stage(iter) + kKBytes; }

  __device__ __forceinline__ void load_k(const AttentionParams& params, const Work& work, int iter, int key_begin) {
    load_kv_tile<true>(params, work, key_begin, slot, k_stage(iter));
    cp_async_commit();
  }
  __device__ __forceinline__ void load_v(const AttentionParams& params, const Work& work, int iter, int key_begin) {
    load_kv_tile<false>(params, work, key_begin, slot, v_stage(iter));
    cp_async_commit();
    if constexpr (kPaged) slot = kNextRows ? next_kv_slot(params, work, key_begin + kKvTile) : lane_kv_slot(params, work, key_begin + kKvTile);
  }
  // Start the first tile of a segment, if kKeysAhead also the second one of K; every warp must be done with the ring.
  __device__ __forceinline__ void begin(const AttentionParams& params, const Work& work) {
    int key_begin = work.segment.kv_begin, next_begin = key_begin + kKvTile;
    if constexpr (kPaged) slot = lane_kv_slot(params, work, key_begin);
    load_k(params, work, 0, key_begin);
    if constexpr (kKeysAhead) {
      load_kv_tile<false>(params, work, key_begin, slot, v_stage(0));
      if constexpr (kPaged) slot = lane_kv_slot(params, work, next_begin);
      load_k(params, work, 1, next_begin);
      if constexpr (kPaged) {
        v_slot = next_kv_slot(params, work, next_begin);
        slot = next_kv_slot(params, work, next_begin + kKvTile);
      }
    } else {
      load_v(params, work, 0, key_begin);
    }
  }
};
