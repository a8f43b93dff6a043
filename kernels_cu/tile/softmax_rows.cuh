// SPDX-License-Identifier: Apache-2.0
// Online softmax over rows spread on four lanes each: from raw products to masked logits, and the running maximum.
#pragma once

#include "ptx/math.cuh"
#include "tile/prefill_load.cuh"

// Logits that a user's transform, a soft cap or ALiBi has already brought to the log2 domain; others are scaled inside the exponent.
constexpr bool kTransformLogits = kSoftCap || kAlibi || kUserLogit;
// Growth of a row's maximum, in powers of two, that the exponentials take on before the output is rescaled. Half holds 2^8.
constexpr float kLazyGrowth = 8.f;
// Stands for the maximum of a row that has seen no key: finite, so that -inf minus it is still -inf.
constexpr float kNoMax = -1e30f;

struct RowState {
  float max[kThreadRows];  // reference of the exponentials in the log2 domain, at most kLazyGrowth below the true maximum
  float sum[kThreadRows];  // this thread's share of the sum of exponentials

  __device__ __forceinline__ RowState() {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) max[r] = kNoMax, sum[r] = 0.f;
  }
};

// Multipliers inside the exponent.
struct RowScales {
  float at[kThreadRows];

  __device__ __forceinline__ explicit RowScales(const float* logit_scales) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) at[r] = kTransformLogits ? 1.f : logit_scales[kScaleQRows ? thread_row(r) : 0];
  }
};

// A natural logit through the user's transform, ready for the soft cap or the exponent.
__device__ __forceinline__ float user_logit_of(const AttentionParams& params, const Work& work, const Row& row, int key, float logit) {
  logit = user_logit(params, work.tile, row, key, logit);
  return kSoftCap ? logit / params.logits_soft_cap : logit * kLog2E;
}

// The user's transform, soft cap, then ALiBi; the results are in the log2 domain.
__device__ __forceinline__ void transform_logits(const AttentionParams& params, const Work& work, int key_begin, const float* logit_scales,
                                                 Logits& s) {
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float scale = logit_scales[kScaleQRows ? thread_row(r) : 0], slope = 0.f, distance = 0.f;
    if constexpr (kAlibi) {
      Row row = make_row(params, work.tile, work.segment.kv_head, recompute_from(thread_row(r)));
      slope = thread_row(r) < work.tile.num_rows ? __ldg(params.alibi_slopes + row.head) * kLog2E : 0.f;
      distance = static_cast<float>(key_begin + lane_idx() % 4 * 2 - row.position);
    }
    Row user_row;
    int user_key = 0;
    if constexpr (kUserLogit) {
      user_row = make_row(params, work.tile, work.segment.kv_head, recompute_from(thread_row(r)));
      // What a hook loads for a key is loaded again for the next row: there are no registers to keep it in.
      user_key = recompute_from(key_begin + lane_idx() % 4 * 2);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[r / 2][n][r % 2 * 2 + e];
        x *= scale;
        if constexpr (kUserLogit) x = user_logit_of(params, work, user_row, user_key + n * 8 + e, x);
        if constexpr (kSoftCap) x = params.logits_soft_cap * kLog2E * tanh_ex2(x);
        // The distance of the key itself, which is exact: a slope times the distance of another key would bring a rounding of its own
        // size, and near keys have small biases.
        if constexpr (kAlibi) x = fmaf(slope, distance + static_cast<float>(n * 8 + e), x);
      }
    }
  }
}

// Which of a thread row's keys the user's mask shows, one bit each. A few at a time: what a hook loads takes registers.
__device__ __forceinline__ unsigned user_mask_bits(const AttentionParams& params, const Work& work, const Row& row, int first_key) {
  static_assert(2 * kKeyTiles <= 32, "one bit per key");
  unsigned bits = 0;
#pragma unroll 4
  for (int i = 0; i < 2 * kKeyTiles; ++i) {
    if (user_mask(params, work.tile, row, first_key + i / 2 * 8 + i % 2)) bits |= 1u << i;
  }
  return bits;
}

// Set the logits of keys outside each row's interval, or removed by the custom mask, to -inf.
__device__ __forceinline__ void mask_logits(const AttentionParams& params, const Work& work, int key_begin, Logits& s) {
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    Row row = make_row(params, work.tile, work.segment.kv_head, recompute_from(thread_row(r)));
    int first_key = key_begin + lane_idx() % 4 * 2;
    int lo = row.lo - first_key, hi = min(row.hi, work.segment.kv_end - 1) - first_key;
    unsigned user_bits = 0;
    if constexpr (kUserMask) user_bits = user_mask_bits(params, work, row, first_key);
    // The bit of `first_key` as custom_mask_bit counts them. Eight keys on is one byte on; only bytes of visible keys are read.
    long long bit = kCustomMask ? static_cast<long long>(row.token) * work.tile.kv_len + first_key : 0;
    const unsigned char* bytes = params.mask + work.tile.mask_begin + (bit >> 3);
    int shift = bit & 7;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        bool visible = (kThreeCtas || n * 8 + e >= lo) && n * 8 + e <= hi;
        if constexpr (kCustomMask) visible = visible && (__ldg(bytes + n + (shift + e) / 8) >> (shift + e) % 8 & 1);
        if constexpr (kUserMask) visible = visible && (user_bits >> (n * 2 + e) & 1);
        if (!visible) s[r / 2][n][r % 2 * 2 + e] = neg_inf();
      }
    }
    // Without a window no key lies left of a row's interval.
    if (kThreeCtas && params.window_left >= 0) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (n * 8 + e < lo) s[r / 2][n][r % 2 * 2 + e] = neg_inf();
        }
      }
    }
  }
}

// Exponentials of 16 keys, packed as the left operand of a product.
struct StepWeights {
  unsigned a[kRowTiles][4];
};

// Make the exponentials of step `step`, and add them to `sum`.
__device__ __forceinline__ void exponentials(StepWeights& weights, float (&sum)[kThreadRows], const Logits& s, const RowScales& scales,
                                             const RowState& state, int step) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const float(&x)[4] = s[r / 2][step * 2 + j];
      float low = ex2(fmaf(x[r % 2 * 2], scales.at[r], -state.max[r]));
      float high = ex2(fmaf(x[r % 2 * 2 + 1], scales.at[r], -state.max[r]));
      sum[r] += low + high;
      weights.a[r / 2][j * 2 + r % 2] = pack_pair<kMmaElement>(low, high);
    }
  }
}

// The exponentials of an iteration's first 16 keys, when they are made before the rest.
struct FirstWeights {
  StepWeights weights;
  float sum[kThreadRows];

  __device__ __forceinline__ void make(const Logits& s, const RowScales& scales, const RowState& state) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) sum[r] = 0.f;
    exponentials(weights, sum, s, scales, state, 0);
  }
};

// Take the logits of one iteration into the running maximum. Output and sum are rescaled only when a maximum of the warp
// has grown by more than kLazyGrowth: the reference cancels in the end, and most iterations leave 128 multiplications out. Whether it has,
// lanes find out without the others of their row. With kSpeculate the first exponentials are made meanwhile, and once more if it has.
template <bool kSpeculate>
__device__ __forceinline__ void update_softmax(const Logits& s, const RowScales& scales, RowState& state, Output& o, FirstWeights& first) {
  float lane_max[kThreadRows];
  bool grown = false;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float x = neg_inf();
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) x = fmaxf(x, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
    lane_max[r] = x * scales.at[r];
    grown |= lane_max[r] - state.max[r] > kLazyGrowth;
  }
  if constexpr (kSpeculate) first.make(s, scales, state);
  if (__any_sync(kFullWarp, grown)) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      float x = fmaxf(lane_max[r], __shfl_xor_sync(kFullWarp, lane_max[r], 1));
      x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
      float new_max = fmaxf(state.max[r], x);
      float rescale = ex2(state.max[r] - new_max);
      state.max[r] = new_max;
      state.sum[r] *= rescale;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) o[r / 2][n][r % 2 * 2] *= rescale, o[r / 2][n][r % 2 * 2 + 1] *= rescale;
    }
    if constexpr (kSpeculate) first.make(s, scales, state);
  }
  if constexpr (kSpeculate) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) state.sum[r] += first.sum[r];
  }
}

// The whole row's state, on each of its four lanes, as finish_row and finish_part take it.
__device__ __forceinline__ void reduce_rows(RowState& state) {
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], 1);
    state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], 2);
    if (state.sum[r] == 0.f) state.max[r] = neg_inf();
  }
}
