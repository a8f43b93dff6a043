// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup's rows to global memory: as final output, or as one part of a merge group.
#pragma once

#include "tile/fa3_softmax.cuh"

// Row of the tile that thread row `r` is.
__device__ __forceinline__ int thread_row(int consumer, int warp, int r) {
  return consumer * kWarpgroupRows + warp * kWarpRows + lane_idx() / 4 + r * 8;
}

// Accumulators next to each other in a row of output, and how many there are from one such group to the next of the thread's row. fp8
// products have the even dims of 16 first (see turn_values), so a thread's accumulators of one row are four dims in a row.
constexpr int kRunDims = kQFp8 ? 4 : 2;
constexpr int kRuns = kHeadDimVo / (4 * kRunDims);
// Accumulator `e` of run `run` in thread row `r`.
__device__ __forceinline__ constexpr int run_element(int run, int r, int e) { return run * 2 * kRunDims + r * 2 + (kQFp8 ? e % 2 * 4 + e / 2 : e); }

// Final rows of one warp to where warpgroup 0 fetches them.
__device__ __forceinline__ void stage_rows(const AttentionParams& params, const QueuedWork& work, const Output& o, RowState& state, int consumer, int warp,
                                           unsigned char* staging) {
  int lane = lane_idx(), c = lane % 4;
  reduce_rows(state);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row_in_tile = thread_row(consumer, warp, r), row_in_warp = lane / 4 + r * 8;
    bool valid = row_in_tile < work.tile.num_rows;
    Row row = make_row(params, work.tile, work.segment.kv_head, valid ? row_in_tile : 0);
    RowFinish finish = finish_row(params, row, work.segment.kv_head, state.max[r], state.sum[r]);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      auto packed = [&](int e) { return pack_pair<kOElement>(o[run_element(run, r, e)] * finish.scale, o[run_element(run, r, e + 1)] * finish.scale); };
      if constexpr (kQFp8) {
        *reinterpret_cast<uint2*>(staging + Swizzle<kORowBytes>::offset(row_in_warp, run * 2 + c / 2) + c % 2 * 8) = {packed(0), packed(2)};
      } else {
        *reinterpret_cast<unsigned*>(staging + Swizzle<kORowBytes>::offset(row_in_warp, run) + c * 4) = packed(0);
      }
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
    float* target = params.partial_o + (first + row_in_tile) * kHeadDimVo + c * kRunDims;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      auto value = [&](int e) { return o[run_element(run, r, e)] * finish.scale; };
      if constexpr (kQFp8) {
        *reinterpret_cast<float4*>(target + run * 16) = {value(0), value(1), value(2), value(3)};
      } else {
        *reinterpret_cast<float2*>(target + run * 8) = {value(0), value(1)};
      }
    }
    if (c == 0) params.partial_lse[first + row_in_tile] = finish.lse;
  }
}
