// SPDX-License-Identifier: Apache-2.0
// The softmax state of one warp over a 16-row tile, and how the warps of a CTA join theirs.
#pragma once

#include "tile/decode_fragments.cuh"
#include "tile/output.cuh"

// Rows g and g + 8 of thread (g, c): output columns by tile, running maximum (log2 domain) and this thread's share of the sum.
struct WarpState {
  float o[kOutputTiles][4];
  float row_max[2];
  float row_sum[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
    row_max[0] = row_max[1] = neg_inf();
    row_sum[0] = row_sum[1] = 0.f;
  }

  // Rescale to the new maxima; `logits` become weights 2^(logit - max).
  __device__ __forceinline__ void absorb(float (&logits)[2][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = fmaxf(fmaxf(logits[0][2 * r], logits[0][2 * r + 1]), fmaxf(logits[1][2 * r], logits[1][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      float new_max = fmaxf(row_max[r], largest);
      // A row without keys so far keeps -inf out of the differences.
      float reference = new_max == neg_inf() ? 0.f : new_max;
      float rescale = ex2(row_max[r] - reference);
      row_max[r] = new_max;
      row_sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 2 * r; j < 2 * r + 2; ++j) {
          logits[n][j] = ex2(logits[n][j] - reference);
          row_sum[r] += logits[n][j];
        }
      }
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) o[n][2 * r] *= rescale, o[n][2 * r + 1] *= rescale;
    }
  }

  __device__ __forceinline__ void reduce_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 1);
      row_sum[r] += __shfl_xor_sync(0xffffffffu, row_sum[r], 2);
    }
  }
};

// Shared memory of one state: a thread's values lie 32 words apart, so a warp's access is one row of banks.
constexpr int kStateWords = (kOutputTiles * 4 + 4) * 32;

template <int kRows>
__device__ __forceinline__ void store_state(const WarpState& state, float* slot, int lane) {
#pragma unroll
  for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2 * kRows; ++j) slot[(n * 4 + j) * 32 + lane] = state.o[n][j];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    slot[(kOutputTiles * 4 + r) * 32 + lane] = state.row_max[r];
    slot[(kOutputTiles * 4 + 2 + r) * 32 + lane] = state.row_sum[r];
  }
}

template <int kRows>
__device__ __forceinline__ void join_state(WarpState& state, const float* slot, int lane) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float other_max = slot[(kOutputTiles * 4 + r) * 32 + lane];
    float other_sum = slot[(kOutputTiles * 4 + 2 + r) * 32 + lane];
    float joint_max = fmaxf(state.row_max[r], other_max);
    float reference = joint_max == neg_inf() ? 0.f : joint_max;
    float own = ex2(state.row_max[r] - reference), other = ex2(other_max - reference);
    state.row_max[r] = joint_max;
    state.row_sum[r] = state.row_sum[r] * own + other_sum * other;
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
      for (int j = 2 * r; j < 2 * r + 2; ++j) state.o[n][j] = state.o[n][j] * own + slot[(n * 4 + j) * 32 + lane] * other;
    }
  }
}

// Join the states of all warps into warp 0's, in a fixed order. kRows is 1 when rows 8 to 15 are not in use.
// A writer's slot is one that only it has read before, so one barrier per round is enough after the first.
template <int kRows>
__device__ __forceinline__ void join_warps(WarpState& state, float* slots, int warp, int lane) {
  __syncthreads();
#pragma unroll
  for (int half = kNumWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) store_state<kRows>(state, slots + warp % (kNumWarps / 2) * kStateWords, lane);
    __syncthreads();
    if (warp < half) join_state<kRows>(state, slots + (warp + half) % (kNumWarps / 2) * kStateWords, lane);
  }
}

// Warp 0: write the joined state to the output, or to its part of the float workspace.
__device__ __forceinline__ void write_state(const AttentionParams& params, const Tile& tile, const Segment& segment, const Row (&row)[2],
                                            const WarpState& state, int lane) {
  int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row_in_tile = g + 8 * r;
    if (row_in_tile >= tile.num_rows) continue;
    if (segment.group < 0) {
      RowFinish finish = finish_row(params, row[r], segment.kv_head, state.row_max[r], state.row_sum[r]);
      unsigned short* o = output_row(params, tile, row[r]);
#pragma unroll
      for (int n = 0; n < kOutputTiles; n += 2) {
        if constexpr (kFp8) {
          // Tiles n and n + 1 interleave: together a thread has four neighbouring dimensions.
          uint2 packed = {pack_pair<kQElement>(state.o[n][2 * r] * finish.scale, state.o[n + 1][2 * r] * finish.scale),
                          pack_pair<kQElement>(state.o[n][2 * r + 1] * finish.scale, state.o[n + 1][2 * r + 1] * finish.scale)};
          *reinterpret_cast<uint2*>(o + output_dim(n, c, 0)) = packed;
        } else {
#pragma unroll
          for (int m = n; m < n + 2; ++m) {
            *reinterpret_cast<unsigned*>(o + output_dim(m, c, 0)) = pack_pair<kQElement>(state.o[m][2 * r] * finish.scale, state.o[m][2 * r + 1] * finish.scale);
          }
        }
      }
      if (c == 0) store_lse(params, tile, row[r], finish.lse);
    } else {
      RowFinish finish = finish_part(state.row_max[r], state.row_sum[r]);
      long long part = part_row(params, tile, segment) + row_in_tile;
      float* o = params.partial_o + part * kHeadDimVo;
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) o[output_dim(n, c, j)] = state.o[n][2 * r + j] * finish.scale;
      }
      if (c == 0) params.partial_lse[part] = finish.lse;
    }
  }
}
