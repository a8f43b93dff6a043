// SPDX-License-Identifier: Apache-2.0
// The warps that carry the consumers' rows: packed queries from global memory into their buffers, finished outputs back.
#pragma once

#include "ptx/cp_async.cuh"
#include "tile/fa3_layout.cuh"

static_assert(kRowsOfWarp == 32, "a lane knows where a row lies");
// How often a warp carries rows of each consumer.
constexpr int kRowsTurns = kWarpgroupRows / kRowsOfWarp / kRowsWarps;
constexpr int kQueryBoxBytes = kRowsOfWarp * kBlockRowBytes;

// Where the box of packed rows from `row_begin` of a consumer on lies. A group divides 32, and so does it every first row.
struct RowsOrigin {
  int head, token;

  __device__ __forceinline__ RowsOrigin(const AttentionParams& params, const QueuedWork& work, int first_row)
      : head(work.segment.kv_head * params.group_size), token(work.tile.q_begin + divide(work.tile.row_begin + first_row, params.by_group_size)) {}
};

// Start copying a consumer's query rows from `row_begin` on; `full` counts the lanes when their bytes are there. Rows past the tile's
// last become zeros, or other requests' queries, of which nothing leaves its row.
__device__ __forceinline__ void load_query_rows(const Fa3Params& params, const QueuedWork& work, unsigned buffer, int consumer, int row_begin, unsigned full) {
  const AttentionParams& base = params.base;
  int lane = producer_lane(), first_row = consumer * kWarpgroupRows + row_begin;
  if (params.q_boxes) {
    if (lane == 0) {
      RowsOrigin origin(base, work, first_row);
      mbarrier_arrive_expect(full, kQkBlocks * kQueryBoxBytes);
#pragma unroll
      for (int block = 0; block < kQkBlocks; ++block) {
        tma_load_3d(buffer + block * kQBlockBytes + row_begin * kBlockRowBytes, params.q, full, block * kBlockColumns, origin.head, origin.token);
      }
    }
    return;
  }
  constexpr int kChunks = kHeadDimQk * kElementBytes / 16, kUnroll = kFewRegisters ? 1 : 4;
  int num_rows = work.tile.num_rows - first_row;
  // Lanes past the last row stand for it: an address that is not read must be one that exists.
  Row lane_row = make_row(base, work.tile, work.segment.kv_head, min(first_row + lane, work.tile.num_rows - 1));
  long long lane_offset = (static_cast<long long>(work.tile.q_begin) + lane_row.token) * base.q_stride_token + lane_row.head * base.q_stride_head;
  const unsigned char* lane_source = static_cast<const unsigned char*>(base.q) + lane_offset * kElementBytes;
#pragma unroll kUnroll
  for (int step = 0; step < kChunks; ++step) {
    int idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
    const uint4* source = reinterpret_cast<const uint4*>(__shfl_sync(kFullWarp, reinterpret_cast<long long>(lane_source), row)) + chunk;
    cp_async_16(buffer + query_chunk_offset(row_begin + row, chunk), source, row < num_rows);
  }
  cp_async_arrive(full);
}

// Store a consumer's finished rows from `row_begin` on. On return the buffer may be written again.
__device__ __forceinline__ void store_output_rows(const Fa3Params& params, const QueuedWork& work, unsigned buffer, int consumer, int row_begin) {
  const AttentionParams& base = params.base;
  int lane = producer_lane(), first_row = consumer * kWarpgroupRows + row_begin, num_rows = work.tile.num_rows - first_row;
  if (params.o_boxes && num_rows >= kRowsOfWarp) {
    if (lane == 0) {
      RowsOrigin origin(base, work, first_row);
#pragma unroll
      for (int block = 0; block < kOBlocks; ++block) {
        tma_store_3d(buffer + block * kOBlockBytes + row_begin * kOBlockRowBytes, params.o, block * kOBlockColumns, origin.head, origin.token);
      }
      tma_wait_stores_read();
    }
  } else {
    constexpr int kChunks = kHeadDimVo / 8, kUnroll = kFewRegisters ? 1 : 2;
    long long lane_target = reinterpret_cast<long long>(output_row(base, work.tile, make_row(base, work.tile, work.segment.kv_head, first_row + lane)));
#pragma unroll kUnroll
    for (int step = 0; step < kChunks; ++step) {
      int idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
      uint4* target = reinterpret_cast<uint4*>(__shfl_sync(kFullWarp, lane_target, row)) + chunk;
      if (row < num_rows) *target = *static_cast<const uint4*>(__cvta_shared_to_generic(buffer + output_chunk_offset(row_begin + row, chunk)));
    }
    fence_async_proxy();
  }
  __syncwarp();
}

// One of the warps, over all segments of the CTA: of every consumer 32 rows from `row_begin` on, and more where it is the only one.
__device__ __forceinline__ void carry_rows(const Fa3Params& params, const Shared& shared, int row_begin) {
  if (producer_lane() == 0) {
    if (params.q_boxes) tma_prefetch_map(params.q);
    if (params.o_boxes) tma_prefetch_map(params.o);
  }
  bool loads = true;
  int num_left = kQBuffers;  // rounds with outputs to store, once there is nothing more to load
#pragma unroll 1
  for (unsigned slot = 0; loads || num_left > 0; ++slot) {
    if (loads) loads = wait_for_work(shared, slot).valid;
    if (!loads) --num_left;
    // Of each buffer first the outputs it holds, then the queries that follow.
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      int buffer = shared.q_buffer(consumer, slot);
      if (slot >= kQBuffers) {
        const QueuedWork& finished = shared.work(slot - kQBuffers);
        mbarrier_sleep(shared.barrier(kQDone + buffer), (slot / kQBuffers & 1) ^ 1);
        if (finished.is_staged()) {
#pragma unroll 1
          for (int turn = 0; turn < kRowsTurns; ++turn) {
            store_output_rows(params, finished, shared.q_tile(consumer, slot), consumer, row_begin + turn * kRowsOfWarp);
          }
        }
      }
      if (loads) {
#pragma unroll 1
        for (int turn = 0; turn < kRowsTurns; ++turn) {
          load_query_rows(params, shared.work(slot), shared.q_tile(consumer, slot), consumer, row_begin + turn * kRowsOfWarp, shared.barrier(kQFull + buffer));
        }
      }
    }
    if (slot >= kQBuffers) release_work(shared, slot - kQBuffers);
  }
}
