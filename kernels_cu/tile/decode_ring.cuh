// SPDX-License-Identifier: Apache-2.0
// The private K/V ring of one warp: blocks of 16 keys stream through it, across segment and request boundaries.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "tile/kv_address.cuh"
#include "tile/prefill_swizzle.cuh"

constexpr int kBlockKeys = 16;
constexpr int kKRowChunks = kHeadDimQk * kKvBytes / 16;
constexpr int kVRowChunks = kHeadDimVo * kKvBytes / 16;
constexpr int kKBlockBytes = kBlockKeys * kKRowChunks * 16;
constexpr int kVBlockBytes = kBlockKeys * kVRowChunks * 16;
constexpr int kStageBytes = kKBlockBytes + kVBlockBytes;

// Runs ahead of the arithmetic. Page ids are loaded one block before the copies that need them, so that no copy waits for one.
struct BlockLoader {
  WorkCursor cursor;
  Tile tile;
  Segment segment;
  int warp, lane;
  int key;        // first key of the next block, past the end when there is none
  bool active;
  KvSlot slot;    // of key `key + lane % 16`
  unsigned ring;  // shared address of stage 0
  int stage;

  __device__ __forceinline__ BlockLoader(const AttentionParams& params, unsigned ring_address, int warp_idx, int lane_idx)
      : cursor(params), warp(warp_idx), lane(lane_idx), ring(ring_address), stage(0) {
    segment.kv_end = 0;
    key = 0;
    active = true;
    seek(params);
  }

  // Copy the next block into the next stage, and look up the page ids of the one after it. Always closes one group.
  __device__ __forceinline__ void issue(const AttentionParams& params) {
    if (active) {
      // Lanes 0-15 address the K rows, lanes 16-31 the V rows; -1 marks a key past the end, which is zero-filled.
      long long offset = -1;
      if (key + (lane & 15) < segment.kv_end) {
        offset = lane < 16 ? k_row_offset(params, slot, segment.kv_head) : v_row_offset(params, slot, segment.kv_head);
      }
      unsigned destination = ring + stage * kStageBytes;
      copy_rows<kKRowChunks>(static_cast<const char*>(params.k), destination, offset, 0);
      copy_rows<kVRowChunks>(static_cast<const char*>(params.v), destination + kKBlockBytes, offset, 16);
      key += kNumWarps * kBlockKeys;
      seek(params);
    }
    cp_async_commit();
    stage = stage + 1 == kNumStages ? 0 : stage + 1;
  }

 private:
  // Find this warp's next block at or after `key`, and load its page ids.
  __device__ __forceinline__ void seek(const AttentionParams& params) {
    while (key >= segment.kv_end) {
      active = cursor.next(params, tile, segment);
      if (!active) return;
      key = segment.kv_begin + warp * kBlockKeys;
    }
    int own_key = key + (lane & 15);
    if (own_key < segment.kv_end) slot = kv_slot(params, tile, own_key);
  }

  template <int kRowChunks>
  __device__ __forceinline__ void copy_rows(const char* base, unsigned destination, long long offset, int first_lane) {
    static_assert(kBlockKeys * kRowChunks % 32 == 0, "a block is copied by whole warps");
#pragma unroll
    for (int step = 0; step < kBlockKeys * kRowChunks / 32; ++step) {
      int idx = step * 32 + lane;
      int row = idx / kRowChunks, chunk = idx % kRowChunks;
      long long row_offset = __shfl_sync(0xffffffffu, offset, first_lane + row);
      unsigned target = destination + Swizzle<kRowChunks * 16>::offset(row, chunk);
      cp_async_16(target, base + (row_offset < 0 ? 0 : row_offset + chunk * 16), row_offset >= 0);
    }
  }
};
