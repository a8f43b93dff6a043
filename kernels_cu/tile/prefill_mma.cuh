// SPDX-License-Identifier: Apache-2.0
// The two matrix products of an iteration: logits = Q K^T, and output += softmax(logits) V.
#pragma once

#include "tile/softmax_rows.cuh"

// Byte offset, in a K tile, of the row and first chunk this lane addresses for ldmatrix. 16-bit keys: 16 keys by two
// chunks. 8-bit keys: 32 keys by one chunk, which holds all 16 dims of a step.
__device__ __forceinline__ unsigned k_lane_offset(unsigned lane) {
  return kFp8Kv ? Swizzle<kKRowBytes>::offset(lane, 0) : Swizzle<kKRowBytes>::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Rotate the fp8 keys of two steps of 16 dims that are head_dim / 2 apart, in registers: their rotated values need 16 bits.
__device__ __forceinline__ void rotate_fp8_fragments(unsigned (&low)[2], unsigned (&high)[2], const float2* turns, float position) {
  rotate_pair<kMmaElement>(low[0], high[0], rope_cos_sin(turns[0], position), rope_cos_sin(turns[1], position));
  rotate_pair<kMmaElement>(low[1], high[1], rope_cos_sin(turns[2], position), rope_cos_sin(turns[3], position));
}

__device__ __forceinline__ void load_q_fragments(unsigned (&a)[kRowTiles][4], unsigned q_lane, int step) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) ldmatrix_x4(a[m], Swizzle<kQRowBytes>::advance(q_lane, step * 2) + m * 16 * kQRowBytes);
}

// What this lane addresses for ldmatrix in the query tile and a K tile.
struct LaneAddresses {
  unsigned q, k;

  __device__ __forceinline__ LaneAddresses(unsigned q_tile, unsigned k_tile) {
    unsigned thread = recompute_from(threadIdx.x), lane = thread % 32;
    q = q_tile + Swizzle<kQRowBytes>::offset(thread / 32 * kWarpRows + lane % 16, lane / 16);
    k = k_tile + k_lane_offset(lane);
  }
};

// The operands of one step of 16 dims of 16-bit queries and keys.
struct StepOperands {
  unsigned a[kRowTiles][4], b[kKeyTiles / 2][4];

  __device__ __forceinline__ void load(LaneAddresses at, int step) {
    load_q_fragments(a, at.q, step);
#pragma unroll
    for (int pair = 0; pair < kKeyTiles / 2; ++pair) ldmatrix_x4(b[pair], Swizzle<kKRowBytes>::advance(at.k, step * 2) + pair * 16 * kKRowBytes);
  }
};

__device__ __forceinline__ void clear(Logits& s) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
  }
}

// 16-bit keys: all steps of 16 dims, each with the operands of the next one on their way. `first` are those of the first.
__device__ __forceinline__ void logits_steps(Logits& s, LaneAddresses addresses, const StepOperands& first) {
  constexpr int kSteps = kHeadDimQk / 16;
  StepOperands operands[2] = {first};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) operands[(step + 1) & 1].load(addresses, step + 1);
    const StepOperands& at = operands[step & 1];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        mma_m16n8k16(s[m][pair * 2], at.a[m], at.b[pair][0], at.b[pair][1]);
        mma_m16n8k16(s[m][pair * 2 + 1], at.a[m], at.b[pair][2], at.b[pair][3]);
      }
    }
  }
}

// 8-bit keys: one step of 16 dims.
__device__ __forceinline__ void logits_step_fp8(Logits& s, unsigned q_lane, unsigned k_lane, int step) {
  unsigned a[kRowTiles][4];
  load_q_fragments(a, q_lane, step);
#pragma unroll
  for (int quad = 0; quad < kKeyTiles / 4; ++quad) {
    unsigned b[4];
    ldmatrix_x4(b, Swizzle<kKRowBytes>::advance(k_lane, step) + quad * 32 * kKRowBytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      unsigned b0 = fp8_pair_to_half(b[j] & 0xffffu), b1 = fp8_pair_to_half(b[j] >> 16);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) mma_m16n8k16(s[m][quad * 4 + j], a[m], b0, b1);
    }
  }
}

// 8-bit keys that turn: steps `step` and `step + head_dim / 32` together.
__device__ __forceinline__ void logits_step_fp8_rope(Logits& s, unsigned q_lane, unsigned k_lane, int step, const float2* turns, int key_begin) {
  constexpr int kPartner = kHeadDimQk / 32;
  const float2* lane_turns = turns + step * 16 + recompute_from(threadIdx.x) % 4 * 4;
  int lane_key = key_begin + recompute_from(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int quad = 0; quad < kKeyTiles / 4; ++quad) {
    unsigned b_low[4], b_high[4];
    ldmatrix_x4(b_low, Swizzle<kKRowBytes>::advance(k_lane, step) + quad * 32 * kKRowBytes);
    ldmatrix_x4(b_high, Swizzle<kKRowBytes>::advance(k_lane, step + kPartner) + quad * 32 * kKRowBytes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int n = quad * 4 + j;
      unsigned low[2] = {fp8_pair_to_half(b_low[j] & 0xffffu), fp8_pair_to_half(b_low[j] >> 16)};
      unsigned high[2] = {fp8_pair_to_half(b_high[j] & 0xffffu), fp8_pair_to_half(b_high[j] >> 16)};
      rotate_fp8_fragments(low, high, lane_turns, static_cast<float>(lane_key + n * 8));
      unsigned a[kRowTiles][4];
      load_q_fragments(a, q_lane, step);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) mma_m16n8k16(s[m][n], a[m], low[0], low[1]);
      load_q_fragments(a, q_lane, step + kPartner);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) mma_m16n8k16(s[m][n], a[m], high[0], high[1]);
    }
  }
}

// Raw products of the warp's rows with kLogitKeys keys; `k_tile` is where the first one lies, `key_begin` its index.
__device__ __forceinline__ void compute_logits(Logits& s, unsigned q_tile, unsigned k_tile, const float2* turns, int key_begin) {
  LaneAddresses at(q_tile, k_tile);
  clear(s);
  if constexpr (!kFp8Kv) {
    StepOperands first;
    first.load(at, 0);
    logits_steps(s, at, first);
  } else if constexpr (kRope) {
    // Unrolled, the angles of later steps would be computed early and kept.
#pragma unroll 1
    for (int step = 0; step < kHeadDimQk / 32; ++step) logits_step_fp8_rope(s, at.q, at.k, step, turns, key_begin);
  } else {
#pragma unroll
    for (int step = 0; step < kHeadDimQk / 16; ++step) logits_step_fp8(s, at.q, at.k, step);
  }
}

// output += exponentials of the logits times the values of their keys, the first of which lies at `v_tile`. With kHaveFirst the first 16
// exponentials are made and summed.
template <bool kHaveFirst>
__device__ __forceinline__ void accumulate_output(Output& o, const Logits& s, const RowScales& scales, RowState& state, const FirstWeights& first,
                                                  unsigned v_tile) {
  unsigned lane = recompute_from(threadIdx.x) % 32;
  unsigned v_lane = v_tile + Swizzle<kVRowBytes>::offset(lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < kLogitKeys / 16; ++step) {
    StepWeights weights = first.weights;
    if (!kHaveFirst || step > 0) exponentials(weights, state.sum, s, scales, state, step);
#pragma unroll
    for (int pair = 0; pair < kVRowBytes / 32; ++pair) {
      unsigned b[4];
      ldmatrix_x4_trans(b, Swizzle<kVRowBytes>::advance(v_lane, pair * 2) + step * 16 * kVRowBytes);
      if constexpr (kFp8Kv) {
        // A lane gets dims 2g, 2g + 1 of keys 2c, 2c + 1: the even dims of a 16-wide block make one column tile, the odd ones another.
#pragma unroll
        for (int block = 0; block < 2; ++block) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            unsigned b0 = fp8_pair_to_half(__byte_perm(b[block * 2], 0, odd ? 0x4431 : 0x4420));
            unsigned b1 = fp8_pair_to_half(__byte_perm(b[block * 2 + 1], 0, odd ? 0x4431 : 0x4420));
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) mma_m16n8k16(o[m][pair * 4 + block * 2 + odd], weights.a[m], b0, b1);
          }
        }
      } else {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16(o[m][pair * 2], weights.a[m], b[0], b[1]);
          mma_m16n8k16(o[m][pair * 2 + 1], weights.a[m], b[2], b[3]);
        }
      }
    }
  }
}
