// SPDX-License-Identifier: Apache-2.0
// The warps that carry the consumers' rows: packed queries from global memory into their operand tiles, finished outputs back.
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/fa3_layout.cuh"

// Byte offset of a 16-byte chunk of a row in an operand tile of one warpgroup.
__device__ __forceinline__ unsigned q_chunk_offset(unsigned row, unsigned chunk) {
  return chunk / 8 * kQBlockBytes + Swizzle<kBlockRowBytes>::offset(row, chunk % 8);
}

// Start copying a consumer's query rows from `row_begin` on; rows past the tile's last become zeros. `full` counts the lanes when their
// bytes are there.
__device__ __forceinline__ void load_query_rows(const AttentionParams& params, const QueuedWork& work, unsigned q_tile, int consumer, int row_begin,
                                                unsigned full) {
  static_assert(kRowsOfWarp == 32, "a row per lane");
  constexpr int kChunks = kHeadDimQk / 8, kUnroll = kProducerRegisters < 40 ? 2 : 4;
  int lane = lane_idx(), first_row = consumer * kWarpgroupRows + row_begin, num_rows = work.tile.num_rows - first_row;
  Row lane_row = make_row(params, work.tile, work.segment.kv_head, first_row + lane);
  long long lane_offset = (static_cast<long long>(work.tile.q_begin) + lane_row.token) * params.q_stride_token + lane_row.head * params.q_stride_head;
#pragma unroll kUnroll
  for (int step = 0; step < kChunks; ++step) {
    int idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
    long long offset = __shfl_sync(kFullWarp, lane_offset, row);
    bool valid = row < num_rows;
    const unsigned char* source = static_cast<const unsigned char*>(params.q) + (valid ? offset * 2 + chunk * 16 : 0);
    cp_async_16(q_tile + q_chunk_offset(row_begin + row, chunk), source, valid);
  }
  cp_async_arrive(full);
}

// Store a consumer's finished rows from `row_begin` on, in 16-byte stores.
__device__ __forceinline__ void store_output_rows(const AttentionParams& params, const QueuedWork& work, const Shared& shared, int consumer, int row_begin) {
  constexpr int kChunks = kORowBytes / 16, kSteps = kWarpRows * kChunks / 32;
  int lane = lane_idx();
#pragma unroll 1
  for (int warp = row_begin / kWarpRows; warp < (row_begin + kRowsOfWarp) / kWarpRows; ++warp) {
    const unsigned char* staging = shared.o_rows(consumer, warp);
    int first_row = consumer * kWarpgroupRows + warp * kWarpRows, num_rows = work.tile.num_rows - first_row;
    if (num_rows <= 0) break;
    Row lane_row = make_row(params, work.tile, work.segment.kv_head, first_row + lane % kWarpRows);
    long long lane_target = reinterpret_cast<long long>(output_row(params, work.tile, lane_row));
#pragma unroll 2
    for (int step = 0; step < kSteps; ++step) {
      int idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
      uint4* target = reinterpret_cast<uint4*>(__shfl_sync(kFullWarp, lane_target, row)) + chunk;
      if (row < num_rows) *target = *reinterpret_cast<const uint4*>(staging + Swizzle<kORowBytes>::offset(row, chunk));
    }
  }
}

// One of the warps, over all segments of the CTA: of every consumer the rows from `row_begin` on.
__device__ __forceinline__ void carry_rows(const AttentionParams& params, const Shared& shared, int row_begin) {
  unsigned num_outputs = 0;
  bool owes_output = false;
#pragma unroll 1
  for (unsigned slot = 0;; ++slot) {
    const QueuedWork& work = wait_for_work(shared, slot);
    // Queries of this segment, then the output of the one before; the other way round where both take the same place.
#pragma unroll 1
    for (int step = 0; step < 2; ++step) {
      if ((step == 0) == kJoinSegments) {
        if (!work.valid) continue;
#pragma unroll 1
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
          int buffer = shared.q_buffer(consumer, slot);
          mbarrier_sleep(shared.barrier(kQEmpty + buffer), (slot / kQBuffers & 1) ^ 1);
          load_query_rows(params, work, shared.q_tile(consumer, slot), consumer, row_begin, shared.barrier(kQFull + buffer));
        }
      } else if (slot > 0) {
        if (owes_output) {
#pragma unroll 1
          for (int consumer = 0; consumer < kConsumers; ++consumer) {
            mbarrier_sleep(shared.barrier(kOFull + consumer), num_outputs & 1);
            store_output_rows(params, shared.control->works[(slot - 1) % kWorkSlots], shared, consumer, row_begin);
            __syncwarp();
            if (lane_idx() == 0) mbarrier_arrive(shared.barrier(kOEmpty + consumer));
          }
          ++num_outputs;
        }
        release_work(shared, slot - 1);
      }
    }
    if (!work.valid) return;
    owes_output = work.is_staged();
  }
}
