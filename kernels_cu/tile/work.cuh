// SPDX-License-Identifier: Apache-2.0
// The share of one CTA: the segments it works on, in order, as docs/ARCHITECTURE.md defines them.
#pragma once

#include "params.cuh"

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

// Keys [kv_begin, kv_end) of one unit; part `part` of merge group `group`, or the whole unit when group is -1.
struct Segment {
  int kv_head;
  int kv_begin, kv_end;
  int group, part;
};

// Walks the segments of this CTA. Cheap enough to keep two: one for loads that run ahead, one for arithmetic.
struct WorkCursor {
  int num_whole_units, wave;
  int unit, iter, remaining;
  int first_group, first_part, tail_group, tail_part;

  __device__ __forceinline__ explicit WorkCursor(const AttentionParams& params) : wave(0) {
    const int4* record = reinterpret_cast<const int4*>(params.cta_work) + 2 * blockIdx.x;
    int4 a = __ldg(record), b = __ldg(record + 1);
    num_whole_units = a.x, unit = a.y, iter = a.z, remaining = a.w;
    first_group = b.x, first_part = b.y, tail_group = b.z, tail_part = b.w;
  }

  // Move to the next segment; false when the share is done.
  __device__ __forceinline__ bool next(const AttentionParams& params, Tile& tile, Segment& segment) {
    int column = (wave & 1) ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    int whole_unit = wave * gridDim.x + column;
    if (whole_unit < num_whole_units) {
      ++wave;
      tile = load_tile(params, whole_unit / params.num_kv_heads);
      segment = {whole_unit % params.num_kv_heads, tile.kv_begin, tile.kv_end, -1, 0};
    } else if (remaining > 0) {
      int tile_idx = unit / params.num_kv_heads;
      tile = load_tile(params, tile_idx);
      int taken = min(tile.num_iters() - iter, remaining);
      remaining -= taken;
      int kv_begin = tile.kv_begin + iter * kKvTile;
      segment = {unit - tile_idx * params.num_kv_heads, kv_begin, min(tile.kv_end, kv_begin + taken * kKvTile), first_group, first_part};
      ++unit;
      iter = 0;
      // What follows the first segment is whole, but for the one the share ends in.
      bool last_is_next = remaining > 0;
      first_group = -1;
      if (last_is_next) {
        Tile following = load_tile(params, unit / params.num_kv_heads);
        if (following.num_iters() >= remaining) first_group = tail_group, first_part = tail_part;
      }
    } else {
      return false;
    }
    if (tile.split_group >= 0) segment.group = tile.split_group + segment.kv_head, segment.part = tile.split_part;
    return true;
  }
};
