// SPDX-License-Identifier: Apache-2.0
// The loop over a segment's keys in which K runs a tile ahead of V, written so that its instructions can be interleaved.
#pragma once

#include "tile/prefill_mma.cuh"
#include "tile/prefill_ring.cuh"

// All keys of a segment, whose rows lie evenly spaced in blocks of 16 if kEven. On entry V of the first tile and K of the first two are on
// their way; on return every warp is done with the ring and nothing is.
//
// The one barrier of iteration i stands between its products. Behind it V of tile i and K of tile i + 1 are there, no warp reads V of tile
// i - 1 or K of tile i any more, and their places take V of tile i + 1 and K of tile i + 2, whose copies start while the tensor cores
// finish and the softmax begins. Nothing stands between the second product and the next first one: its first operands are read before the
// iteration ends, and all it branches on is known by then.
template <bool kEven>
__device__ __forceinline__ void attend_keys_ahead(const AttentionParams& params, const Work& work, KvPipeline& kv, const WarpSpan& span,
                                                  unsigned char* smem, const float* logit_scales, RowState& state, Output& o) {
  unsigned q_tile = smem_address(smem);
  int key_begin = work.segment.kv_begin;
  cp_async_wait<0>();
  __syncthreads();
  bool active = __any_sync(kFullWarp, span.sees(key_begin)), more = key_begin < work.segment.kv_end;
  StepOperands first_operands;
  first_operands.load(LaneAddresses(q_tile, kv.k_stage(0)), 0);
#pragma unroll 1
  for (int iter = 0; more; ++iter) {
    int v_begin = key_begin + kKvTile, k_begin = v_begin + kKvTile;
    bool next_active;
    // The barrier, and the copies behind it.
    auto advance = [&]() {
      // What is made before the barrier hides behind the first product.
      more = v_begin < work.segment.kv_end;
      next_active = __any_sync(kFullWarp, span.sees(v_begin));
      NextRows<true> next_k(params, work, k_begin, kv.slot, kv.k_stage(iter));
      NextRows<false> next_v(params, work, v_begin, kv.v_slot, kv.k_stage(iter + 1));
      cp_async_wait<0>();
      __syncthreads();
      if constexpr (kEven) {
        next_k.start(params);
        next_v.start(params);
      } else {
        load_kv_tile<true>(params, work, k_begin, kv.slot, kv.k_stage(iter));
        load_kv_tile<false>(params, work, v_begin, kv.v_slot, kv.v_stage(iter + 1));
      }
      cp_async_commit();
      // Looked up here, the page has the rest of the iteration to arrive.
      if constexpr (kPaged) {
        kv.v_slot = kv.slot;
        kv.slot = next_kv_slot(params, work, k_begin + kKvTile);
      }
    };
    // One branch around everything: parts that each ask whether the warp sees a key could not be interleaved.
    if (active) {
      bool all_visible = span.sees_all(key_begin);
      Logits s;
      clear(s);
      logits_steps(s, LaneAddresses(q_tile, kv.k_stage(iter)), first_operands);
      RowScales scales(logit_scales);
      advance();
      if constexpr (kTransformLogits) transform_logits(params, work, key_begin, logit_scales, s);
      if (kCustomMask || kUserMask || !all_visible) mask_logits(params, work, key_begin, s);
      FirstWeights first;
      update_softmax<true>(s, scales, state, o, first);
      accumulate_output<true>(o, s, scales, state, first, kv.v_stage(iter));
    } else {
      advance();
    }
    first_operands.load(LaneAddresses(q_tile, kv.k_stage(iter + 1)), 0);
    active = next_active;
    key_begin = v_begin;
  }
  cp_async_wait<0>();
  __syncthreads();
}
