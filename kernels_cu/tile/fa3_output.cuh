// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup's rows to global memory: as final output, or as one part of a merge group.
#pragma once

#include "tile/fa3_softmax.cuh"

// Row of the tile that thread row `r` is.
__device__ __forceinline__ int thread_row(int consumer, int warp, int r) {
  return consumer * kWarpgroupRows + warp * kWarpRows + lane_idx() / 4 + r * 8;
}

// Final rows of one warp to its consumer's buffer, where warpgroup 0 fetches them.
__device__ __forceinline__ void stage_rows(const AttentionParams& params, const QueuedWork& work, const Output& o, RowState& state, int consumer, int warp,
                                           unsigned buffer) {
  int lane = lane_idx(), c = lane % 4;
  reduce_rows(state);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row_in_tile = thread_row(consumer, warp, r), row_in_buffer = warp * kWarpRows + lane / 4 + r * 8;
    bool valid = row_in_tile < work.tile.num_rows;
    Row row = make_row(params, work.tile, work.segment.kv_head, valid ? row_in_tile : 0);
    RowFinish finish = finish_row(params, row, work.segment.kv_head, state.max[r], state.sum[r]);
#pragma unroll
    for (int chunk = 0; chunk < kHeadDimVo / 8; ++chunk) {
      int i = chunk * 4 + r * 2;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(buffer + row_chunk_offset(row_in_buffer, chunk) + c * 4),
                   "r"(pack_pair<kQElement>(o[i] * finish.scale, o[i + 1] * finish.scale))
                   : "memory");
    }
    if (valid && c == 0) store_lse(params, work.tile, row, finish.lse);
  }
}

// Zeros for one warp's rows of a segment without keys.
__device__ __forceinline__ void write_empty_rows(const AttentionParams& params, const QueuedWork& work, int consumer, int warp) {
  int first_row = consumer * kWarpgroupRows + warp * kWarpRows;
#pragma unroll 1
  for (int row_in_tile = first_row; row_in_tile < min(first_row + kWarpRows, work.tile.num_rows); ++row_in_tile) {
    Row row = make_row(params, work.tile, work.segment.kv_head, row_in_tile);
    unsigned* target = reinterpret_cast<unsigned*>(output_row(params, work.tile, row));
    for (int pair = lane_idx(); pair < kHeadDimVo / 2; pair += 32) target[pair] = 0;
    if (lane_idx() == 0) store_lse(params, work.tile, row, finish_row(params, row, work.segment.kv_head, neg_inf(), 0.f).lse);
  }
}

// One part: rows divided by their own denominator, in float, straight from registers.
__device__ __forceinline__ void write_part(const AttentionParams& params, const QueuedWork& work, const Output& o, RowState& state, int consumer, int warp) {
  int c = lane_idx() % 4;
  reduce_rows(state);
  long long first = part_row(work.group, work.tile, work.segment);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row_in_tile = thread_row(consumer, warp, r);
    if (row_in_tile >= work.tile.num_rows) continue;
    RowFinish finish = finish_part(state.max[r], state.sum[r]);
    float* target = params.partial_o + (first + row_in_tile) * kHeadDimVo + c * 2;
#pragma unroll
    for (int chunk = 0; chunk < kHeadDimVo / 8; ++chunk) {
      int i = chunk * 4 + r * 2;
      *reinterpret_cast<float2*>(target + chunk * 8) = {o[i] * finish.scale, o[i + 1] * finish.scale};
    }
    if (c == 0) params.partial_lse[first + row_in_tile] = finish.lse;
  }
}
