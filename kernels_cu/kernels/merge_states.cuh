// SPDX-License-Identifier: Apache-2.0
// Merges attention states (normalised output, base-2 log-sum-exp) of disjoint key sets; cupyinfer/backends/merge.py mirrors the parameters.
#pragma once

#include "helper/grid_walk.cuh"
#include "helper/index_array.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

// States of every row. Strides are in elements; head_dim is contiguous.
struct StateArray {
  const unsigned char* v;
  const float* s;
  long long v_stride_row, v_stride_state, v_stride_head;
  long long s_stride_row, s_stride_state, s_stride_head;
  long long num_states;  // of one row; of all rows together when indptr is given; 0 when there is no such array
};

struct MergeStatesParams {
  StateArray first, second;  // a row has the states of both
  unsigned char* v_out;      // may be first.v
  float* s_out;              // may be first.s
  long long v_out_stride_row, v_out_stride_head;
  long long s_out_stride_row, s_out_stride_head;
  IndexArray indptr;  // null data, or [num_rows + 1]: row r has the states indptr[r] .. indptr[r + 1] - 1 of `first`
  const unsigned char* mask;  // null, or [num_rows]: rows with 0 are not written
  long long mask_stride;
  long long num_rows;
  int num_heads, head_dim;
  int value_type;      // 0 float16, 1 bfloat16, 2 float32
  int vectorized;      // every row of values is aligned to 16 bytes
  int lanes_per_unit;  // power of two up to 32: lanes that share one (row, head)
  int unused;
};

// Element access, one 16-byte vector or one element at a time.
template <Element kElement>
struct HalfValues {
  static constexpr int kBytes = 2, kVectorWidth = 8;

  static __device__ __forceinline__ void load(const unsigned char* at, float (&x)[8]) {
    uint4 raw = *reinterpret_cast<const uint4*>(at);
    unpack_pair<kElement>(raw.x, x[0], x[1]);
    unpack_pair<kElement>(raw.y, x[2], x[3]);
    unpack_pair<kElement>(raw.z, x[4], x[5]);
    unpack_pair<kElement>(raw.w, x[6], x[7]);
  }
  static __device__ __forceinline__ void load(const unsigned char* at, float (&x)[1]) {
    float upper;
    unpack_pair<kElement>(*reinterpret_cast<const unsigned short*>(at), x[0], upper);
  }
  static __device__ __forceinline__ void store(unsigned char* at, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(at) = make_uint4(pack_pair<kElement>(x[0], x[1]), pack_pair<kElement>(x[2], x[3]), pack_pair<kElement>(x[4], x[5]),
                                               pack_pair<kElement>(x[6], x[7]));
  }
  static __device__ __forceinline__ void store(unsigned char* at, const float (&x)[1]) {
    *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(pack_pair<kElement>(x[0], 0.f));
  }
};

struct FloatValues {
  static constexpr int kBytes = 4, kVectorWidth = 4;

  static __device__ __forceinline__ void load(const unsigned char* at, float (&x)[4]) {
    float4 raw = *reinterpret_cast<const float4*>(at);
    x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w;
  }
  static __device__ __forceinline__ void load(const unsigned char* at, float (&x)[1]) { x[0] = *reinterpret_cast<const float*>(at); }
  static __device__ __forceinline__ void store(unsigned char* at, const float (&x)[4]) {
    *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
  }
  static __device__ __forceinline__ void store(unsigned char* at, const float (&x)[1]) { *reinterpret_cast<float*>(at) = x[0]; }
};

// The states of one (row, head).
struct StateRange {
  const unsigned char* v;
  const float* s;
  long long v_stride_bytes, s_stride;
  int num_states;
};

template <class Values>
__device__ __forceinline__ StateRange states_of(const StateArray& array, long long row, int head, long long first_state, int num_states) {
  return {array.v + (row * array.v_stride_row + first_state * array.v_stride_state + head * array.v_stride_head) * Values::kBytes,
          array.s + row * array.s_stride_row + first_state * array.s_stride_state + head * array.s_stride_head, array.v_stride_state * Values::kBytes,
          array.s_stride_state, num_states};
}

__device__ __forceinline__ float max_lse(const StateRange& states, float joint_max) {
#pragma unroll 4
  for (int state = 0; state < states.num_states; ++state) joint_max = fmaxf(joint_max, states.s[state * states.s_stride]);
  return joint_max;
}

// Add the states' share of kWidth columns, relative to 2^joint_max.
template <class Values, int kWidth>
__device__ __forceinline__ void add_states(const StateRange& states, long long column_byte, float joint_max, float (&sum)[kWidth], float& weight_sum) {
#pragma unroll 4
  for (int state = 0; state < states.num_states; ++state) {
    float lse = states.s[state * states.s_stride];
    // An empty state has no share whatever its values are, and -inf - -inf is not a number.
    if (lse == neg_inf()) continue;
    float x[kWidth];
    Values::load(states.v + state * states.v_stride_bytes + column_byte, x);
    float weight = ex2(lse - joint_max);
    weight_sum += weight;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] += weight * x[k];
  }
}

// The lanes of a unit merge one (row, head); returns its log-sum-exp.
template <class Values, int kWidth>
__device__ __forceinline__ float merge_unit(const MergeStatesParams& params, long long row, int head, int lane_in_unit) {
  long long first_state = 0, row_in_array = row;
  int num_states = static_cast<int>(params.first.num_states);
  if (params.indptr.data != nullptr) {
    first_state = max(load_index(params.indptr, row), 0ll);
    num_states = static_cast<int>(max(min(load_index(params.indptr, row + 1), params.first.num_states) - first_state, 0ll));
    row_in_array = 0;
  }
  StateRange first = states_of<Values>(params.first, row_in_array, head, first_state, num_states);
  StateRange second = states_of<Values>(params.second, row, head, 0, static_cast<int>(params.second.num_states));
  float joint_max = max_lse(second, max_lse(first, neg_inf()));
  float lse = neg_inf();
  unsigned char* out = params.v_out + (row * params.v_out_stride_row + head * params.v_out_stride_head) * Values::kBytes;
  for (int column = lane_in_unit * kWidth; column < params.head_dim; column += params.lanes_per_unit * kWidth) {
    float sum[kWidth] = {}, weight_sum = 0.f;
    add_states<Values, kWidth>(first, column * Values::kBytes, joint_max, sum, weight_sum);
    add_states<Values, kWidth>(second, column * Values::kBytes, joint_max, sum, weight_sum);
    float scale = weight_sum == 0.f ? 0.f : 1.f / weight_sum;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] *= scale;
    Values::store(out + column * Values::kBytes, sum);
    lse = weight_sum == 0.f ? neg_inf() : log_sum(joint_max, weight_sum);
  }
  return lse;
}

template <class Values, int kWidth>
__device__ __forceinline__ void merge_all(const MergeStatesParams& params) {
  int lane = threadIdx.x % 32, warps_per_cta = blockDim.x / 32;
  int lane_in_unit = lane & (params.lanes_per_unit - 1), units_per_warp = 32 / params.lanes_per_unit;
  unsigned step = gridDim.x * warps_per_cta * units_per_warp;
  unsigned first = (blockIdx.x * warps_per_cta + threadIdx.x / 32) * units_per_warp;
  GridWalk walk(first + lane / params.lanes_per_unit, step, params.num_heads);
  // The bound is the same for all lanes of a warp, so that all meet at the barrier.
  for (long long base = first; base < params.num_rows * params.num_heads; base += step, walk.next()) {
    long long row = walk.row;
    int head = walk.column;
    bool active = row < params.num_rows && (params.mask == nullptr || params.mask[row * params.mask_stride] != 0);
    float lse = active ? merge_unit<Values, kWidth>(params, row, head, lane_in_unit) : 0.f;
    // s_out may be first.s, which the other lanes of the unit read above.
    __syncwarp();
    if (active && lane_in_unit == 0) params.s_out[row * params.s_out_stride_row + head * params.s_out_stride_head] = lse;
  }
}

template <class Values>
__device__ __forceinline__ void merge_values(const MergeStatesParams& params) {
  if (params.vectorized) {
    merge_all<Values, Values::kVectorWidth>(params);
  } else {
    merge_all<Values, 1>(params);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) merge_states(const __grid_constant__ MergeStatesParams params) {
  switch (params.value_type) {
    case 0: return merge_values<HalfValues<Element::kFloat16>>(params);
    case 1: return merge_values<HalfValues<Element::kBfloat16>>(params);
    default: return merge_values<FloatValues>(params);
  }
}
