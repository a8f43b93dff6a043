// SPDX-License-Identifier: Apache-2.0
// Logits of a 16-row tile against one block of 16 keys, in the log2 domain, masked.
#pragma once

#include "ptx/math.cuh"
#include "tile/decode_fragments.cuh"

// At head_dim 256 the output accumulators leave no registers for the query, which then waits in shared memory.
constexpr bool kQueryInSmem = kHeadDimQk == 256;

// What a warp knows of a tile's rows while it walks the keys of a segment.
struct RowGroup {
  Row row[2];               // rows g and g + 8 of this thread
  unsigned q[kQueryInSmem ? 1 : kQkSteps][4];  // query fragments
  uint4* q_shared;          // the same by step and lane, when they do not fit registers
  float scale[2];           // logit = scale * (q . k): natural with a soft cap, log2 domain otherwise
  float slope[2];           // ALiBi slope in the log2 domain
  int all_see_from, all_see_to;  // every row of the tile sees the keys in [all_see_from, all_see_to]

  __device__ __forceinline__ RowGroup(const AttentionParams& params, const Tile& tile, const Segment& segment, int lane, void* scratch)
      : q_shared(static_cast<uint4*>(scratch) + lane) {
    int g = lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) row[r] = make_row(params, tile, segment.kv_head, g + 8 * r);
    float q_scale[2];
    unsigned loaded[kQkSteps][4];
    load_query(params, tile, row, lane, loaded, q_scale);
    if constexpr (kFp8 && kQElement == Element::kBfloat16) query_to_half(loaded, q_scale);
    keep_query(loaded);
    float common = params.sm_scale * (params.k_scale != nullptr ? __ldg(params.k_scale + segment.kv_head) : 1.f);
    if constexpr (!kSoftCap) common *= kLog2E;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = common * q_scale[r];
      slope[r] = kPosEncoding == PosEncoding::kAlibi && g + 8 * r < tile.num_rows ? __ldg(params.alibi_slopes + row[r].head) * kLog2E : 0.f;
    }
    all_see_from = make_row(params, tile, segment.kv_head, tile.num_rows - 1).lo;
    all_see_to = make_row(params, tile, segment.kv_head, 0).hi;
  }

  // The scratch memory is free once every warp has left the previous segment.
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

  // logits[n][2r + j]: row g + 8r, key `key + 8n + 2c + j`.
  __device__ __forceinline__ void compute_logits(const AttentionParams& params, const Tile& tile, unsigned keys, int key, int lane,
                                                 float (&logits)[2][4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) logits[n][0] = logits[n][1] = logits[n][2] = logits[n][3] = 0.f;
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      unsigned a[4], b[2][2];
      query_step(step, a);
      load_keys(keys, step, lane, b);
      mma_m16n8k16(logits[0], a, b[0][0], b[0][1]);
      mma_m16n8k16(logits[1], a, b[1][0], b[1][1]);
    }
    bool mask = kCustomMask || key < all_see_from || key + kBlockKeys - 1 > all_see_to;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Row& own = row[i / 2];
        int own_key = key + 8 * n + 2 * (lane % 4) + i % 2;
        float logit = logits[n][i] * scale[i / 2];
        if constexpr (kSoftCap) logit = params.logits_soft_cap * kLog2E * tanh_ex2(logit / params.logits_soft_cap);
        if constexpr (kPosEncoding == PosEncoding::kAlibi) logit += slope[i / 2] * (own_key - own.position);
        if (mask) {
          bool seen = own_key >= own.lo && own_key <= own.hi;
          if constexpr (kCustomMask) seen = seen && custom_mask_bit(params, tile, own, own_key);
          if (!seen) logit = neg_inf();
        }
        logits[n][i] = logit;
      }
    }
  }
};
