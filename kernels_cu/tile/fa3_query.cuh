// SPDX-License-Identifier: Apache-2.0
// Packed query rows from global memory into a consumer warpgroup's operand tile.
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/fa3_layout.cuh"

// Byte offset of a 16-byte chunk of a row in an operand tile of one warpgroup.
__device__ __forceinline__ unsigned q_chunk_offset(unsigned row, unsigned chunk) {
  return chunk / 8 * kQBlockBytes + Swizzle<kBlockRowBytes>::offset(row, chunk % 8);
}

// Start copying the warp's 16 rows of a segment's tile; rows past the tile's last become zeros.
__device__ __forceinline__ void load_q_rows(const AttentionParams& params, const QueuedWork& work, unsigned q_tile, int consumer, int warp) {
  constexpr int kChunks = kHeadDimQk / 8;
  int lane = lane_idx(), first_row = consumer * kWarpgroupRows + warp * kWarpRows;
  Row lane_row = make_row(params, work.tile, work.segment.kv_head, first_row + lane % kWarpRows);
  long long lane_offset = (static_cast<long long>(work.tile.q_begin) + lane_row.token) * params.q_stride_token + lane_row.head * params.q_stride_head;
  int num_rows = work.tile.num_rows - first_row;
#pragma unroll 4
  for (int step = 0; step < kWarpRows * kChunks / 32; ++step) {
    int idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
    long long offset = __shfl_sync(kFullWarp, lane_offset, row);
    bool valid = row < num_rows;
    const unsigned char* source = static_cast<const unsigned char*>(params.q) + (valid ? offset * 2 + chunk * 16 : 0);
    cp_async_16(q_tile + q_chunk_offset(warp * kWarpRows + row, chunk), source, valid);
  }
  cp_async_commit();
}
