// SPDX-License-Identifier: Apache-2.0
// From a row's running softmax state to the output array, directly or through the parts of a merge group.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "tile/rows.cuh"

// How to finish a row: o = scale * accumulator, and the base-2 log-sum-exp.
struct RowFinish {
  float scale;
  float lse;
};

// `row_max` (log2 domain, -inf without keys) and `row_sum` of 2^(logit - row_max).
__device__ __forceinline__ RowFinish finish_part(float row_max, float row_sum) {
  if (row_sum == 0.f) return {0.f, neg_inf()};
  return {1.f / row_sum, row_max + lg2(row_sum)};
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
      return {rescale / joint_sum * v_scale, joint_max + lg2(joint_sum)};
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

// First row of a part in partial_o and partial_lse.
__device__ __forceinline__ long long part_row(const AttentionParams& params, const Tile& tile, const Segment& segment) {
  return params.merge_groups[4ll * segment.group] + static_cast<long long>(segment.part) * tile.num_rows;
}

// Sum the parts of one element group of a row, four columns wide, in part order.
__device__ __forceinline__ float4 merge_columns(const AttentionParams& params, long long first, int num_rows, int num_parts, int column, float joint_max,
                                                float& row_sum) {
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  row_sum = 0.f;
#pragma unroll 8
  for (int part = 0; part < num_parts; ++part) {
    long long row = first + static_cast<long long>(part) * num_rows;
    float weight = ex2(load_l2(params.partial_lse + row) - joint_max);
    float4 o = load_l2(reinterpret_cast<const float4*>(params.partial_o + row * kHeadDimVo + column));
    row_sum += weight;
    sum.x += weight * o.x, sum.y += weight * o.y, sum.z += weight * o.z, sum.w += weight * o.w;
  }
  return sum;
}

// All threads of the CTA: write a unit's output from its parts.
__device__ __forceinline__ void merge_parts(const AttentionParams& params, const Tile& tile, const Segment& segment) {
  constexpr int kColumnGroups = kHeadDimVo / 4;
  int first_row = params.merge_groups[4ll * segment.group];
  int num_parts = params.merge_groups[4ll * segment.group + 1];
  for (int idx = threadIdx.x; idx < tile.num_rows * kColumnGroups; idx += blockDim.x) {
    int row_in_tile = idx / kColumnGroups, column = idx % kColumnGroups * 4;
    Row row = make_row(params, tile, segment.kv_head, row_in_tile);
    long long first = static_cast<long long>(first_row) + row_in_tile;
    float joint_max = neg_inf();
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) {
      joint_max = fmaxf(joint_max, load_l2(params.partial_lse + first + static_cast<long long>(part) * tile.num_rows));
    }
    float row_sum;
    // Every part may be empty: keep -inf out of the exponent.
    float4 sum = merge_columns(params, first, tile.num_rows, num_parts, column, joint_max == neg_inf() ? 0.f : joint_max, row_sum);
    RowFinish finish = finish_row(params, row, segment.kv_head, joint_max, row_sum);
    uint2 packed = {pack_pair<kQElement>(sum.x * finish.scale, sum.y * finish.scale), pack_pair<kQElement>(sum.z * finish.scale, sum.w * finish.scale)};
    *reinterpret_cast<uint2*>(output_row(params, tile, row) + column) = packed;
    if (column == 0) store_lse(params, tile, row, finish.lse);
  }
}

// All threads, after they stored their share of a part: announce it, and merge if it was the last of its group.
// `is_last` is one int of shared memory; the caller synchronises before reusing it.
__device__ __forceinline__ void finish_part_of_group(const AttentionParams& params, const Tile& tile, const Segment& segment, int* is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    int* arrived = params.merge_groups + 4ll * segment.group + 2;
    bool last = atomic_increment_acq_rel(arrived) == params.merge_groups[4ll * segment.group + 1] - 1;
    // Leave the counter as the plan set it, so that the next run finds it zero.
    if (last) *arrived = 0;
    *is_last = last;
  }
  __syncthreads();
  if (*is_last) merge_parts(params, tile, segment);
}
