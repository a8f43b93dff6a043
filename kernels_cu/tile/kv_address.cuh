// SPDX-License-Identifier: Apache-2.0
// Where the row of one key lies in the K or V cache, in 64-bit arithmetic throughout.
#pragma once

#include "tile/work.cuh"

constexpr int kKvBytes = (kKvElement == Element::kE4m3 || kKvElement == Element::kE5m2) ? 1 : 2;

// A key as the page table sees it: a page id and a slot. Ragged caches are one page without end.
struct KvSlot {
  int page;
  int slot;
};

__device__ __forceinline__ KvSlot kv_slot(const AttentionParams& params, const Tile& tile, int key) {
  if constexpr (kPaged) {
    int page_idx = divide(key, params.by_page_size);
    return {__ldg(params.page_indices + tile.kv_base + page_idx), key - page_idx * params.page_size};
  } else {
    return {0, tile.kv_base + key};
  }
}

// Byte offset of a key's row of one head from the start of k.
__device__ __forceinline__ long long k_row_offset(const AttentionParams& params, KvSlot at, int kv_head) {
  return (at.page * params.k_stride_page + at.slot * params.k_stride_token + kv_head * params.k_stride_head) * kKvBytes;
}

__device__ __forceinline__ long long v_row_offset(const AttentionParams& params, KvSlot at, int kv_head) {
  return (at.page * params.v_stride_page + at.slot * params.v_stride_token + kv_head * params.v_stride_head) * kKvBytes;
}
