// SPDX-License-Identifier: Apache-2.0
// The share of one CTA: the segments it works on, in order, as docs/ARCHITECTURE.md defines them.
#pragma once

#include "params.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/sync.cuh"

struct Tile {
  int request, q_begin, row_begin, num_rows;
  int kv_begin, kv_end, kv_len, kv_base;
  int qo_len, split_group, split_part, mask_begin;

  __device__ __forceinline__ int num_iters() const { return max(1, (kv_end - kv_begin + kKvTile - 1) / kKvTile); }
};

__device__ __forceinline__ Tile load_tile(const AttentionParams& params, int tile_idx) {
  const int4* record = reinterpret_cast<const int4*>(params.tiles) + 3ll * tile_idx;
  int4 a = __ldg(record), b = __ldg(record + 1), c = __ldg(record + 2);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w};
}

constexpr int kCtaWorkInts = 8;

// Keys [kv_begin, kv_end) of one unit, of which those before first_seen lie left of every row's window; part `part` of merge group `group`, or the whole unit when group is -1.
struct Segment {
  int kv_head;
  int kv_begin, kv_end;
  int group, part;
  int first_seen;
};

// Walks the segments of this CTA. One that runs ahead of the arithmetic keeps the next segment's tile on its way, so that moving
// on does not wait for memory; one that follows finds the tiles in L1. One without registers to spare reads a tile back from shared
// memory, where it lies, field by field. One that copies lies in shared memory, runs ahead, and never waits itself: the copies of its
// thread must have arrived before `next`. One with a queue has its whole units dealt out in the first two waves only: CTAs of one SM do not
// run equally fast, so from then on each takes whichever unit is next.
template <bool kRunsAhead, bool kFewRegisters = false, bool kCopies = false, bool kQueue = false>
struct WorkCursor {
  // At head_dim 256 the 16-row kernel has no registers for a tile ahead, and waits for it where a segment begins; copies in flight last
  // longer than that.
  static constexpr bool kKeepsAhead = kRunsAhead && (kCtaTileQ > 16 || kHeadDimVo <= 128);
  int num_whole_units, whole_unit, wave;
  int unit, iter, remaining;
  int first_group, first_part, tail_group, tail_part;
  alignas(16) Tile ahead;

  __device__ __forceinline__ explicit WorkCursor(const AttentionParams& params) { start(params); }

  __device__ __forceinline__ void start(const AttentionParams& params) {
    whole_unit = blockIdx.x, wave = 0;
    const int4* record = reinterpret_cast<const int4*>(params.cta_work + kCtaWorkInts * blockIdx.x);
    int4 a = __ldg(record), b = __ldg(record + 1);
    // Most launches begin with whole units: ask for the first one's tile without waiting for the record that says so.
    if constexpr (kRunsAhead) {
      int guess = min(divide(blockIdx.x, params.by_num_kv_heads), params.max_tiles - 1);
      if constexpr (kKeepsAhead && !kCopies) {
        look_at(params, guess);
      } else {
        prefetch_l2(params.tiles + 12ll * guess);
      }
    }
    num_whole_units = a.x, unit = a.y, iter = a.z, remaining = a.w;
    first_group = b.x, first_part = b.y, tail_group = b.z, tail_part = b.w;
    // Two copies to one place may land in either order, so a cursor that copies waits for the record.
    if (kKeepsAhead && (kCopies || whole_unit >= num_whole_units)) look_ahead(params);
  }

  // The unit that `next` is to go on with after the segment it moves to: ask before each `next` but the first, as early as there is a
  // register for the answer, which takes a trip to memory. Every CTA asks until it is told of a unit that does not exist; the last one to
  // ask leaves the queue as the plan set it.
  __device__ __forceinline__ int take_from_queue(const AttentionParams& params) const {
    int grid = gridDim.x, num_queued = num_whole_units - 2 * grid;
    if (num_queued <= 0 || whole_unit >= num_whole_units) return num_whole_units;
    int* queue = const_cast<int*>(params.cta_work) + kCtaWorkInts * grid;
    int taken = atomicAdd(queue, 1);
    if (taken == num_queued + grid - 1) *queue = 0;
    return 2 * grid + taken;
  }

  // Move to the next segment; false when the share is done.
  __device__ __forceinline__ bool next(const AttentionParams& params, Tile& tile, Segment& segment, int from_queue = 0) {
    if constexpr (!kKeepsAhead) look_ahead(params);
    if constexpr (kFewRegisters) asm volatile("" ::: "memory");
    tile = ahead;
    if constexpr (kFewRegisters) asm volatile("" ::: "memory");
    if (whole_unit < num_whole_units) {
      segment = {kv_head_of(params, whole_unit), tile.kv_begin, tile.kv_end, -1, 0, 0};
      ++wave;
      if constexpr (kFewRegisters) {
        unsigned cta, grid;
        asm volatile("mov.u32 %0, %%ctaid.x;\n\tmov.u32 %1, %%nctaid.x;" : "=r"(cta), "=r"(grid));
        whole_unit = wave * grid + ((wave & 1) ? grid - 1 - cta : cta);
      } else {
        whole_unit = kQueue && wave > 1 ? from_queue : wave * gridDim.x + ((wave & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      }
    } else if (remaining > 0) {
      int taken = min(tile.num_iters() - iter, remaining);
      int kv_begin = tile.kv_begin + iter * kKvTile;
      // What follows the first segment is whole, but for the one the share ends in.
      bool is_tail = first_group == kFirstIsBehind && taken == remaining;
      segment = {kv_head_of(params, unit), kv_begin, min(tile.kv_end, kv_begin + taken * kKvTile), is_tail ? tail_group : max(first_group, -1),
                 is_tail ? tail_part : first_part, 0};
      first_group = kFirstIsBehind;
      remaining -= taken;
      unit += params.unit_step;
      iter = 0;
    } else {
      return false;
    }
    // A cache may have dropped what lies left of the window: its pages are not to be read.
    int first_position = tile.kv_len - tile.qo_len + divide(tile.row_begin, params.by_group_size);
    segment.first_seen = params.window_left >= 0 ? max(segment.kv_begin, first_position - params.window_left) : segment.kv_begin;
    if (tile.split_group >= 0) segment.group = tile.split_group + segment.kv_head, segment.part = tile.split_part;
    if constexpr (kKeepsAhead) look_ahead(params);
    return true;
  }

  __device__ __forceinline__ bool has_more() const { return whole_unit < num_whole_units || remaining > 0; }

 private:
  static constexpr int kFirstIsBehind = -2;

  static __device__ __forceinline__ int kv_head_of(const AttentionParams& params, int some_unit) {
    return some_unit - divide(some_unit, params.by_num_kv_heads) * params.num_kv_heads;
  }

  __device__ __forceinline__ void look_ahead(const AttentionParams& params) {
    if (whole_unit < num_whole_units) {
      look_at(params, divide(whole_unit, params.by_num_kv_heads));
    } else if (remaining > 0) {
      look_at(params, divide(unit, params.by_num_kv_heads));
    }
  }

  __device__ __forceinline__ void look_at(const AttentionParams& params, int tile_idx) {
    if constexpr (kCopies) {
      const int4* record = reinterpret_cast<const int4*>(params.tiles) + 3ll * tile_idx;
      unsigned target = smem_address(&ahead);
#pragma unroll
      for (int i = 0; i < 3; ++i) cp_async_16(target + i * 16, record + i);
      cp_async_commit();
    } else {
      ahead = load_tile(params, tile_idx);
    }
  }
};
