// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup's rows to global memory: as final output, or as one part of a merge group.
#pragma once

#include "tile/fa3_softmax.cuh"

// Row of the tile that thread row `r` is.
__device__ __forceinline__ int thread_row(int consumer, int warp, int r) {
  return consumer * kWarpgroupRows + warp * kWarpRows + lane_idx() / 4 + r * 8;
}

// Accumulators next to each other in a row of output, and how many there are from one such group to the next of the thread's row. fp8
// products have the even dims of 16 first (see turn_values), so a thread's accumulators of one row are four dims in a row.
constexpr int kRunDims = kQFp8 ? 4 : 2;
constexpr int kRuns = kHeadDimVo / (4 * kRunDims);
// Accumulator `e` of run `run` in thread row `r`.
__device__ __forceinline__ constexpr int run_element(int run, int r, int e) { return run * 2 * kRunDims + r * 2 + (kQFp8 ? e % 2 * 4 + e / 2 : e); }

// Final rows of one warp to its consumer's buffer, where warpgroup 0 fetches them.
__device__ __forceinline__ void stage_rows(const AttentionParams& params, const QueuedWork& work, const Output& o, RowState& state, int consumer, int warp,
                                           unsigned buffer) {
  int lane = lane_idx(), c = lane % 4;
  reduce_rows(state);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row_in_tile = thread_row(consumer, warp, r), row_in_buffer = warp * kWarpRows + lane / 4 + r * 8;
    bool valid = row_in_tile < work.tile.num_rows;
    Row row = make_row(params, work.tile, work.segment.kv_head, valid ? row_in_tile : 0);
    RowFinish finish = finish_row(params, row, work.segment.kv_head, state.max[r], state.sum[r]);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      auto packed = [&](int e) { return pack_pair<kOElement>(o[run_element(run, r, e)] * finish.scale, o[run_element(run, r, e + 1)] * finish.scale); };
      if constexpr (kQFp8) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(buffer + output_chunk_offset(row_in_buffer, run * 2 + c / 2) + c % 2 * 8), "r"(packed(0)),
                     "r"(packed(2))
                     : "memory");
      } else {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(buffer + output_chunk_offset(row_in_buffer, run) + c * 4), "r"(packed(0)) : "memory");
      }
    }
    if (valid && c == 0) store_lse(params, work.tile, row, finish.lse);
  }
}

// Zeros for one warp's rows of a segment without keys.
__device__ __forceinline__ void write_empty_rows(const AttentionParams& params, const QueuedWork& work, int consumer, int warp) {
  int first_row = consumer * kWarpgroupRows + warp * kWarpRows;
#pragma unroll 1
  for (int row_in_tile = first_row; row_in_tile < min(first_row + kWarpRows, work.tile.num_rows); ++row_in_tile) {
    Row row = make_row(params, work.tile, work.segment.kv_head, row_in_tile);
    unsigned* target = reinterpret_cast<unsigned*>(output_row(params, work.tile, row));
    for (int pair = lane_idx(); pair < kHeadDimVo / 2; pair += 32) target[pair] = 0;
    if (lane_idx() == 0) store_lse(params, work.tile, row, finish_row(params, row, work.segment.kv_head, neg_inf(), 0.f).lse);
  }
}

// One part: rows divided by their own denominator, in float, straight from registers.
__device__ __forceinline__ void write_part(const AttentionParams& params, const QueuedWork& work, const Output& o, RowState& state, int consumer, int warp) {
  int c = lane_idx() % 4;
  reduce_rows(state);
  long long first = part_row(work.group, work.tile, work.segment);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int row_in_tile = thread_row(consumer, warp, r);
    if (row_in_tile >= work.tile.num_rows) continue;
    RowFinish finish = finish_part(state.max[r], state.sum[r]);
    float* target = params.partial_o + (first + row_in_tile) * kHeadDimVo + c * kRunDims;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      auto value = [&](int e) { return o[run_element(run, r, e)] * finish.scale; };
      if constexpr (kQFp8) {
        *reinterpret_cast<float4*>(target + run * 16) = {value(0), value(1), value(2), value(3)};
      } else {
        *reinterpret_cast<float2*>(target + run * 8) = {value(0), value(1)};
      }
    }
    if (c == 0) params.partial_lse[first + row_in_tile] = finish.lse;
  }
}

template <bool kPairs>
struct MergeVector {
  using Type = float4;
};
template <>
struct MergeVector<true> {
  using Type = float2;
};

// All consumers: a unit's output from its parts, in part order. A warp takes a few rows at a time and a lane the same columns of each, so
// that enough loads travel together: two columns of one row at a time, merging took as long as twenty iterations.
__device__ __forceinline__ void merge_rows(const AttentionParams& params, const QueuedWork& work) {
  constexpr int kColumns = kHeadDimVo / 32, kRows = kColumns > 4 || kConsumers > 2 ? 1 : 2, kParts = 4;
  using Vector = typename MergeVector<kColumns == 2>::Type;
  constexpr int kVectorFloats = sizeof(Vector) / 4, kVectors = kColumns / kVectorFloats;
  const Tile& tile = work.tile;
  int lane = lane_idx(), num_parts = work.group.num_parts;
  int thread = ConsumerThreads::index();
  // What follows from it is computed here: it would lie in memory through all segments that are not merged.
  asm volatile("" : "+r"(thread));
#pragma unroll 1
  for (int first_row = thread / 32 * kRows; first_row < tile.num_rows; first_row += kConsumerWarps * kRows) {
    float row_max[kRows], row_sum[kRows], sum[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_max[r] = neg_inf(), row_sum[r] = 0.f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[r][i] = 0.f;
    }
#pragma unroll 1
    for (int first_part = 0; first_part < num_parts; first_part += kParts) {
      float lse[kRows][kParts];
      Vector values[kRows][kParts][kVectors];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          lse[r][i] = neg_inf();
          bool exists = first_part + i < num_parts && first_row + r < tile.num_rows;
          long long row = work.group.first_row + static_cast<long long>(first_part + i) * tile.num_rows + first_row + r;
          if (exists) lse[r][i] = load_l2(params.partial_lse + row);
          const Vector* source = reinterpret_cast<const Vector*>(params.partial_o + row * kHeadDimVo) + lane;
#pragma unroll
          for (int j = 0; j < kVectors; ++j) values[r][i][j] = exists ? load_l2(source + j * 32) : Vector{};
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float new_max = row_max[r];
#pragma unroll
        for (int i = 0; i < kParts; ++i) new_max = fmaxf(new_max, lse[r][i]);
        // Every part may be empty: keep -inf out of the differences.
        float reference = new_max == neg_inf() ? 0.f : new_max, rescale = ex2(row_max[r] - reference);
        row_max[r] = new_max;
        row_sum[r] *= rescale;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[r][c] *= rescale;
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          float weight = ex2(lse[r][i] - reference);
          row_sum[r] += weight;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            sum[r][c] = fmaf(weight, reinterpret_cast<const float*>(&values[r][i][c / kVectorFloats])[c % kVectorFloats], sum[r][c]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first_row + r >= tile.num_rows) break;
      Row row = make_row(params, tile, work.segment.kv_head, first_row + r);
      RowFinish finish = finish_row(params, row, work.segment.kv_head, row_max[r], row_sum[r]);
      unsigned* target = reinterpret_cast<unsigned*>(output_row(params, tile, row));
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        target[(c / kVectorFloats * 32 + lane) * kVectorFloats / 2 + c % kVectorFloats / 2] =
            pack_pair<kOElement>(sum[r][c] * finish.scale, sum[r][c + 1] * finish.scale);
      }
      if (lane == 0) store_lse(params, tile, row, finish.lse);
    }
  }
}
