// SPDX-License-Identifier: Apache-2.0
// The warps that carry the consumers' rows: packed queries from global memory into their operand tiles, finished outputs back.
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/fa3_layout.cuh"

static_assert(kRowsOfWarp == 32, "a lane knows where a row lies");

// Byte offset of a 16-byte chunk of a row in an operand tile of one warpgroup.
__device__ __forceinline__ unsigned q_chunk_offset(unsigned row, unsigned chunk) {
  return chunk / 8 * kQBlockBytes + Swizzle<kBlockRowBytes>::offset(row, chunk % 8);
}

// Start copying a consumer's query rows from `row_begin` on; rows past the tile's last become zeros. `full` counts the lanes when their
// bytes are there.
__device__ __forceinline__ void load_query_rows(const AttentionParams& params, const QueuedWork& work, unsigned q_tile, int consumer, int row_begin,
                                                unsigned full) {
  constexpr int kChunks = kHeadDimQk / 8, kUnroll = kFewRegisters ? 1 : 4;
  int lane = producer_lane(), first_row = consumer * kWarpgroupRows + row_begin, num_rows = work.tile.num_rows - first_row;
  // Lanes past the last row stand for it: an address that is not read must be one that exists.
  Row lane_row = make_row(params, work.tile, work.segment.kv_head, min(first_row + lane, work.tile.num_rows - 1));
  const unsigned short* lane_source = static_cast<const unsigned short*>(params.q) +
                                      (static_cast<long long>(work.tile.q_begin) + lane_row.token) * params.q_stride_token +
                                      lane_row.head * params.q_stride_head;
#pragma unroll kUnroll
  for (int step = 0; step < kChunks; ++step) {
    int idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
    const uint4* source = reinterpret_cast<const uint4*>(__shfl_sync(kFullWarp, reinterpret_cast<long long>(lane_source), row)) + chunk;
    cp_async_16(q_tile + q_chunk_offset(row_begin + row, chunk), source, row < num_rows);
  }
  cp_async_arrive(full);
}

// Store a consumer's finished rows from `row_begin` on, in 16-byte stores.
__device__ __forceinline__ void store_output_rows(const AttentionParams& params, const QueuedWork& work, const Shared& shared, int consumer, int row_begin) {
  constexpr int kChunks = kORowBytes / 16, kUnroll = kFewRegisters ? 1 : 2;
  const unsigned char* staging = shared.o_rows(consumer, row_begin / kWarpRows);
  int lane = producer_lane(), first_row = consumer * kWarpgroupRows + row_begin, num_rows = work.tile.num_rows - first_row;
  long long lane_target = reinterpret_cast<long long>(output_row(params, work.tile, make_row(params, work.tile, work.segment.kv_head, first_row + lane)));
#pragma unroll kUnroll
  for (int step = 0; step < kChunks; ++step) {
    int idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
    uint4* target = reinterpret_cast<uint4*>(__shfl_sync(kFullWarp, lane_target, row)) + chunk;
    if (row < num_rows) *target = *reinterpret_cast<const uint4*>(staging + Swizzle<kORowBytes>::offset(row, chunk));
  }
}

// One of the warps, over all segments of the CTA: of every consumer the rows from `row_begin` on.
__device__ __forceinline__ void carry_rows(const AttentionParams& params, const Shared& shared, int row_begin) {
  unsigned num_outputs = 0;
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
        const QueuedWork& finished = shared.work(slot - 1);
        if (finished.is_staged()) {
#pragma unroll 1
          for (int consumer = 0; consumer < kConsumers; ++consumer) {
            mbarrier_sleep(shared.barrier(kOFull + consumer), num_outputs & 1);
            store_output_rows(params, finished, shared, consumer, row_begin);
            __syncwarp();
            if (producer_lane() == 0) mbarrier_arrive(shared.barrier(kOEmpty + consumer));
          }
          ++num_outputs;
        }
        release_work(shared, slot - 1);
      }
    }
    if (!work.valid) return;
  }
}
