// SPDX-License-Identifier: Apache-2.0
// Index arrays as callers hold them: 32 or 64 bits wide, with any stride.
#pragma once

struct IndexArray {
  const void* data;
  long long stride;  // in elements
  long long length;
  long long is_int64;
};

// The caller keeps 0 <= idx < array.length.
__device__ __forceinline__ long long load_index(const IndexArray& array, long long idx) {
  long long offset = idx * array.stride;
  return array.is_int64 ? __ldg(static_cast<const long long*>(array.data) + offset) : __ldg(static_cast<const int*>(array.data) + offset);
}

__device__ __forceinline__ void store_index(const IndexArray& array, long long idx, long long value) {
  long long offset = idx * array.stride;
  if (array.is_int64) {
    static_cast<long long*>(const_cast<void*>(array.data))[offset] = value;
  } else {
    static_cast<int*>(const_cast<void*>(array.data))[offset] = static_cast<int>(value);
  }
}
