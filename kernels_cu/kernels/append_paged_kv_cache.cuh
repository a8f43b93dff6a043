// SPDX-License-Identifier: Apache-2.0
// Copies new key and value rows into the slots of a paged cache; cupyinfer/backends/append.py mirrors the parameters.
#pragma once

#include "helper/grid_walk.cuh"
#include "helper/index_array.cuh"

// Either K or V: where its new rows are and where its cache is. Strides are in bytes.
struct AppendSide {
  const unsigned char* rows;  // [num_tokens, num_kv_heads, row_bytes]
  unsigned char* cache;       // [num_pages, page_size, num_kv_heads, row_bytes] by strides
  long long rows_stride_token, rows_stride_head;
  long long cache_stride_page, cache_stride_slot, cache_stride_head;
  long long row_bytes;
};

struct AppendParams {
  AppendSide key, value;
  IndexArray batch_indices, positions;  // one entry per token
  IndexArray kv_indices, kv_indptr;     // the page table
  long long num_tokens, num_pages;
  int num_kv_heads, page_size;
  int access_bytes;  // 16, 8, 4, 2 or 1: what every pointer, stride and row length is a multiple of
  int unused;
};

constexpr int kWarpSize = 32;
// Vectors one lane holds while the page table is looked up: loads of rows and of indices overlap.
constexpr int kVectorsPerLane = 4;
constexpr int kVectorsPerWarp = kWarpSize * kVectorsPerLane;

struct CacheSlot {
  long long page;  // -1: the token is not written
  long long slot;
};

// Where a token goes. Padding tokens have batch index -1; nothing outside the page table or the cache is ever touched.
__device__ __forceinline__ CacheSlot find_slot(const AppendParams& params, long long token) {
  const CacheSlot nowhere = {-1, 0};
  long long batch_idx = load_index(params.batch_indices, token);
  long long position = load_index(params.positions, token);
  if (batch_idx < 0 || batch_idx >= params.kv_indptr.length - 1 || position < 0 || position > 0x7fffffff) return nowhere;
  int page_ordinal = static_cast<int>(position) / params.page_size;
  long long table_idx = load_index(params.kv_indptr, batch_idx) + page_ordinal;
  long long table_end = min(load_index(params.kv_indptr, batch_idx + 1), params.kv_indices.length);
  if (table_idx < 0 || table_idx >= table_end) return nowhere;
  long long page = load_index(params.kv_indices, table_idx);
  if (page < 0 || page >= params.num_pages) return nowhere;
  return {page, static_cast<int>(position) - page_ordinal * params.page_size};
}

// One vector of a token: all key vectors come first, head by head, then all value vectors.
struct VectorPlace {
  bool is_key;
  int head;
  int byte;
};

template <class Vector>
__device__ __forceinline__ VectorPlace place_of(const AppendParams& params, int vector_idx, int num_key_vectors) {
  bool is_key = vector_idx < num_key_vectors;
  int vectors_per_row = static_cast<int>(is_key ? params.key.row_bytes : params.value.row_bytes) / static_cast<int>(sizeof(Vector));
  int idx = is_key ? vector_idx : vector_idx - num_key_vectors;
  int head = idx / vectors_per_row;
  return {is_key, head, (idx - head * vectors_per_row) * static_cast<int>(sizeof(Vector))};
}

// Each warp takes kVectorsPerWarp vectors of one token at a time.
template <class Vector>
__device__ __forceinline__ void append_rows(const AppendParams& params) {
  constexpr int kVectorBytes = sizeof(Vector);
  int num_key_vectors = params.num_kv_heads * (static_cast<int>(params.key.row_bytes) / kVectorBytes);
  int num_vectors = num_key_vectors + params.num_kv_heads * (static_cast<int>(params.value.row_bytes) / kVectorBytes);
  int chunks_per_token = (num_vectors + kVectorsPerWarp - 1) / kVectorsPerWarp;
  int warps_per_cta = blockDim.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  GridWalk walk(blockIdx.x * warps_per_cta + threadIdx.x / kWarpSize, gridDim.x * warps_per_cta, chunks_per_token);
  for (; walk.row < params.num_tokens; walk.next()) {
    long long token = walk.row;
    int first_vector = walk.column * kVectorsPerWarp + lane;
    Vector held[kVectorsPerLane];
#pragma unroll
    for (int k = 0; k < kVectorsPerLane; ++k) {
      int vector_idx = first_vector + k * kWarpSize;
      if (vector_idx >= num_vectors) continue;
      VectorPlace place = place_of<Vector>(params, vector_idx, num_key_vectors);
      const AppendSide& side = place.is_key ? params.key : params.value;
      held[k] = *reinterpret_cast<const Vector*>(side.rows + token * side.rows_stride_token + place.head * side.rows_stride_head + place.byte);
    }
    CacheSlot at = find_slot(params, token);
    if (at.page < 0) continue;
#pragma unroll
    for (int k = 0; k < kVectorsPerLane; ++k) {
      int vector_idx = first_vector + k * kWarpSize;
      if (vector_idx >= num_vectors) continue;
      VectorPlace place = place_of<Vector>(params, vector_idx, num_key_vectors);
      const AppendSide& side = place.is_key ? params.key : params.value;
      long long offset = at.page * side.cache_stride_page + at.slot * side.cache_stride_slot + place.head * side.cache_stride_head + place.byte;
      *reinterpret_cast<Vector*>(side.cache + offset) = held[k];
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) append_paged_kv_cache(const __grid_constant__ AppendParams params) {
  switch (params.access_bytes) {
    case 16: return append_rows<uint4>(params);
    case 8: return append_rows<uint2>(params);
    case 4: return append_rows<unsigned>(params);
    case 2: return append_rows<unsigned short>(params);
    default: return append_rows<unsigned char>(params);
  }
}
