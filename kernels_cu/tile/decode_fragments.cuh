// SPDX-License-Identifier: Apache-2.0
// Fragments of a 16-row tile: queries from global memory, keys and values from a ring stage.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "tile/decode_ring.cuh"
#include "tile/rope.cuh"
#include "tile/user_variant.cuh"

constexpr bool kFp8 = kKvBytes == 1;
constexpr int kQkSteps = kHeadDimQk / 16;
constexpr int kOutputTiles = kHeadDimVo / 8;
constexpr int kKeyTiles = kBlockKeys / 8;

// First of the two query dimensions that register pair `half` (0, 1) of k-step `step` holds in lane column `c`.
// fp8 keys arrive four dimensions to a lane, so there the dimensions of a step are dealt out in fours.
__device__ __forceinline__ int fragment_dim(int step, int half, int c) { return step * 16 + (kFp8 ? 4 * c + 2 * half : 2 * c + 8 * half); }

// Two neighbouring query elements through the user's transform, rounded to their type again.
__device__ __forceinline__ unsigned transform_query_pair(const AttentionParams& params, const Tile& tile, const Row& row, int dim, unsigned pair) {
  float low, high;
  unpack_pair<kQElement>(pair, low, high);
  return pack_pair<kQElement>(user_query(params, tile, row, dim, low), user_query(params, tile, row, dim + 1, high));
}

// Query fragments of rows g and g + 8, zero for rows the tile does not have.
__device__ __forceinline__ void load_query(const AttentionParams& params, const Tile& tile, const Row (&row)[2], int lane,
                                           unsigned (&q)[kQkSteps][4], float (&q_scale)[2]) {
  const unsigned short* base = static_cast<const unsigned short*>(params.q);
  int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (kHeadDimQk <= 128 && r == 1 && tile.num_rows <= 8) {
      // Rows 8 to 15 cost nothing where there are none. Past head_dim 128 registers are too few for the branch.
#pragma unroll
      for (int step = 0; step < kQkSteps; ++step) q[step][1] = q[step][3] = 0u;
      q_scale[1] = 1.f;
      continue;
    }
    bool valid = g + 8 * r < tile.num_rows;
    const unsigned short* source = base + (static_cast<long long>(tile.q_begin) + row[r].token) * params.q_stride_token + row[r].head * params.q_stride_head;
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        q[step][r + 2 * half] = valid ? __ldg(reinterpret_cast<const unsigned*>(source + fragment_dim(step, half, c))) : 0u;
        if constexpr (kUserQuery) {
          if (valid) q[step][r + 2 * half] = transform_query_pair(params, tile, row[r], fragment_dim(step, half, c), q[step][r + 2 * half]);
        }
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
__device__ __forceinline__ void rotate_keys(const float2* turns, int key, int step, int lane, unsigned (&low)[kKeyTiles][2], unsigned (&high)[kKeyTiles][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int dim = fragment_dim(step, half, lane % 4);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float position = static_cast<float>(key + 8 * n + lane / 4);
      rotate_pair<kMmaElement>(low[n][half], high[n][half], rope_cos_sin(turns[dim], position), rope_cos_sin(turns[dim + 1], position));
    }
  }
}

// The values of fragments (step, half) and (step + kQkSteps / 2, half) of one row, rotated if need be: x[0..1] and x[2..3].
__device__ __forceinline__ void query_values(const Row& row, const float2* turns, int lane, int step, int half, unsigned low, unsigned high,
                                             float (&x)[4]) {
  unpack_pair<kQElement>(low, x[0], x[1]);
  unpack_pair<kQElement>(high, x[2], x[3]);
  if constexpr (kPosEncoding == PosEncoding::kRopeLlama) {
    int dim = fragment_dim(step, half, lane % 4);
    float position = static_cast<float>(row.position);
    rotate(rope_cos_sin(turns[dim], position), x[0], x[2]);
    rotate(rope_cos_sin(turns[dim + 1], position), x[1], x[3]);
  }
}

// bf16 query fragments to half, rotated on the way, each row divided by the power of two of its largest element; q_scale undoes it
// on the logits.
__device__ __forceinline__ void query_to_half(const Row (&row)[2], const float2* turns, int num_rows, int lane, unsigned (&q)[kQkSteps][4],
                                              float (&q_scale)[2]) {
  constexpr int kPairSteps = kQkSteps / 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && num_rows <= 8) continue;
    float largest = 0.f;
    // Of wide heads, element by element takes fewer registers.
    if constexpr (kPosEncoding == PosEncoding::kRopeLlama || kHeadDimQk > 128) {
#pragma unroll
      for (int i = 0; i < 2 * kPairSteps; ++i) {
        float x[4];
        query_values(row[r], turns, lane, i / 2, i % 2, q[i / 2][r + i % 2 * 2], q[i / 2 + kPairSteps][r + i % 2 * 2], x);
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))));
      }
    } else {
      unsigned pair = 0u;
#pragma unroll
      for (int i = 0; i < 2 * kQkSteps; ++i) pair = max_bf16_pair(pair, q[i / 2][r + i % 2 * 2] & 0x7fff7fffu);
      largest = fmaxf(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Exponent bits alone are a power of two; clamped so that its reciprocal is a normal number too.
    unsigned exponent = min(max(__float_as_uint(largest) & 0x7f800000u, 0x00800000u), 0x7e000000u);
    q_scale[r] = __uint_as_float(exponent);
    float reciprocal = __uint_as_float(0x7f000000u - exponent);
#pragma unroll
    for (int i = 0; i < 2 * kPairSteps; ++i) {
      unsigned &low = q[i / 2][r + i % 2 * 2], &high = q[i / 2 + kPairSteps][r + i % 2 * 2];
      float x[4];
      query_values(row[r], turns, lane, i / 2, i % 2, low, high, x);
      low = pack_pair<Element::kFloat16>(x[0] * reciprocal, x[1] * reciprocal);
      high = pack_pair<Element::kFloat16>(x[2] * reciprocal, x[3] * reciprocal);
    }
  }
}

// Where this lane's rows of a block begin in a slot, for load_keys and load_values. 16-bit fragments of 16 keys take two chunks of a row.
// fp8 fragments take one, of 32 keys; of a block of 16 keys matrices 2 and 3 repeat the first two.
__device__ __forceinline__ unsigned key_lane_offset(int lane) {
  int matrix = lane / 8;
  return kFp8 ? Swizzle<kKRowChunks * 16>::offset(lane % kBlockKeys, 0) : Swizzle<kKRowChunks * 16>::offset(lane % 8 + matrix / 2 * 8, matrix % 2);
}

__device__ __forceinline__ unsigned value_lane_offset(int lane) {
  return kFp8 ? Swizzle<kVRowChunks * 16>::offset(lane % kBlockKeys, 0) : Swizzle<kVRowChunks * 16>::offset(lane % 16, lane / 16);
}

// Key fragments of one k-step: b[n][0..1] for keys 8n .. 8n + 7 of the block. `lane_rows` is the slot plus key_lane_offset.
__device__ __forceinline__ void load_keys(unsigned lane_rows, int step, unsigned (&b)[kKeyTiles][2]) {
  unsigned r[4];
  if constexpr (!kFp8) {
#pragma unroll
    for (int part = 0; part < kBlockParts; ++part) {
      ldmatrix_x4(r, Swizzle<kKRowChunks * 16>::advance(Swizzle<kKRowChunks * 16>::advance_rows(lane_rows, part * kPartKeys), 2 * step));
      b[2 * part][0] = r[0], b[2 * part][1] = r[1], b[2 * part + 1][0] = r[2], b[2 * part + 1][1] = r[3];
    }
  } else {
    ldmatrix_x4(r, Swizzle<kKRowChunks * 16>::advance(lane_rows, step));
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) fp8_quad_to_half<false>(r[n], b[n][0], b[n][1]);
  }
}

// Value fragments of 16 output dimensions: b[part][n][0..1] for 16 keys and output tile 2 * group + n. `lane_rows` is the slot plus
// value_lane_offset.
__device__ __forceinline__ void load_values(unsigned lane_rows, int group, unsigned (&b)[kBlockParts][2][2]) {
  unsigned r[4];
  if constexpr (!kFp8) {
#pragma unroll
    for (int part = 0; part < kBlockParts; ++part) {
      ldmatrix_x4_trans(r, Swizzle<kVRowChunks * 16>::advance(Swizzle<kVRowChunks * 16>::advance_rows(lane_rows, part * kPartKeys), 2 * group));
      b[part][0][0] = r[0], b[part][0][1] = r[1], b[part][1][0] = r[2], b[part][1][1] = r[3];
    }
  } else {
    // A 16-bit unit is two neighbouring dimensions: even ones feed tile 2 * group, odd ones the next.
    ldmatrix_x4_trans(r, Swizzle<kVRowChunks * 16>::advance(lane_rows, group));
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) fp8_quad_to_half<true>(r[k], b[k / 2][0][k % 2], b[k / 2][1][k % 2]);
  }
}

// Output dimension of accumulator column `2c + j` of output tile `tile_idx`.
__device__ __forceinline__ int output_dim(int tile_idx, int c, int j) {
  return kFp8 ? tile_idx / 2 * 16 + 4 * c + 2 * j + tile_idx % 2 : tile_idx * 8 + 2 * c + j;
}
