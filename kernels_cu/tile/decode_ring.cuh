// SPDX-License-Identifier: Apache-2.0
// The private K/V ring of one warp: blocks of 16 keys stream through it by halves, across segment and request boundaries.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/sync.cuh"
#include "tile/kv_address.cuh"
#include "tile/prefill_swizzle.cuh"
#include "tile/rows.cuh"

constexpr int kBlockKeys = 16;
constexpr int kKRowChunks = kHeadDimQk * kKvBytes / 16;
constexpr int kVRowChunks = kHeadDimVo * kKvBytes / 16;
// A slot of the ring holds the keys of one block, or its values.
constexpr int kSlotBytes = kBlockKeys * 16 * (kKRowChunks > kVRowChunks ? kKRowChunks : kVRowChunks);

// Runs ahead of the arithmetic. Page ids are loaded one block before the copies that need them, so that no copy waits for one.
struct BlockLoader {
  WorkCursor<true> cursor;
  Tile tile;
  Segment segment;
  int warp, lane;
  int key;           // first key of the next block, past the end when there is none
  bool active;
  KvSlot slot;       // of key `key + lane % 16`
  long long offset;  // of that key's row: K in lanes 0-15, V in lanes 16-31; -1 for a key no row sees, which is zero-filled

  __device__ __forceinline__ BlockLoader(const AttentionParams& params, int warp_idx, int lane_idx)
      : cursor(params), key(0), warp(warp_idx), lane(lane_idx), active(true) {
    segment.kv_end = 0;
    seek(params);
  }

  // Copy the next half-block, which the caller knows to be keys or values.
  __device__ __forceinline__ void load_half(const AttentionParams& params, bool keys, unsigned slot_address) {
    if (keys) {
      load_keys(params, slot_address);
    } else {
      load_values(params, slot_address);
    }
  }

 private:
  // Copy the keys of the next block to a slot. Always closes one group, as does load_values.
  __device__ __forceinline__ void load_keys(const AttentionParams& params, unsigned slot_address) {
    if (active) {
      offset = -1;
      if (is_seen(key + (lane & 15))) {
        offset = lane < 16 ? k_row_offset(params, slot, segment.kv_head) : v_row_offset(params, slot, segment.kv_head);
      }
      copy_rows<kKRowChunks>(static_cast<const char*>(params.k), slot_address, 0);
    }
    cp_async_commit();
  }

  // Copy the values of the same block, and look up the page ids of the one after it.
  __device__ __forceinline__ void load_values(const AttentionParams& params, unsigned slot_address) {
    if (active) {
      copy_rows<kVRowChunks>(static_cast<const char*>(params.v), slot_address, 16);
      key += kNumWarps * kBlockKeys;
      seek(params);
    }
    cp_async_commit();
  }

  // Whether any row of the tile may see the key; the others' pages may not exist.
  __device__ __forceinline__ bool is_seen(int some_key) const { return some_key >= segment.first_seen && some_key < segment.kv_end; }

  // Find this warp's next block at or after `key`, and load its page ids.
  __device__ __forceinline__ void seek(const AttentionParams& params) {
    while (key >= segment.kv_end) {
      active = cursor.next(params, tile, segment);
      if (!active) return;
      key = segment.kv_begin + warp * kBlockKeys;
      if (warp == 0) prefetch_query(params);
    }
    int own_key = key + (lane & 15);
    if (is_seen(own_key)) slot = kv_slot(params, tile, own_key);
  }

  // The query is read when the arithmetic gets to the segment: have it in L2 by then.
  __device__ __forceinline__ void prefetch_query(const AttentionParams& params) const {
    Row row = make_row(params, tile, segment.kv_head, lane & 15);
    if ((lane & 15) >= tile.num_rows) return;
    const unsigned short* q = static_cast<const unsigned short*>(params.q) + (static_cast<long long>(tile.q_begin) + row.token) * params.q_stride_token +
                              row.head * params.q_stride_head;
    for (int dim = lane < 16 ? 0 : 64; dim < kHeadDimQk; dim += 128) prefetch_l2(q + dim);
  }

  template <int kRowChunks>
  __device__ __forceinline__ void copy_rows(const char* base, unsigned destination, int first_lane) {
    static_assert(kBlockKeys * kRowChunks % 32 == 0, "a block is copied by whole warps");
#pragma unroll
    for (int step = 0; step < kBlockKeys * kRowChunks / 32; ++step) {
      int idx = step * 32 + lane;
      int row = idx / kRowChunks, chunk = idx % kRowChunks;
      long long row_offset = __shfl_sync(0xffffffffu, offset, first_lane + row);
      cp_async_16(destination + Swizzle<kRowChunks * 16>::offset(row, chunk), base + (row_offset < 0 ? 0 : row_offset + chunk * 16), row_offset >= 0);
    }
  }
};

// Where a warp's arithmetic is in its ring.
struct RingPosition {
  unsigned ring, slot;

  __device__ __forceinline__ explicit RingPosition(unsigned ring_address) : ring(ring_address), slot(ring_address) {}

  // Wait for this slot's half-block. Every lane is then also done with the slot behind, which may be overwritten.
  __device__ __forceinline__ void wait() const {
    cp_async_wait<kNumStages - 2>();
    __syncwarp();
  }
  __device__ __forceinline__ unsigned behind() const { return slot == ring ? ring + (kNumStages - 1) * kSlotBytes : slot - kSlotBytes; }
  __device__ __forceinline__ void advance() { slot = slot == ring + (kNumStages - 1) * kSlotBytes ? ring : slot + kSlotBytes; }
};
