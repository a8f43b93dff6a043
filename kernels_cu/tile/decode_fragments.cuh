// SPDX-License-Identifier: Apache-2.0
// Fragments of a 16-row tile: queries from global memory, keys and values from a ring stage.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "tile/decode_ring.cuh"
#include "tile/rope.cuh"
#include "tile/rows.cuh"

constexpr bool kFp8 = kKvBytes == 1;
constexpr int kQkSteps = kHeadDimQk / 16;
constexpr int kOutputTiles = kHeadDimVo / 8;

// First of the two query dimensions that register pair `half` (0, 1) of k-step `step` holds in lane column `c`.
// fp8 keys arrive four dimensions to a lane, so there the dimensions of a step are dealt out in fours.
__device__ __forceinline__ int fragment_dim(int step, int half, int c) { return step * 16 + (kFp8 ? 4 * c + 2 * half : 2 * c + 8 * half); }

// Query fragments of rows g and g + 8, zero for rows the tile does not have.
__device__ __forceinline__ void load_query(const AttentionParams& params, const Tile& tile, const Row (&row)[2], int lane,
                                           unsigned (&q)[kQkSteps][4], float (&q_scale)[2]) {
  const unsigned short* base = static_cast<const unsigned short*>(params.q);
  int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    bool valid = g + 8 * r < tile.num_rows;
    const unsigned short* source = base + (static_cast<long long>(tile.q_begin) + row[r].token) * params.q_stride_token + row[r].head * params.q_stride_head;
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        q[step][r + 2 * half] = valid ? __ldg(reinterpret_cast<const unsigned*>(source + fragment_dim(step, half, c))) : 0u;
      }
    }
    q_scale[r] = 1.f;
  }
}

// Rotate query fragments to their rows' positions: k-steps `step` and `step + kQkSteps / 2` hold the two halves of a pair.
__device__ __forceinline__ void rotate_query(const Row (&row)[2], const float2* turns, int lane, unsigned (&q)[kQkSteps][4]) {
#pragma unroll
  for (int step = 0; step < kQkSteps / 2; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int dim = fragment_dim(step, half, lane % 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float position = static_cast<float>(row[r].position);
        rotate_pair<kQElement>(q[step][r + 2 * half], q[step + kQkSteps / 2][r + 2 * half], rope_cos_sin(turns[dim], position),
                               rope_cos_sin(turns[dim + 1], position));
      }
    }
  }
}

// Rotate the key fragments of k-steps `step` and `step + kQkSteps / 2`; the block's first key is at position `key`.
__device__ __forceinline__ void rotate_keys(const float2* turns, int key, int step, int lane, unsigned (&low)[2][2], unsigned (&high)[2][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int dim = fragment_dim(step, half, lane % 4);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float position = static_cast<float>(key + 8 * n + lane / 4);
      rotate_pair<kMmaElement>(low[n][half], high[n][half], rope_cos_sin(turns[dim], position), rope_cos_sin(turns[dim + 1], position));
    }
  }
}

// bf16 query fragments to half, each row divided by the power of two of its largest element; q_scale undoes it on the logits.
__device__ __forceinline__ void query_to_half(unsigned (&q)[kQkSteps][4], float (&q_scale)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = 0.f;
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float low, high;
        unpack_pair<Element::kBfloat16>(q[step][r + 2 * half], low, high);
        largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Exponent bits alone are a power of two; clamped so that its reciprocal is a normal number too.
    unsigned exponent = min(max(__float_as_uint(largest) & 0x7f800000u, 0x00800000u), 0x7e000000u);
    q_scale[r] = __uint_as_float(exponent);
    float reciprocal = __uint_as_float(0x7f000000u - exponent);
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float low, high;
        unpack_pair<Element::kBfloat16>(q[step][r + 2 * half], low, high);
        q[step][r + 2 * half] = pack_pair<Element::kFloat16>(low * reciprocal, high * reciprocal);
      }
    }
  }
}

// Key fragments of one k-step: b[n][0..1] for keys 8n .. 8n + 7 of the block.
__device__ __forceinline__ void load_keys(unsigned block, int step, int lane, unsigned (&b)[2][2]) {
  int matrix = lane / 8, row_in_matrix = lane % 8;
  unsigned r[4];
  if constexpr (!kFp8) {
    int row = row_in_matrix + (matrix / 2) * 8, chunk = 2 * step + matrix % 2;
    ldmatrix_x4(r, block + Swizzle<kKRowChunks * 16>::offset(row, chunk));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  } else {
    // One 16-byte chunk is a whole k-step; matrices 2 and 3 repeat the first two.
    int row = row_in_matrix + (matrix % 2) * 8;
    ldmatrix_x4(r, block + Swizzle<kKRowChunks * 16>::offset(row, step));
#pragma unroll
    for (int n = 0; n < 2; ++n) b[n][0] = fp8_pair_to_half(r[n]), b[n][1] = fp8_pair_to_half(r[n] >> 16);
  }
}

// Value fragments of 16 output dimensions: b[n][0..1] for output tile 2 * group + n.
__device__ __forceinline__ void load_values(unsigned block, int group, int lane, unsigned (&b)[2][2]) {
  int matrix = lane / 8;
  int row = lane % 8 + (matrix % 2) * 8;
  unsigned r[4];
  if constexpr (!kFp8) {
    int chunk = 2 * group + matrix / 2;
    ldmatrix_x4_trans(r, block + Swizzle<kVRowChunks * 16>::offset(row, chunk));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  } else {
    // A 16-bit unit is two neighbouring dimensions: even ones feed tile 2 * group, odd ones the next.
    ldmatrix_x4_trans(r, block + Swizzle<kVRowChunks * 16>::offset(row, group));
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      b[0][k] = fp8_pair_to_half(__byte_perm(r[k], 0, 0x4420));
      b[1][k] = fp8_pair_to_half(__byte_perm(r[k], 0, 0x4431));
    }
  }
}

// Output dimension of accumulator column `2c + j` of output tile `tile_idx`.
__device__ __forceinline__ int output_dim(int tile_idx, int c, int j) {
  return kFp8 ? tile_idx / 2 * 16 + 4 * c + 2 * j + tile_idx % 2 : tile_idx * 8 + 2 * c + j;
}
