// SPDX-License-Identifier: Apache-2.0
// Attention for tiles of 64 or 128 packed query rows: each warp owns whole rows, and all warps share a ring of K and V tiles.
#pragma once

#include "tile/prefill_output.cuh"

// The K and V tiles of one segment on their way through the ring. `slot` is this lane's key in the next tile to load, looked
// up one iteration before it is needed.
struct KvPipeline {
  unsigned ring;
  int next_begin;
  KvSlot slot;

  __device__ __forceinline__ unsigned k_stage(int iter) const { return ring + (kNumStages == 2 ? (iter & 1) * kStageBytes : 0); }
  __device__ __forceinline__ unsigned v_stage(int iter) const { return k_stage(iter) + kKBytes; }

  __device__ __forceinline__ void load_k(const AttentionParams& params, const Work& work, int iter) {
    if (next_begin < work.segment.kv_end) load_kv_tile<true>(params, work, next_begin, slot, k_stage(iter));
    cp_async_commit();
  }
  __device__ __forceinline__ void load_v(const AttentionParams& params, const Work& work, int iter) {
    if (next_begin < work.segment.kv_end) load_kv_tile<false>(params, work, next_begin, slot, v_stage(iter));
    cp_async_commit();
    next_begin += kKvTile;
    slot = lane_kv_slot(params, work, next_begin);
  }
  // Start the first tile of a segment; every warp must be done with the ring.
  __device__ __forceinline__ void begin(const AttentionParams& params, const Work& work) {
    next_begin = work.segment.kv_begin;
    slot = lane_kv_slot(params, work, next_begin);
    load_k(params, work, 0);
    load_v(params, work, 0);
  }
};

// All keys of a segment. On entry the first tile is on its way; on return every warp is done with the ring and nothing is.
__device__ __forceinline__ void attend(const AttentionParams& params, const Work& work, KvPipeline& kv, unsigned char* smem, const float2* turns,
                                       RowState& state, Output& o) {
  WarpSpan span(params, work);
  unsigned q_tile = smem_address(smem);
#pragma unroll 1
  for (int iter = 0, key_begin = work.segment.kv_begin; key_begin < work.segment.kv_end; ++iter, key_begin += kKvTile) {
    bool active = span.sees(key_begin);
    Logits s;
    cp_async_wait<kNumStages == 2 ? 0 : 1>();
    __syncthreads();
    if constexpr (kNumStages == 2) kv.load_k(params, work, iter + 1), kv.load_v(params, work, iter + 1);
    if constexpr (kRope && !kFp8Kv) {
      rotate_k_tile(smem + (kv.k_stage(iter) - q_tile), turns, key_begin);
      __syncthreads();
    }
    if (active) compute_logits(s, q_tile, kv.k_stage(iter), turns, key_begin);
    if constexpr (kNumStages == 1) {
      __syncthreads();
      kv.load_k(params, work, iter + 1);
    }
    if (active) {
      if constexpr (kTransformLogits) transform_logits(params, work, key_begin, state, s);
      if (kCustomMask || !span.sees_all(key_begin)) mask_logits(params, work, key_begin, s);
      update_softmax(s, state, o);
    }
    if constexpr (kNumStages == 1) {
      cp_async_wait<1>();
      __syncthreads();
    }
    if (active) accumulate_output(o, s, state, kv.v_stage(iter));
    if constexpr (kNumStages == 1) {
      __syncthreads();
      kv.load_v(params, work, iter + 1);
    }
  }
  cp_async_wait<0>();
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kNumWarps * 32, 2) attention(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ Work works[2];
  __shared__ __align__(16) unsigned char cursor_storage[sizeof(WorkCursor)];
  __shared__ float2 turns[kRope ? kRopePairs : 1];
  __shared__ float row_scales[kScaleQRows ? kCtaTileQ : 1];
  __shared__ int is_last;
  // The cursor lives in shared memory, and thread 0 alone moves it: the loop has no registers to spare.
  WorkCursor& cursor = *reinterpret_cast<WorkCursor*>(cursor_storage);
  if (threadIdx.x == 0) {
    cursor = WorkCursor(params);
    works[0].valid = cursor.next(params, works[0].tile, works[0].segment);
  }
  if constexpr (kRope) fill_rope_turns(params, turns);
  __syncthreads();
  if (!works[0].valid) return;
  KvPipeline kv{smem_address(smem) + kQBytes};
  kv.begin(params, works[0]);
#pragma unroll 1
  for (int current = 0;; current ^= 1) {
    const Work& work = works[current];
    Work& following = works[current ^ 1];
    load_q_tile(params, work, smem, turns, row_scales);
    cp_async_commit();
    if (threadIdx.x == 0) following.valid = cursor.next(params, following.tile, following.segment);
    cp_async_wait<0>();
    __syncwarp();
    RowState state(params, work.segment.kv_head, row_scales);
    Output o = {};
    attend(params, work, kv, smem, turns, state, o);
    // The next segment's first tile travels while this one's rows are written.
    if (following.valid) kv.begin(params, following);
    if (work.segment.group < 0) {
      write_direct(params, work, o, state, smem);
    } else {
      write_part(params, work, o, state);
      finish_part_of_group(params, work.tile, work.segment, &is_last);
    }
    if (!following.valid) return;
    __syncthreads();
  }
}
