// SPDX-License-Identifier: Apache-2.0
// Attention for tiles of up to 16 packed query rows: every warp takes its own keys, and the warps join at the end of a segment.
#pragma once

#include "params.cuh"
#include "tile/decode_logits.cuh"
#include "tile/decode_state.cuh"

static_assert(kCtaTileQ == 16, "This kernel holds one m16 tile of query rows per warp.");
static_assert(kKvTile % kBlockKeys == 0, "An iteration of the schedule is a whole number of blocks.");
static_assert(kSmemBytes == kNumWarps * kNumStages * kStageBytes + kNumWarps * kStateWords * 4,
              "decode_smem_bytes in schedule/tiles.py and this kernel must agree.");

// Accumulate the outputs of one block: weights are rounded to the type of the matrix product.
__device__ __forceinline__ void accumulate_values(WarpState& state, const float (&weights)[2][4], unsigned values, int lane) {
  unsigned p[4] = {pack_pair<kMmaElement>(weights[0][0], weights[0][1]), pack_pair<kMmaElement>(weights[0][2], weights[0][3]),
                   pack_pair<kMmaElement>(weights[1][0], weights[1][1]), pack_pair<kMmaElement>(weights[1][2], weights[1][3])};
#pragma unroll
  for (int group = 0; group < kOutputTiles / 2; ++group) {
    unsigned b[2][2];
    load_values(values, group, lane, b);
    mma_m16n8k16(state.o[2 * group], p, b[0][0], b[0][1]);
    mma_m16n8k16(state.o[2 * group + 1], p, b[1][0], b[1][1]);
  }
}

extern "C" __global__ void __launch_bounds__(kNumWarps * 32, 1) attention(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ int is_last;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* state_slots = reinterpret_cast<float*>(smem + kNumWarps * kNumStages * kStageBytes);
  unsigned ring = smem_address(smem) + warp * kNumStages * kStageBytes;

  BlockLoader loader(params, ring, warp, lane);
#pragma unroll
  for (int stage = 0; stage < kNumStages - 1; ++stage) loader.issue(params);

  WorkCursor cursor(params);
  Tile tile;
  Segment segment;
  int stage = 0;
  while (cursor.next(params, tile, segment)) {
    RowGroup rows(params, tile, segment, lane, state_slots);
    MergeGroup group = load_merge_group(params, segment);
    WarpState state;
    state.clear();
    for (int key = segment.kv_begin + warp * kBlockKeys; key < segment.kv_end; key += kNumWarps * kBlockKeys) {
      cp_async_wait<kNumStages - 2>();
      // Every lane's copies have landed, and every lane is done with the stage that the next copies overwrite.
      __syncwarp();
      loader.issue(params);
      unsigned block = ring + stage * kStageBytes;
      float logits[2][4];
      rows.compute_logits(params, tile, block, key, lane, logits);
      state.absorb(logits);
      accumulate_values(state, logits, block + kKBlockBytes, lane);
      stage = stage + 1 == kNumStages ? 0 : stage + 1;
    }
    state.reduce_sums();
    if (tile.num_rows <= 8) {
      join_and_write<1>(params, tile, segment, rows.row, group, state, state_slots, warp, lane);
    } else {
      join_and_write<2>(params, tile, segment, rows.row, group, state, state_slots, warp, lane);
    }
    if (segment.group >= 0) finish_part_of_group(params, tile, segment, group, &is_last);
  }
}
