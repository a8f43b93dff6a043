// SPDX-License-Identifier: Apache-2.0
// The order of 16-byte chunks in a shared-memory tile that lets eight rows of one chunk column be read without bank conflicts.
#pragma once

// The low bits of a chunk's index are XORed with bits of its row. Rows of an odd multiple of 128 bytes start at the same bank
// and need three row bits; rows of an odd multiple of 64 or 32 bytes alternate between banks themselves and need fewer.
template <int kRowBytes>
struct Swizzle {
  static_assert(kRowBytes % 32 == 0, "a row holds an even number of 16-byte chunks");
  static constexpr unsigned kSpan = kRowBytes % 128 == 0 ? 8 : kRowBytes % 64 == 0 ? 4 : 2;
  static constexpr unsigned kRowsPerStep = 8 / kSpan;

  // Byte offset of a chunk from the start of the tile, which is aligned to 128 bytes.
  static __device__ __forceinline__ unsigned offset(unsigned row, unsigned chunk) {
    return row * kRowBytes + ((chunk ^ (row / kRowsPerStep % kSpan)) << 4);
  }

  // The address of chunk `first + step` from the address of chunk `first` in the same row, when the two have no bit in common.
  static __device__ __forceinline__ unsigned advance(unsigned address, unsigned step) {
    return (address ^ (step % kSpan << 4)) + (step / kSpan * kSpan << 4);
  }

  // The address `rows` rows further down in the same chunk column, when `rows` has no bit in common with the row's index.
  static __device__ __forceinline__ unsigned advance_rows(unsigned address, unsigned rows) {
    return (address ^ (rows / kRowsPerStep % kSpan << 4)) + rows * kRowBytes;
  }
};
