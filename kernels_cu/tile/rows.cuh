// SPDX-License-Identifier: Apache-2.0
// Packed query rows: which token and head a row is, and the interval of keys it sees.
#pragma once

#include "tile/work.cuh"

struct Row {
  int token;     // query token within its request
  int head;      // query head
  int position;  // key position the token stands at: kv_len - qo_len + token
  int lo, hi;    // first and last key it sees; hi < lo when there is none
};

__device__ __forceinline__ Row make_row(const AttentionParams& params, const Tile& tile, int kv_head, int row_in_tile) {
  // Hooks of a user variant are given rows that exist: the last one stands for those that the tile does not have.
  int packed = tile.row_begin + (kUserLogit || kUserMask ? min(row_in_tile, tile.num_rows - 1) : row_in_tile);
  Row row;
  row.token = divide(packed, params.by_group_size);
  row.head = kv_head * params.group_size + (packed - row.token * params.group_size);
  row.position = tile.kv_len - tile.qo_len + row.token;
  row.hi = params.causal ? min(row.position, tile.kv_len - 1) : tile.kv_len - 1;
  row.lo = params.window_left >= 0 ? max(0, row.position - params.window_left) : 0;
  if (row_in_tile >= tile.num_rows) row.hi = -1, row.lo = 0;
  return row;
}

// Bit of the packed custom mask for one row and key. The caller has checked that the key lies in the row's interval.
__device__ __forceinline__ bool custom_mask_bit(const AttentionParams& params, const Tile& tile, const Row& row, int key) {
  long long bit = static_cast<long long>(row.token) * tile.kv_len + key;
  return (__ldg(params.mask + tile.mask_begin + (bit >> 3)) >> (bit & 7)) & 1;
}
