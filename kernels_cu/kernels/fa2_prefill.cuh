// SPDX-License-Identifier: Apache-2.0
// Attention for tiles of 64 or 128 packed query rows: each warp owns whole rows, and all warps share a ring of K and V tiles.
#pragma once

#include "tile/prefill_ahead.cuh"
#include "tile/prefill_output.cuh"

// All keys of a segment. On entry the first tile is on its way; on return every warp is done with the ring and nothing is.
__device__ __forceinline__ void attend(const AttentionParams& params, const Work& work, KvPipeline& kv, const WarpSpan& span, unsigned char* smem,
                                       const float2* turns, const float* logit_scales, RowState& state, Output& o) {
  constexpr int kParts = kKvTile / kLogitKeys;
  constexpr bool kTwoStages = kNumStages == 2;
  unsigned q_tile = smem_address(smem);
#pragma unroll 1
  for (int iter = 0, key_begin = work.segment.kv_begin; key_begin < work.segment.kv_end; ++iter, key_begin += kKvTile) {
    bool active = __any_sync(kFullWarp, span.sees(key_begin));
    int next_begin = key_begin + kKvTile;
    // Addresses for kNextRows: made here, they hide behind the wait.
    NextRows<true> next_k(params, work, next_begin, kv.slot, kv.k_stage(iter + 1));
    NextRows<false> next_v(params, work, next_begin, kv.slot, kv.k_stage(iter + 1));
    bool even = evenly_spaced(params);
    // With two stages the whole tile has arrived, and the next one takes the stage that was read an iteration ago.
    cp_async_wait<kTwoStages ? 0 : 1>();
    __syncthreads();
    if constexpr (kTwoStages && !kNextRows) {
      kv.load_k(params, work, iter + 1, next_begin);
      kv.load_v(params, work, iter + 1, next_begin);
    }
    if constexpr (kNextRows) {
      if (kPaged && !even) {
        load_kv_tile<true>(params, work, next_begin, kv.slot, kv.k_stage(iter + 1));
        load_kv_tile<false>(params, work, next_begin, kv.slot, kv.v_stage(iter + 1));
      }
      next_k.start_if<kPaged>(params, even);
      next_v.start_if<kPaged>(params, even);
      if constexpr (kPaged) kv.slot = next_kv_slot(params, work, next_begin + kKvTile);
    }
    if constexpr (kRope && !kFp8Kv) {
      rotate_k_tile(smem + (kv.k_stage(iter) - q_tile), turns, key_begin);
      __syncthreads();
    }
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      int first_key = key_begin + part * kLogitKeys;
      Logits s;
      FirstWeights first;
      if (active) compute_logits(s, q_tile, kv.k_stage(iter) + part * kLogitKeys * kKRowBytes, turns, first_key);
      // With one stage the next keys load under the second product, the next values under the first.
      if (!kTwoStages && part == kParts - 1) {
        __syncthreads();
        kv.load_k(params, work, iter + 1, next_begin);
      }
      if (active) {
        if constexpr (kTransformLogits) transform_logits(params, work, first_key, logit_scales, s);
        if (kCustomMask || kUserMask || !span.sees_all(key_begin)) mask_logits(params, work, first_key, s);
        update_softmax<false>(s, RowScales(logit_scales), state, o, first);
      }
      if (!kTwoStages && part == 0) {
        cp_async_wait<kParts == 1 ? 1 : 0>();
        __syncthreads();
      }
      if (active) accumulate_output<false>(o, s, RowScales(logit_scales), state, first, kv.v_stage(iter) + part * kLogitKeys * kVRowBytes);
    }
    if constexpr (kNextRows) cp_async_commit();
    if constexpr (!kTwoStages) {
      __syncthreads();
      kv.load_v(params, work, iter + 1, next_begin);
    }
  }
  cp_async_wait<0>();
  __syncthreads();
}

using Cursor = WorkCursor<kKeysAhead, false, kKeysAhead, true>;

extern "C" __global__ void __launch_bounds__(kNumWarps * 32, kThreeCtas ? 3 : 2) attention(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  // What is the same for all threads and used once in a while lives in shared memory: the loop has no registers to spare.
  __shared__ Work work, following;
  __shared__ __align__(16) unsigned char cursor_storage[sizeof(Cursor)];
  __shared__ WarpSpan spans[kNumWarps];
  __shared__ float2 turns[kRope ? kRopePairs : 1];
  __shared__ float logit_scales[kScaleQRows ? kCtaTileQ : 1];
  __shared__ int is_last;
  Cursor& cursor = *reinterpret_cast<Cursor*>(cursor_storage);
  if (threadIdx.x == 0) {
    cursor.start(params);
    cp_async_wait<0>();
    following.valid = cursor.next(params, following.tile, following.segment);
  }
  if constexpr (kRope) fill_rope_turns(params, turns);
  __syncthreads();
  if (!following.valid) return;
  int from_queue = 0;
  if constexpr (kEarlyQueries) from_queue = threadIdx.x == 0 ? cursor.take_from_queue(params) : 0;
  KvPipeline kv{smem_address(smem) + kQBytes};
  kv.begin(params, following);
  if constexpr (kEarlyQueries) {
    load_q_tile(params, following, smem, turns, logit_scales);
    cp_async_commit();
  }
#pragma unroll 1
  while (true) {
    unsigned thread = recompute_from(threadIdx.x);
    if (thread < sizeof(Work) / 16) reinterpret_cast<uint4*>(&work)[thread] = reinterpret_cast<const uint4*>(&following)[thread];
    __syncthreads();
    if constexpr (!kEarlyQueries) {
      load_q_tile(params, work, smem, turns, logit_scales);
      cp_async_commit();
    }
    // What the cursor copied came with the keys.
    if constexpr (kKeysAhead) cp_async_wait<0>();
    if (recompute_from(threadIdx.x) == 0) {
      if constexpr (!kEarlyQueries) from_queue = cursor.take_from_queue(params);
      following.valid = cursor.next(params, following.tile, following.segment, from_queue);
    }
    if (lane_idx() == 0) spans[warp_idx()].set(params, work);
    cp_async_wait<0>();
    __syncwarp();
    RowState state;
    Output o = {};
    const WarpSpan& span = spans[warp_idx()];
    if constexpr (!kKeysAhead) {
      attend(params, work, kv, span, smem, turns, logit_scales, state, o);
    } else if (evenly_spaced(params)) {
      attend_keys_ahead<true>(params, work, kv, span, smem, logit_scales, state, o);
    } else {
      attend_keys_ahead<false>(params, work, kv, span, smem, logit_scales, state, o);
    }
    MergeGroup group = load_merge_group(params, work.segment);
    // The next segment's first tile travels while this one's rows are written, and so do its queries, into rows that only this warp reads.
    if (following.valid) {
      kv.begin(params, following);
      if constexpr (kEarlyQueries) {
        load_q_tile(params, following, smem, turns, logit_scales);
        cp_async_commit();
      }
    }
    if constexpr (kEarlyQueries) from_queue = recompute_from(threadIdx.x) == 0 ? cursor.take_from_queue(params) : 0;
    if (work.segment.group < 0) {
      write_direct(params, work, o, state);
    } else {
      write_part(params, work, group, o, state);
      finish_part_of_group(params, work.tile, work.segment, group, &is_last);
    }
    if (!following.valid) return;
    // Every warp is done with this segment's record and its parts.
    __syncthreads();
  }
}
