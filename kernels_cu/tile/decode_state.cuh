// SPDX-License-Identifier: Apache-2.0
// The softmax state of one warp over a 16-row tile.
#pragma once

#include "tile/decode_logits.cuh"
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

  // Rescale to the new maxima; logits become weights 2^(scale * logit - max), rounded to operands of the product with values. Rows 8 to 15
  // are left out when `num_rows` says that there are none.
  __device__ __forceinline__ void absorb(const float (&logits)[kKeyTiles][4], const float (&scale)[2], int num_rows, unsigned (&weights)[kBlockParts][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && num_rows <= 8) {
#pragma unroll
        for (int part = 0; part < kBlockParts; ++part) weights[part][1] = weights[part][3] = 0u;
        continue;
      }
      float largest = fmaxf(logits[0][2 * r], logits[0][2 * r + 1]);
#pragma unroll
      for (int n = 1; n < kKeyTiles; ++n) largest = fmaxf(largest, fmaxf(logits[n][2 * r], logits[n][2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      float new_max = fmaxf(row_max[r], kScaleInExponent ? largest * scale[r] : largest);
      // A row without keys so far keeps -inf out of the differences.
      float reference = new_max == neg_inf() ? 0.f : new_max;
      float rescale = ex2(row_max[r] - reference);
      row_max[r] = new_max;
      row_sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        float pair[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float logit = logits[n][2 * r + j];
          pair[j] = ex2(kScaleInExponent ? fmaf(logit, scale[r], -reference) : logit - reference);
          row_sum[r] += pair[j];
        }
        weights[n / 2][n % 2 * 2 + r] = pack_pair<kMmaElement>(pair[0], pair[1]);
      }
      // The maximum soon stops growing, and most blocks need no rescaling.
      if (__builtin_expect(__any_sync(0xffffffffu, rescale != 1.f), false)) {
#pragma unroll
        for (int n = 0; n < kOutputTiles; ++n) o[n][2 * r] *= rescale, o[n][2 * r + 1] *= rescale;
      }
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

