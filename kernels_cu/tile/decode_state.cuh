// SPDX-License-Identifier: Apache-2.0
// The softmax state of one warp over a 16-row tile.
#pragma once

#include "tile/decode_logits.cuh"
#include "tile/output.cuh"

// Growth of a row's maximum, in powers of two, that weights take on before outputs and sum are rescaled. Half holds 2^8.
constexpr float kLazyGrowth = 8.f;
// With fp8 references follow every maximum: docs/DECODE.md has the figures.
constexpr bool kReferenceLags = !kFp8;
// Stands for the maximum of a row that has seen no key: finite, so that -inf minus it is still -inf, and so low that any logit outgrows it.
constexpr float kNoMax = -3e38f;

// Rows g and g + 8 of thread (g, c): output columns by tile, and this thread's share of the sum. Weights are 2^(scale * logit - reference).
struct WarpState {
  float o[kOutputTiles][4];
  float reference[2];  // the running maximum (log2 domain), or one that it has outgrown by no more than kLazyGrowth
  float row_sum[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
    reference[0] = reference[1] = kNoMax;
    row_sum[0] = row_sum[1] = 0.f;
  }

  // Logits become weights, rounded to operands of the product with values. Rows 8 to 15 are left out when `num_rows` says that there are
  // none.
  __device__ __forceinline__ void absorb(const float (&logits)[kKeyTiles][4], const float (&scale)[2], int num_rows, unsigned (&weights)[kBlockParts][4]) {
    if (num_rows <= 8) {
#pragma unroll
      for (int part = 0; part < kBlockParts; ++part) weights[part][1] = weights[part][3] = 0u;
    }
    if constexpr (kReferenceLags) {
      absorb_lagging(logits, scale, num_rows, weights);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r == 1 && num_rows <= 8) continue;
        float rescale = raise_reference(logits, scale[r], r);
        row_sum[r] += make_weights(logits, scale[r], r, weights);
        // The maximum soon stops growing, and most blocks need no rescaling.
        if (__builtin_expect(__any_sync(0xffffffffu, rescale != 1.f), false)) rescale_output(r, rescale);
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

  // The reference that the row's sum and outputs go by, -inf without keys.
  __device__ __forceinline__ float row_max(int r) const { return reference[r] == kNoMax ? neg_inf() : reference[r]; }

 private:
  // No lane waits for another's maximum: one that outgrows the reference of its row calls for new references, soon a rare event. By then
  // the weights are on their way, and are made again.
  __device__ __forceinline__ void absorb_lagging(const float (&logits)[kKeyTiles][4], const float (&scale)[2], int num_rows,
                                                 unsigned (&weights)[kBlockParts][4]) {
    float sums[2];
#pragma unroll 1
    for (bool raised = false;; raised = true) {
      bool outgrown = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[r] = 0.f;
        if (r == 1 && num_rows <= 8) continue;
        outgrown |= exponent(largest_of(logits, r), scale[r], r) > kLazyGrowth;
        sums[r] = make_weights(logits, scale[r], r, weights);
      }
      if (raised || __builtin_expect(!__any_sync(0xffffffffu, outgrown), true)) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r == 1 && num_rows <= 8) continue;
        rescale_output(r, raise_reference(logits, scale[r], r));
      }
    }
    row_sum[0] += sums[0], row_sum[1] += sums[1];
  }

  // Of this thread's logits of a row.
  static __device__ __forceinline__ float largest_of(const float (&logits)[kKeyTiles][4], int r) {
    float largest[kKeyTiles];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) largest[n] = fmaxf(logits[n][2 * r], logits[n][2 * r + 1]);
#pragma unroll
    for (int step = kKeyTiles / 2; step > 0; step /= 2) {
#pragma unroll
      for (int n = 0; n < step; ++n) largest[n] = fmaxf(largest[n], largest[n + step]);
    }
    return largest[0];
  }

  // With logits of -inf, which no row sees, the result is -inf too: references are finite.
  __device__ __forceinline__ float exponent(float logit, float scale, int r) const {
    return kScaleInExponent ? fmaf(logit, scale, -reference[r]) : logit - reference[r];
  }

  // This thread's weights of a row; returns their sum.
  __device__ __forceinline__ float make_weights(const float (&logits)[kKeyTiles][4], float scale, int r, unsigned (&weights)[kBlockParts][4]) const {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float low = ex2(exponent(logits[n][2 * r], scale, r)), high = ex2(exponent(logits[n][2 * r + 1], scale, r));
      sum += low + high;
      weights[n / 2][n % 2 * 2 + r] = pack_pair<kMmaElement>(low, high);
    }
    return sum;
  }

  // The maximum of what a row has seen becomes its reference. Returns what the outputs are to be multiplied with; the sum has been.
  __device__ __forceinline__ float raise_reference(const float (&logits)[kKeyTiles][4], float scale, int r) {
    float largest = largest_of(logits, r);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    float new_max = fmaxf(reference[r], kScaleInExponent ? largest * scale : largest);
    float rescale = ex2(reference[r] - new_max);
    reference[r] = new_max;
    row_sum[r] *= rescale;
    return rescale;
  }

  __device__ __forceinline__ void rescale_output(int r, float rescale) {
#pragma unroll
    for (int n = 0; n < kOutputTiles; ++n) o[n][2 * r] *= rescale, o[n][2 * r + 1] *= rescale;
  }
};
