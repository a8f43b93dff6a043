// SPDX-License-Identifier: Apache-2.0
// Registers to global memory: a segment's rows as final output, or as one part of a merge group.
#pragma once

#include "tile/output.cuh"
#include "tile/prefill_mma.cuh"
#include "tile/prefill_ring.cuh"

// Two neighbouring column tiles hold 16 dims. A thread has {2c, 2c + 1} of each half, or, after fp8 values, 4c .. 4c + 3.
struct DimBlock {
  float x[4];

  __device__ __forceinline__ DimBlock(const Output& o, int r, int block, float scale) {
    const float(&a)[4] = o[r / 2][block * 2];
    const float(&b)[4] = o[r / 2][block * 2 + 1];
    int half = r % 2 * 2;
    x[0] = a[half] * scale;
    x[1] = (kFp8Kv ? b[half] : a[half + 1]) * scale;
    x[2] = (kFp8Kv ? a[half + 1] : b[half]) * scale;
    x[3] = b[half + 1] * scale;
  }
};

// The user's transform on a block of a final row that begins with dimension `dim`.
__device__ __forceinline__ void transform_dims(const AttentionParams& params, const Tile& tile, const Row& row, int dim, int c, DimBlock& dims) {
#pragma unroll
  for (int i = 0; i < 4; ++i) dims.x[i] = user_output(params, tile, row, dim + (kFp8Kv ? c * 4 + i : i / 2 * 8 + c * 2 + i % 2), dims.x[i]);
}

// A lane's dims of four column tiles of a row, two of each (after fp8 values four of each two), for 16 bytes that lie side by side.
// Four lanes have a row between them, `c` says which one this is.
__device__ __forceinline__ void gather_chunk(unsigned (&x)[4], int c) {
  bool odd = recompute_from(c) & 1, high = recompute_from(c) & 2;
  auto exchange = [](unsigned& mine, unsigned& other, bool swap, int lanes) {
    unsigned got = __shfl_xor_sync(kFullWarp, swap ? mine : other, lanes);
    mine = swap ? got : mine, other = swap ? other : got;
  };
  if constexpr (kFp8Kv) {
    exchange(x[0], x[2], odd, 1), exchange(x[1], x[3], odd, 1);
  } else {
    exchange(x[0], x[1], odd, 1), exchange(x[2], x[3], odd, 1);
    exchange(x[0], x[2], high, 2), exchange(x[1], x[3], high, 2);
  }
}

// Final rows, straight from registers in 16-byte stores: shared memory is the next segment's.
__device__ __forceinline__ void write_direct(const AttentionParams& params, const Work& work, Output& o, RowState& state) {
  int lane = recompute_from(lane_idx()), c = lane % 4;
  reduce_rows(state);
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    bool valid = thread_row(r) < work.tile.num_rows;
    Row row = make_row(params, work.tile, work.segment.kv_head, valid ? thread_row(r) : 0);
    RowFinish finish = finish_row(params, row, work.segment.kv_head, state.max[r], state.sum[r]);
    uint4* target = reinterpret_cast<uint4*>(output_row(params, work.tile, row)) + (kFp8Kv ? c % 2 * 2 + c / 2 : c);
#pragma unroll
    for (int pair = 0; pair < kHeadDimVo / 32; ++pair) {
      unsigned packed[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        DimBlock dims(o, r, pair * 2 + i, finish.scale);
        if constexpr (kUserOutput) {
          if (valid) transform_dims(params, work.tile, row, (pair * 2 + i) * 16, c, dims);
        }
        // All blocks at once, what hooks load for them too, would take more registers than other kernels have.
        if constexpr (kUserOutput || !kEarlyQueries) __syncwarp();
        packed[i * 2] = pack_pair<kOElement>(dims.x[0], dims.x[1]), packed[i * 2 + 1] = pack_pair<kOElement>(dims.x[2], dims.x[3]);
      }
      gather_chunk(packed, c);
      if (valid) target[pair * 4] = {packed[0], packed[1], packed[2], packed[3]};
    }
    if (valid && c == 0) store_lse(params, work.tile, row, finish.lse);
  }
}

// One part: rows divided by their own denominator, in float, straight from registers.
__device__ __forceinline__ void write_part(const AttentionParams& params, const Work& work, const MergeGroup& group, const Output& o,
                                           RowState& state) {
  int c = lane_idx() % 4;
  reduce_rows(state);
  long long first = part_row(group, work.tile, work.segment);
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    if (thread_row(r) >= work.tile.num_rows) continue;
    RowFinish finish = finish_part(state.max[r], state.sum[r]);
    float* target = params.partial_o + (first + thread_row(r)) * kHeadDimVo;
#pragma unroll
    for (int block = 0; block < kHeadDimVo / 16; ++block) {
      DimBlock dims(o, r, block, finish.scale);
      if constexpr (kFp8Kv) {
        *reinterpret_cast<float4*>(target + block * 16 + c * 4) = {dims.x[0], dims.x[1], dims.x[2], dims.x[3]};
      } else {
        *reinterpret_cast<float2*>(target + block * 16 + c * 2) = {dims.x[0], dims.x[1]};
        *reinterpret_cast<float2*>(target + block * 16 + 8 + c * 2) = {dims.x[2], dims.x[3]};
      }
    }
    if (c == 0) params.partial_lse[first + thread_row(r)] = finish.lse;
  }
}
