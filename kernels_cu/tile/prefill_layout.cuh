// SPDX-License-Identifier: Apache-2.0
// Who holds what in a prefill CTA: shared-memory regions, the rows of each warp, the rows of each thread.
#pragma once

#include "tile/kv_address.cuh"
#include "tile/swizzle.cuh"
#include "tile/user_variant.cuh"

constexpr bool kFp8Kv = kKvBytes == 1;
constexpr bool kRope = kPosEncoding == PosEncoding::kRopeLlama;
constexpr bool kAlibi = kPosEncoding == PosEncoding::kAlibi;

// Three CTAs to an SM hide more of each other's softmax than two, and leave 168 registers a thread.
constexpr bool kThreeCtas = kCtasPerSm == 3;

constexpr int kWarpRows = kCtaTileQ / kNumWarps;
constexpr int kRowTiles = kWarpRows / 16;    // 16-row matrix tiles of a warp
constexpr int kDimTiles = kHeadDimVo / 8;    // 8-wide column tiles of the output
// Keys whose logits a warp holds at a time. Where the output takes half of all registers, what is done to keys or logits on
// their way takes those that the logits of 64 keys would need.
constexpr bool kBusyLoop = kFp8Kv || kAlibi || kSoftCap || kCustomMask || kRope || kUserLogit || kUserMask;
constexpr int kLogitKeys = kBusyLoop && kRowTiles * kDimTiles >= 32 ? 32 : kKvTile;
constexpr int kKeyTiles = kLogitKeys / 8;    // 8-key column tiles of the logits
constexpr int kThreadRows = 2 * kRowTiles;   // rows a thread holds logits and outputs of
constexpr int kWarpKeys = kKvTile / kNumWarps;
constexpr unsigned kFullWarp = 0xffffffffu;

constexpr int kQRowBytes = kHeadDimQk * 2;
constexpr int kKRowBytes = kHeadDimQk * kKvBytes, kVRowBytes = kHeadDimVo * kKvBytes;
constexpr int kQBytes = kCtaTileQ * kQRowBytes;
constexpr int kKBytes = kKvTile * kKRowBytes, kVBytes = kKvTile * kVRowBytes;
constexpr int kStageBytes = kKBytes + kVBytes;

static_assert(kSmemBytes == kQBytes + kNumStages * kStageBytes, "prefill_smem_bytes in cupyinfer/schedule/tiles.py says otherwise");
static_assert(kNumStages == 1 || kNumStages == 2, "the loop is written for one or two stages");
static_assert(kWarpRows % 16 == 0 && kWarpKeys == 16, "a warp owns whole 16-row tiles and loads 16 keys");

// Logits and outputs lie in matrix accumulators: [row tile][column tile][{row g: 2c, 2c + 1}, {row g + 8: 2c, 2c + 1}],
// with g = lane / 4 and c = lane % 4. Thread row r is row tile r / 2, half r % 2.
using Logits = float[kRowTiles][kKeyTiles][4];
using Output = float[kRowTiles][kDimTiles][4];

__device__ __forceinline__ int warp_idx() { return threadIdx.x / 32; }
__device__ __forceinline__ int lane_idx() { return threadIdx.x % 32; }

// A value the compiler must not look through: what depends on it is computed where it stands instead of being kept in
// registers around the loop, which has none to spare.
__device__ __forceinline__ unsigned recompute_from(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Row of the tile that thread row `r` is.
__device__ __forceinline__ int thread_row(int r) { return warp_idx() * kWarpRows + r * 8 + lane_idx() / 4; }

// A segment and its tile, as thread 0 publishes them in shared memory; `valid` is false past the last one. Aligned, so that no vector
// load of its fields covers bytes of a neighbour, which may be written at that time.
struct alignas(16) Work {
  Tile tile;
  Segment segment;
  bool valid;
};

// What the keys of one iteration mean to a warp, from the intervals of its first and last row: both ends only grow with the
// row. It lives in shared memory, and is read anew in every iteration.
struct WarpSpan {
  int lo_first, lo_last, hi_first, hi_last;

  __device__ __forceinline__ void set(const AttentionParams& params, const Work& work) {
    int first = warp_idx() * kWarpRows, last = min(first + kWarpRows, work.tile.num_rows) - 1;
    Row a = make_row(params, work.tile, work.segment.kv_head, first), b = make_row(params, work.tile, work.segment.kv_head, max(first, last));
    lo_first = a.lo, lo_last = b.lo;
    hi_first = min(a.hi, work.segment.kv_end - 1), hi_last = min(b.hi, work.segment.kv_end - 1);
  }
  // Some row sees some key of the tile that starts there.
  __device__ __forceinline__ bool sees(int key_begin) const { return key_begin <= hi_last && key_begin + kKvTile > lo_first; }
  // Every row sees every key, before a custom mask.
  __device__ __forceinline__ bool sees_all(int key_begin) const { return key_begin >= lo_last && key_begin + kKvTile - 1 <= hi_first; }
};
