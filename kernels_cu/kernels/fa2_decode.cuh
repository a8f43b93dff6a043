// SPDX-License-Identifier: Apache-2.0
// Attention for tiles of up to 16 packed query rows: every warp takes its own keys, and the warps join at the end of a segment.
#pragma once

#include "params.cuh"
#include "tile/decode_join.cuh"
#include "tile/decode_logits.cuh"

static_assert(kCtaTileQ == 16, "This kernel holds one m16 tile of query rows per warp.");
static_assert(kKvTile % kBlockKeys == 0, "An iteration of the schedule is a whole number of blocks.");
static_assert(kNumStages >= 3, "Two half-blocks are in flight while a third is worked on.");
static_assert(kSmemBytes == kNumWarps * kNumStages * kSlotBytes + kJoinSlots * sizeof(JoinSpace) + (kQueryInSmem ? kQkSteps * 32 * sizeof(uint4) : 0),
              "decode_smem_bytes in schedule/tiles.py and this kernel must agree.");

// Accumulate the outputs of one block: weights are rounded to the type of the matrix product.
__device__ __forceinline__ void accumulate_values(WarpState& state, const float (&weights)[2][4], unsigned values, int lane) {
  unsigned p[4] = {pack_pair<kMmaElement>(weights[0][0], weights[0][1]), pack_pair<kMmaElement>(weights[0][2], weights[0][3]),
                   pack_pair<kMmaElement>(weights[1][0], weights[1][1]), pack_pair<kMmaElement>(weights[1][2], weights[1][3])};
  unsigned lane_rows = values + value_lane_offset(lane);
#pragma unroll
  for (int group = 0; group < kOutputTiles / 2; ++group) {
    unsigned b[2][2];
    load_values(lane_rows, group, b);
    mma_m16n8k16(state.o[2 * group], p, b[0][0], b[0][1]);
    mma_m16n8k16(state.o[2 * group + 1], p, b[1][0], b[1][1]);
  }
}

extern "C" __global__ void __launch_bounds__(kNumWarps * 32, 1) attention(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ JoinRecord records[kJoinRecords];
  __shared__ long long barriers[2];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned ring = smem_address(smem) + warp * kNumStages * kSlotBytes;
  unsigned char* behind_rings = smem + kNumWarps * kNumStages * kSlotBytes;
  JoinQueue queue = {reinterpret_cast<JoinSpace*>(behind_rings), records, smem_address(barriers), warp, lane, 0, -1, 0};
  uint4* query_space = reinterpret_cast<uint4*>(behind_rings + kJoinSlots * sizeof(JoinSpace));
  __shared__ float2 turns[kPosEncoding == PosEncoding::kRopeLlama ? kRopePairs : 1];
  if constexpr (kPosEncoding == PosEncoding::kRopeLlama) fill_rope_turns(params, turns);
  if (threadIdx.x == 0) JoinQueue::init(smem_address(barriers));

  // Half-blocks, keys and values in turn: kNumStages - 1 of them are in flight while one is worked on.
  BlockLoader loader(params, warp, lane);
#pragma unroll
  for (int i = 0; i < kNumStages - 1; ++i) loader.load_half(params, i % 2 == 0, ring + i * kSlotBytes);
  __syncthreads();

  constexpr bool kKeysFollowKeys = kNumStages % 2 == 1;
  RingPosition at(ring);
  WorkCursor<false> cursor(params);
  Tile tile;
  Segment segment;
  while (cursor.next(params, tile, segment)) {
    RowGroup rows(params, tile, segment, lane, query_space, turns);
    MergeGroup group = load_merge_group(params, segment);
    WarpState state;
    state.clear();
    for (int key = segment.kv_begin + warp * kBlockKeys; key < segment.kv_end; key += kNumWarps * kBlockKeys) {
      float logits[2][4];
      at.wait();
      loader.load_half(params, kKeysFollowKeys, at.behind());
      rows.multiply_keys(at.slot, key, lane, logits);
      rows.finish_logits(params, tile, key, lane, logits);
      state.absorb(logits, tile.num_rows);
      at.advance();
      at.wait();
      loader.load_half(params, !kKeysFollowKeys, at.behind());
      accumulate_values(state, logits, at.slot, lane);
      at.advance();
    }
    state.reduce_sums();
    queue.leave(params, tile, segment, group, state);
  }
  queue.drain(params);
}
