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

// The joined state of a unit's rows g and g + 8, from the states of all warps: how much each warp counts, and how rows finish.
template <int kRows>
struct JoinedRows {
  float weight[kNumWarps][kRows];
  RowFinish finish[kRows];

  __device__ __forceinline__ JoinedRows(const AttentionParams& params, const Segment& segment, const Row (&row)[2], const float* slots, int lane) {
    const float* maxima = slots + kOutputTiles * 4 * 32 + lane;
    const float* sums = maxima + 2 * 32;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float joint_max = neg_inf();
#pragma unroll
      for (int w = 0; w < kNumWarps; ++w) joint_max = fmaxf(joint_max, maxima[w * kStateWords + r * 32]);
      float reference = joint_max == neg_inf() ? 0.f : joint_max;
      float joint_sum = 0.f;
#pragma unroll
      for (int w = 0; w < kNumWarps; ++w) {
        weight[w][r] = ex2(maxima[w * kStateWords + r * 32] - reference);
        joint_sum += sums[w * kStateWords + r * 32] * weight[w][r];
      }
      finish[r] = segment.group < 0 ? finish_row(params, row[r], segment.kv_head, joint_max, joint_sum) : finish_part(joint_max, joint_sum);
    }
  }
};

// Two neighbouring output tiles of one row as this thread has them: columns 2c, 2c + 1 of each.
__device__ __forceinline__ void write_columns(const AttentionParams& params, const Tile& tile, const Segment& segment, const Row& row, long long part,
                                              int pair, int c, float (&even)[2], float (&odd)[2]) {
  if (segment.group < 0) {
    unsigned short* o = output_row(params, tile, row) + pair * 16;
    if constexpr (kFp8) {
      // Even and odd dimensions come from different tiles: together a thread has four neighbours.
      *reinterpret_cast<uint2*>(o + 4 * c) = {pack_pair<kQElement>(even[0], odd[0]), pack_pair<kQElement>(even[1], odd[1])};
    } else {
      *reinterpret_cast<unsigned*>(o + 2 * c) = pack_pair<kQElement>(even[0], even[1]);
      *reinterpret_cast<unsigned*>(o + 8 + 2 * c) = pack_pair<kQElement>(odd[0], odd[1]);
    }
  } else {
    float* o = params.partial_o + part * kHeadDimVo + pair * 16;
    if constexpr (kFp8) {
      *reinterpret_cast<float4*>(o + 4 * c) = {even[0], odd[0], even[1], odd[1]};
    } else {
      *reinterpret_cast<float2*>(o + 2 * c) = {even[0], even[1]};
      *reinterpret_cast<float2*>(o + 8 + 2 * c) = {odd[0], odd[1]};
    }
  }
}

// All warps: join their states through shared memory in a fixed order, each finishing some of the columns, and write the result
// to the output or to this segment's part of the float workspace. kRows is 1 when rows 8 to 15 are not in use.
template <int kRows>
__device__ __forceinline__ void join_and_write(const AttentionParams& params, const Tile& tile, const Segment& segment, const Row (&row)[2],
                                               const MergeGroup& group, const WarpState& state, float* slots, int warp, int lane) {
  // Everyone has finished with the previous segment's states.
  __syncthreads();
  store_state<kRows>(state, slots + warp * kStateWords, lane);
  __syncthreads();
  JoinedRows<kRows> joined(params, segment, row, slots, lane);
  int g = lane / 4, c = lane % 4;
  long long part = group.first_row + static_cast<long long>(segment.part) * tile.num_rows + g;
  for (int pair = warp; pair < kOutputTiles / 2; pair += kNumWarps) {
    const float* columns = slots + pair * 8 * 32 + lane;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float even[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < kNumWarps; ++w) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          even[j] += columns[w * kStateWords + (2 * r + j) * 32] * joined.weight[w][r];
          odd[j] += columns[w * kStateWords + (4 + 2 * r + j) * 32] * joined.weight[w][r];
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) even[j] *= joined.finish[r].scale, odd[j] *= joined.finish[r].scale;
      if (g + 8 * r < tile.num_rows) write_columns(params, tile, segment, row[r], part + 8 * r, pair, c, even, odd);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (warp != 0 || c != 0 || g + 8 * r >= tile.num_rows) continue;
    if (segment.group < 0) {
      store_lse(params, tile, row[r], joined.finish[r].lse);
    } else {
      params.partial_lse[part + 8 * r] = joined.finish[r].lse;
    }
  }
}
