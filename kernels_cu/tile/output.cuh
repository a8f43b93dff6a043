// SPDX-License-Identifier: Apache-2.0
// From a row's running softmax state to the output array, directly or through the parts of a merge group.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "tile/user_variant.cuh"

// How to finish a row: o = scale * accumulator, and the base-2 log-sum-exp.
struct RowFinish {
  float scale;
  float lse;
};

// By a sum of weights that is not 0, and then at least about 1. The end of a 16-row tile is too short for the branch of an exact division,
// in whose way loads would wait. In larger tiles registers are what is short, and without that branch some GPUs' code spills.
__device__ __forceinline__ float divide_by_sum(float x, float sum) {
  if constexpr (kCtaTileQ == 16) return x * reciprocal(sum);
  return x / sum;
}

// `row_max` (log2 domain, -inf without keys) and `row_sum` of 2^(logit - row_max).
__device__ __forceinline__ RowFinish finish_part(float row_max, float row_sum) {
  if (row_sum == 0.f) return {0.f, neg_inf()};
  return {divide_by_sum(1.f, row_sum), log_sum(row_max, row_sum)};
}

// The same for a unit's final result: an attention sink joins the denominator here, once, and v_scale applies.
__device__ __forceinline__ RowFinish finish_row(const AttentionParams& params, const Row& row, int kv_head, float row_max, float row_sum) {
  if (params.sinks != nullptr) {
    float sink = __ldg(params.sinks + row.head) * kLog2E;
    float joint_max = fmaxf(row_max, sink);
    if (joint_max != neg_inf()) {
      float rescale = ex2(row_max - joint_max);
      float joint_sum = row_sum * rescale + ex2(sink - joint_max);
      float v_scale = params.v_scale_tensor * (params.v_scale != nullptr ? __ldg(params.v_scale + kv_head) : 1.f);
      return {divide_by_sum(rescale, joint_sum) * v_scale, log_sum(joint_max, joint_sum)};
    }
  }
  RowFinish finish = finish_part(row_max, row_sum);
  finish.scale *= params.v_scale_tensor * (params.v_scale != nullptr ? __ldg(params.v_scale + kv_head) : 1.f);
  return finish;
}

// Byte-free address of an output row: the first of its kHeadDimVo 16-bit elements.
__device__ __forceinline__ unsigned short* output_row(const AttentionParams& params, const Tile& tile, const Row& row) {
  return static_cast<unsigned short*>(params.o) + (static_cast<long long>(tile.q_begin) + row.token) * params.o_stride_token +
         row.head * params.o_stride_head;
}

__device__ __forceinline__ void store_lse(const AttentionParams& params, const Tile& tile, const Row& row, float lse) {
  if (params.lse != nullptr) params.lse[(static_cast<long long>(tile.q_begin) + row.token) * params.num_qo_heads + row.head] = lse;
}

// A merge group's record, but for its counters. Load it early: it is needed when a segment ends, and costs a trip to memory.
struct MergeGroup {
  int first_row, num_parts;
};

constexpr int kMergeGroupInts = 12;

__device__ __forceinline__ MergeGroup load_merge_group(const AttentionParams& params, const Segment& segment) {
  if (segment.group < 0) return {0, 0};
  const int* record = params.merge_groups + static_cast<long long>(kMergeGroupInts) * segment.group;
  return {record[0], record[1]};
}

// Counter of the parts of which one warp's share (counter `which`), or the whole CTA's (counter 0), has arrived.
__device__ __forceinline__ int* arrival_counter(const AttentionParams& params, const Segment& segment, int which) {
  return params.merge_groups + static_cast<long long>(kMergeGroupInts) * segment.group + 2 + which;
}

// First row of a part in partial_o and partial_lse.
__device__ __forceinline__ long long part_row(const MergeGroup& group, const Tile& tile, const Segment& segment) {
  return group.first_row + static_cast<long long>(segment.part) * tile.num_rows;
}

// Parts whose loads are in flight together while merging. At head_dim 256 a 16-row tile's accumulators leave room for few.
constexpr int kMergeBatch = kHeadDimVo == 256 ? 4 : 16;

// The threads that finish parts together, and how they meet: all of the CTA, unless a kernel has others.
struct CtaThreads {
  static __device__ __forceinline__ int index() { return threadIdx.x; }
  static __device__ __forceinline__ int count() { return blockDim.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
};

// `num_threads` threads: write columns [first_column, first_column + kColumns) of a unit's output from its parts, in part order.
template <int kColumns>
__device__ __forceinline__ void merge_columns(const AttentionParams& params, const Tile& tile, const Segment& segment, const MergeGroup& group,
                                              int first_column, int thread, int num_threads) {
  constexpr int kPairs = kColumns / 2;
  for (int idx = thread; idx < tile.num_rows * kPairs; idx += num_threads) {
    int row_in_tile = idx / kPairs, column = first_column + idx % kPairs * 2;
    const float* lse = params.partial_lse + group.first_row + row_in_tile;
    const float* o = params.partial_o + (static_cast<long long>(group.first_row) + row_in_tile) * kHeadDimVo + column;
    float row_max = neg_inf(), row_sum = 0.f;
    float2 sum = {0.f, 0.f};
    for (int first = 0; first < group.num_parts; first += kMergeBatch) {
      float part_lse[kMergeBatch];
      float2 part_o[kMergeBatch];
      float batch_max = row_max;
#pragma unroll
      for (int i = 0; i < kMergeBatch; ++i) {
        long long part = static_cast<long long>(first + i) * tile.num_rows;
        bool exists = first + i < group.num_parts;
        part_lse[i] = exists ? load_l2(lse + part) : neg_inf();
        part_o[i] = exists ? load_l2(reinterpret_cast<const float2*>(o + part * kHeadDimVo)) : float2{0.f, 0.f};
      }
#pragma unroll
      for (int i = 0; i < kMergeBatch; ++i) batch_max = fmaxf(batch_max, part_lse[i]);
      // Every part may be empty: keep -inf out of the differences.
      float reference = batch_max == neg_inf() ? 0.f : batch_max;
      float rescale = ex2(row_max - reference);
      row_max = batch_max;
      row_sum *= rescale, sum.x *= rescale, sum.y *= rescale;
#pragma unroll
      for (int i = 0; i < kMergeBatch; ++i) {
        float weight = ex2(part_lse[i] - reference);
        row_sum += weight, sum.x += weight * part_o[i].x, sum.y += weight * part_o[i].y;
      }
    }
    Row row = make_row(params, tile, segment.kv_head, row_in_tile);
    RowFinish finish = finish_row(params, row, segment.kv_head, row_max, row_sum);
    if constexpr (kUserOutput) {
      sum.x = user_output(params, tile, row, column, sum.x * finish.scale);
      sum.y = user_output(params, tile, row, column + 1, sum.y * finish.scale);
      finish.scale = 1.f;
    }
    *reinterpret_cast<unsigned*>(output_row(params, tile, row) + column) = pack_pair<kOElement>(sum.x * finish.scale, sum.y * finish.scale);
    if (column == 0) store_lse(params, tile, row, finish.lse);
  }
}

// All of `Threads`, after they stored their share of a part: announce it; true if it was the last of its group, which they then merge.
// `is_last` is one int of shared memory; the caller synchronises before reusing it.
template <typename Threads = CtaThreads>
__device__ __forceinline__ bool arrive_part(const AttentionParams& params, const Segment& segment, const MergeGroup& group, int* is_last) {
  Threads::sync();
  if (Threads::index() == 0) {
    int* arrived = arrival_counter(params, segment, 0);
    *is_last = atomic_increment_acq_rel(arrived) == group.num_parts - 1;
    // Leave the counter as the plan set it, so that the next run finds it zero.
    if (*is_last) *arrived = 0;
  }
  Threads::sync();
  return *is_last;
}

__device__ __forceinline__ void finish_part_of_group(const AttentionParams& params, const Tile& tile, const Segment& segment, const MergeGroup& group,
                                                     int* is_last) {
  if (arrive_part(params, segment, group, is_last)) {
    merge_columns<kHeadDimVo>(params, tile, segment, group, 0, CtaThreads::index(), CtaThreads::count());
  }
}
