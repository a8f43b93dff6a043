// SPDX-License-Identifier: Apache-2.0
// The hooks of a user variant, where kernels call them; without a variant each of them is the identity and costs nothing.
#pragma once

#include "tile/rows.cuh"

// Hooks index the variant's tensors. They are given rows and keys that exist, if need be others than the ones asked for, rather than
// guarded by a branch: loads that are the same for a whole row stay one load. What comes of keys that the row does not see is dropped.
// All functions are templates because `params.user` exists in kernels with a variant only.

// What every hook may know of its row: request, q_token, q_position, q_index, qo_head, kv_head, qo_len, kv_len.
#define USER_ROW                                                                                                                     \
  tile.request, row.token, row.position, tile.q_begin + row.token, row.head, divide(row.head, params.by_group_size), tile.qo_len, \
      tile.kv_len

// One element of a query row of the tile.
template <class Params>
__device__ __forceinline__ float user_query(const Params& params, const Tile& tile, const Row& row, int dim, float query) {
  if constexpr (kUserQuery) return params.user.query_hook(query, dim, USER_ROW);
  return query;
}

// A logit in natural units, scaled by sm_scale.
template <class Params>
__device__ __forceinline__ float user_logit(const Params& params, const Tile& tile, const Row& row, int kv_token, float logit) {
  if constexpr (kUserLogit) return params.user.logit_hook(logit, min(kv_token, tile.kv_len - 1), USER_ROW);
  return logit;
}

// Whether the row sees a key of its interval.
template <class Params>
__device__ __forceinline__ bool user_mask(const Params& params, const Tile& tile, const Row& row, int kv_token) {
  if constexpr (kUserMask) return params.user.mask_hook(min(kv_token, tile.kv_len - 1), USER_ROW);
  return true;
}

// One element of a final output row of the tile.
template <class Params>
__device__ __forceinline__ float user_output(const Params& params, const Tile& tile, const Row& row, int dim, float output) {
  if constexpr (kUserOutput) return params.user.output_hook(output, dim, USER_ROW);
  return output;
}

#undef USER_ROW
