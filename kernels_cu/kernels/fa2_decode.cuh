// SPDX-License-Identifier: Apache-2.0
// Attention for tiles of up to 16 packed query rows: every warp takes its own keys, and the warps join at the end of a segment.
#pragma once

#include "params.cuh"
#include "tile/decode_join.cuh"
#include "tile/decode_logits.cuh"

static_assert(kCtaTileQ == 16, "This kernel holds one m16 tile of query rows per warp.");
static_assert(kKvTile % kBlockKeys == 0, "An iteration of the schedule is a whole number of blocks.");
static_assert(kNumWarps > 0 && (kNumWarps & (kNumWarps - 1)) == 0, "Blocks are dealt to the warps by the low bits of their number.");
static_assert(kNumStages >= 3, "Two half-blocks are in flight while a third is worked on.");
static_assert(kSmemBytes == kNumWarps * kNumStages * kSlotBytes + kJoinSlots * sizeof(JoinSpace) + (kQueryInSmem ? kQkSteps * 32 * sizeof(uint4) : 0),
              "decode_smem_bytes in schedule/tiles.py and this kernel must agree.");

// Accumulate the outputs of one block.
__device__ __forceinline__ void accumulate_values(WarpState& state, const unsigned (&weights)[kBlockParts][4], unsigned values, int lane) {
  unsigned lane_rows = values + value_lane_offset(lane);
#pragma unroll
  for (int group = 0; group < kOutputTiles / 2; ++group) {
    unsigned b[kBlockParts][2][2];
    load_values(lane_rows, group, b);
#pragma unroll
    for (int i = 0; i < 2 * kBlockParts; ++i) mma_m16n8k16(state.o[2 * group + i % 2], weights[i / 2], b[i / 2][i % 2][0], b[i / 2][i % 2][1]);
  }
}

extern "C" __global__ void __launch_bounds__(kNumWarps * 32, 1) attention(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ JoinRecord records[kJoinRecords];
  __shared__ long long barriers[2];
  int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  unsigned ring = smem_address(smem) + warp * kNumStages * kSlotBytes;
  unsigned char* behind_rings = smem + kNumWarps * kNumStages * kSlotBytes;
  JoinQueue queue = {reinterpret_cast<JoinSpace*>(behind_rings), records, smem_address(barriers), warp, lane, 0, -1};
  uint4* query_space = reinterpret_cast<uint4*>(behind_rings + kJoinSlots * sizeof(JoinSpace));
  __shared__ float2 turns[kPosEncoding == PosEncoding::kRopeLlama ? kRopePairs : 1];
  if constexpr (kPosEncoding == PosEncoding::kRopeLlama) fill_rope_turns(params, turns);
  if (threadIdx.x == 0) JoinQueue::init(smem_address(barriers));

  // Half-blocks, keys and values in turn: kNumStages - 1 of them are in flight while one is worked on.
  BlockLoader loader(params, warp, lane);
#pragma unroll 1
  for (int i = -1; i < kNumStages - 1; ++i) loader.load_half<true>(params, i % 2 == 0, ring + i * kSlotBytes);
  __syncthreads();

  constexpr bool kKeysFollowKeys = kNumStages % 2 == 1;
  RingPosition at(ring);
  WorkCursor<false> cursor(params);
  BlockDeal deal;
  bool is_last;
  do {
    Tile tile;
    Segment segment;
    if (!cursor.next(params, tile, segment)) break;
    is_last = !cursor.has_more();
    queue.begin(tile, segment);
    RowGroup rows(params, tile, segment, lane, query_space, turns);
    MergeGroup group = load_merge_group(params, segment);
    WarpState state;
    state.clear();
    int key = deal.first_key(segment, warp);
    for (; key < segment.kv_end; key += kNumWarps * kBlockKeys) {
      float logits[kKeyTiles][4];
      unsigned weights[kBlockParts][4];
      at.wait();
      loader.load_half<false>(params, kKeysFollowKeys, at.behind());
      rows.multiply_keys(at.slot, key, lane, logits);
      rows.finish_logits(params, tile, key, lane, logits);
      state.absorb(logits, rows.scale, tile.num_rows, weights);
      at.advance();
      at.wait();
      loader.load_half<false>(params, !kKeysFollowKeys, at.behind());
      accumulate_values(state, weights, at.slot, lane);
      at.advance();
    }
    state.reduce_sums();
    queue.turn(params, is_last, tile.num_rows, group, BlockDeal::share(segment, key, warp), state);
  } while (!is_last);
}
