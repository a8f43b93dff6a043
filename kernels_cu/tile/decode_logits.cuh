// SPDX-License-Identifier: Apache-2.0
// Logits of a 16-row tile against one block of keys, in the log2 domain, masked.
#pragma once

#include "ptx/math.cuh"
#include "tile/decode_fragments.cuh"

// Past head_dim 128 the accumulators and pointers leave no registers for the query, which then waits in shared memory.
constexpr bool kQueryInSmem = kHeadDimQk > 128;
// Nor for the fragments of many k-steps at a time.
constexpr int kStepsAtOnce = !kQueryInSmem ? kQkSteps : kPosEncoding == PosEncoding::kRopeLlama ? 1 : 2;

// Products of 16 keys are two chains, in which each waits for the one before. Where there are registers, even and odd k-steps make four.
constexpr bool kSplitsSteps = kKeyTiles == 2 && !kQueryInSmem;

// Logits that are nothing but scaled products stay unscaled, and the exponent's own multiplication scales them. Scales are positive, so
// the greatest product is the greatest logit; a product of scales that underflows is kept from 0, by which a hidden logit, minus
// infinity, would become no number.
constexpr bool kScaleInExponent = !kSoftCap && !kUserLogit && kPosEncoding != PosEncoding::kAlibi;
// The least positive normal number.
constexpr float kLeastScale = 1.17549435e-38f;

// What a warp knows of a tile's rows while it walks the keys of a segment.
struct RowGroup {
  Row row[2];               // rows g and g + 8 of this thread
  unsigned q[kQueryInSmem ? 1 : kQkSteps][4];  // query fragments
  const float2* turns;      // RoPE frequencies
  uint4* q_shared;          // the same by step and lane, when they do not fit registers
  float scale[2];           // logit = scale * (q . k): natural with a soft cap or a user's transform, log2 domain otherwise
  float slope[2];           // ALiBi slope in the log2 domain
  int all_see_from, all_see_to;  // every row of the tile sees the keys in [all_see_from, all_see_to]

  __device__ __forceinline__ RowGroup(const AttentionParams& params, const Tile& tile, const Segment& segment, int lane, uint4* query_space,
                                      const float2* rope_turns)
      : turns(rope_turns), q_shared(query_space + lane) {
    int g = lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) row[r] = make_row(params, tile, segment.kv_head, g + 8 * r);
    float common = params.sm_scale * (params.k_scale != nullptr ? __ldg(params.k_scale + segment.kv_head) : 1.f);
    if constexpr (!kSoftCap && !kUserLogit) common *= kLog2E;
    float q_scale[2];
    unsigned loaded[kQkSteps][4];
    load_query(params, tile, row, lane, loaded, q_scale);
    if constexpr (kFp8 && kQElement == Element::kBfloat16) {
      query_to_half(row, turns, tile.num_rows, lane, loaded, q_scale);
    } else if constexpr (kPosEncoding == PosEncoding::kRopeLlama) {
      rotate_query(row, turns, lane, loaded);
    }
    keep_query(loaded);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = kScaleInExponent ? fmaxf(common * q_scale[r], kLeastScale) : common * q_scale[r];
      slope[r] = kPosEncoding == PosEncoding::kAlibi && g + 8 * r < tile.num_rows ? __ldg(params.alibi_slopes + row[r].head) * kLog2E : 0.f;
    }
    all_see_from = make_row(params, tile, segment.kv_head, tile.num_rows - 1).lo;
    all_see_to = make_row(params, tile, segment.kv_head, 0).hi;
  }

  // The scratch memory is free once every warp has finished the previous segment's keys.
  __device__ __forceinline__ void keep_query(const unsigned (&loaded)[kQkSteps][4]) {
    if constexpr (kQueryInSmem) {
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kQkSteps; ++step) {
        if (threadIdx.x < 32) q_shared[step * 32] = {loaded[step][0], loaded[step][1], loaded[step][2], loaded[step][3]};
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int step = 0; step < kQkSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[step][i] = loaded[step][i];
      }
    }
  }

  __device__ __forceinline__ void query_step(int step, unsigned (&a)[4]) const {
    if constexpr (kQueryInSmem) {
      uint4 shared = q_shared[step * 32];
      a[0] = shared.x, a[1] = shared.y, a[2] = shared.z, a[3] = shared.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[step][i];
    }
  }

  // logits[n][2r + j]: row g + 8r, key 8n + 2c + j of the block that begins with `key`; not scaled yet.
  __device__ __forceinline__ void multiply_keys(unsigned keys, int key, int lane, float (&logits)[kKeyTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) logits[n][0] = logits[n][1] = logits[n][2] = logits[n][3] = 0.f;
    unsigned lane_rows = keys + key_lane_offset(lane);
    if constexpr (kPosEncoding == PosEncoding::kRopeLlama) {
#pragma unroll kStepsAtOnce
      for (int step = 0; step < kQkSteps / 2; ++step) {
        unsigned low[kKeyTiles][2], high[kKeyTiles][2];
        load_keys(lane_rows, step, low);
        load_keys(lane_rows, step + kQkSteps / 2, high);
        rotate_keys(turns, key, step, lane, low, high);
        multiply_step(step, low, logits);
        multiply_step(step + kQkSteps / 2, high, logits);
      }
    } else {
      float odd[kKeyTiles][4] = {};
#pragma unroll kStepsAtOnce
      for (int step = 0; step < kQkSteps; ++step) {
        unsigned b[kKeyTiles][2];
        load_keys(lane_rows, step, b);
        multiply_step(step, b, kSplitsSteps && step % 2 == 1 ? odd : logits);
      }
      if constexpr (kSplitsSteps) {
#pragma unroll
        for (int i = 0; i < 4 * kKeyTiles; ++i) logits[i / 4][i % 4] += odd[i / 4][i % 4];
      }
    }
  }

  __device__ __forceinline__ void multiply_step(int step, const unsigned (&b)[kKeyTiles][2], float (&logits)[kKeyTiles][4]) const {
    unsigned a[4];
    query_step(step, a);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) mma_m16n8k16(logits[n], a, b[n][0], b[n][1]);
  }

  // Scale (if the exponent does not), transform, cap, bias and mask the logits of the block that begins with `key`.
  __device__ __forceinline__ void finish_logits(const AttentionParams& params, const Tile& tile, int key, int lane, float (&logits)[kKeyTiles][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && tile.num_rows <= 8) continue;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          int own_key = key + 8 * n + 2 * (lane % 4) + j;
          float& logit = logits[n][2 * r + j];
          if constexpr (!kScaleInExponent) logit *= scale[r];
          if constexpr (kUserLogit) {
            logit = user_logit(params, tile, row[r], own_key, logit);
            if constexpr (!kSoftCap) logit *= kLog2E;
          }
          if constexpr (kSoftCap) logit = params.logits_soft_cap * kLog2E * tanh_ex2(logit / params.logits_soft_cap);
          if constexpr (kPosEncoding == PosEncoding::kAlibi) logit += slope[r] * (own_key - row[r].position);
        }
      }
    }
    // Few blocks need a mask. A branch of its own keeps its instructions out of the others' way; folded into the loop above, the
    // compiler would run them for all.
    bool all_seen = !kCustomMask && !kUserMask && key >= all_see_from && key + kBlockKeys - 1 <= all_see_to;
    if (__builtin_expect(!all_seen, false)) mask_logits(params, tile, key, lane, logits);
  }

  __device__ __forceinline__ void mask_logits(const AttentionParams& params, const Tile& tile, int key, int lane, float (&logits)[kKeyTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Row& own = row[i / 2];
        int own_key = key + 8 * n + 2 * (lane % 4) + i % 2;
        bool seen = own_key >= own.lo && own_key <= own.hi;
        if constexpr (kCustomMask) seen = seen && custom_mask_bit(params, tile, own, own_key);
        if constexpr (kUserMask) seen &= user_mask(params, tile, own, own_key);
        if (!seen) logits[n][i] = neg_inf();
      }
    }
  }
};
