// SPDX-License-Identifier: Apache-2.0
// Registers to global memory: a segment's rows as final output, or as one part of a merge group.
#pragma once

#include "ptx/ldmatrix.cuh"
#include "tile/output.cuh"
#include "tile/prefill_mma.cuh"

// Two neighbouring column tiles hold 16 dims. A thread has {2c, 2c + 1} of each half, or, after fp8 values, 4c .. 4c + 3.
struct DimBlock {
  float x[4];

  __device__ __forceinline__ DimBlock(const Output& o, int r, int block, float scale) {
    const float(&a)[4] = o[r / 2][block * 2];
    const float(&b)[4] = o[r / 2][block * 2 + 1];
    int half = r % 2 * 2;
    x[0] = a[half] * scale;
    x[1] = (kFp8Kv ? b[half] : a[half + 1]) * scale;
    x[2] = (kFp8Kv ? a[half + 1] : b[half]) * scale;
    x[3] = b[half + 1] * scale;
  }
};

// The user's transform on a block of a final row that begins with dimension `dim`.
__device__ __forceinline__ void transform_dims(const AttentionParams& params, const Tile& tile, const Row& row, int dim, int c, DimBlock& dims) {
#pragma unroll
  for (int i = 0; i < 4; ++i) dims.x[i] = user_output(params, tile, row, dim + (kFp8Kv ? c * 4 + i : i / 2 * 8 + c * 2 + i % 2), dims.x[i]);
}

// Final rows: through the warp's own query rows in shared memory, so that they leave in 16-byte stores.
__device__ __forceinline__ void write_direct(const AttentionParams& params, const Work& work, Output& o, RowState& state, unsigned char* q_tile) {
  int lane = recompute_from(lane_idx()), c = lane % 4;
  unsigned char* staging = q_tile + warp_idx() * kWarpRows * kQRowBytes;
  reduce_rows(state);
  // Other lanes may still be reading queries.
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    int row_in_warp = r * 8 + lane / 4;
    bool valid = thread_row(r) < work.tile.num_rows;
    Row row = make_row(params, work.tile, work.segment.kv_head, valid ? thread_row(r) : 0);
    RowFinish finish = finish_row(params, row, work.segment.kv_head, state.max[r], state.sum[r]);
#pragma unroll
    for (int block = 0; block < kHeadDimVo / 16; ++block) {
      DimBlock dims(o, r, block, finish.scale);
      if constexpr (kUserOutput) {
        if (valid) transform_dims(params, work.tile, row, block * 16, c, dims);
        // What hooks load for all blocks at once would take more registers than there are.
        __syncwarp();
      }
      unsigned low = pack_pair<kOElement>(dims.x[0], dims.x[1]), high = pack_pair<kOElement>(dims.x[2], dims.x[3]);
      if constexpr (kFp8Kv) {
        *reinterpret_cast<uint2*>(staging + Swizzle<kORowBytes>::offset(row_in_warp, block * 2 + c / 2) + c % 2 * 8) = {low, high};
      } else {
        *reinterpret_cast<unsigned*>(staging + Swizzle<kORowBytes>::offset(row_in_warp, block * 2) + c * 4) = low;
        *reinterpret_cast<unsigned*>(staging + Swizzle<kORowBytes>::offset(row_in_warp, block * 2 + 1) + c * 4) = high;
      }
    }
    if (valid && c == 0) store_lse(params, work.tile, row, finish.lse);
  }
  __syncwarp();
  constexpr int kChunks = kORowBytes / 16;
  lane = recompute_from(lane);
  int first_row = warp_idx() * kWarpRows;
  Row lane_row = make_row(params, work.tile, work.segment.kv_head, first_row + lane % kWarpRows);
  long long lane_target = reinterpret_cast<long long>(output_row(params, work.tile, lane_row));
#pragma unroll 4
  for (int step = 0; step < kWarpRows * kChunks / 32; ++step) {
    int idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
    uint4* target = reinterpret_cast<uint4*>(__shfl_sync(kFullWarp, lane_target, row)) + chunk;
    if (first_row + row < work.tile.num_rows) *target = *reinterpret_cast<const uint4*>(staging + Swizzle<kORowBytes>::offset(row, chunk));
  }
  // The next unit's queries go where the rows were staged.
  __syncwarp();
}

// One part: rows divided by their own denominator, in float, straight from registers.
__device__ __forceinline__ void write_part(const AttentionParams& params, const Work& work, const MergeGroup& group, const Output& o,
                                           RowState& state) {
  int c = lane_idx() % 4;
  reduce_rows(state);
  long long first = part_row(group, work.tile, work.segment);
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    if (thread_row(r) >= work.tile.num_rows) continue;
    RowFinish finish = finish_part(state.max[r], state.sum[r]);
    float* target = params.partial_o + (first + thread_row(r)) * kHeadDimVo;
#pragma unroll
    for (int block = 0; block < kHeadDimVo / 16; ++block) {
      DimBlock dims(o, r, block, finish.scale);
      if constexpr (kFp8Kv) {
        *reinterpret_cast<float4*>(target + block * 16 + c * 4) = {dims.x[0], dims.x[1], dims.x[2], dims.x[3]};
      } else {
        *reinterpret_cast<float2*>(target + block * 16 + c * 2) = {dims.x[0], dims.x[1]};
        *reinterpret_cast<float2*>(target + block * 16 + 8 + c * 2) = {dims.x[2], dims.x[3]};
      }
    }
    if (c == 0) params.partial_lse[first + thread_row(r)] = finish.lse;
  }
}
