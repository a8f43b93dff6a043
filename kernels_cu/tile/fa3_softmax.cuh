// SPDX-License-Identifier: Apache-2.0
// Online softmax on the accumulator of a consumer warpgroup: masks, running maximum and sum, exponentials, packing.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fa3_layout.cuh"

// Stands for the maximum of a row that has seen no key: finite, so that -inf minus it is still -inf.
constexpr float kNoMax = -1e30f;
// How far a row's reference lies below its maximum when it is set, in powers of two, and how far at most before sums and output are
// rescaled: half holds 2^8. e4m3 holds 448, with few bits: there the weight that sets a reference is 2^8 exactly, none exceeds 2^8.75, and
// weights down to 2^-18 of the largest are kept.
constexpr float kReferenceDepth = kQFp8 ? 8.f : 0.f, kLargestDepth = kQFp8 ? 8.75f : 8.f;
// Whether lanes shuffle maxima for every tile, instead of a vote on whether they must. e4m3 weights let references be outgrown too often for
// the vote to pay: measured on an H200, 786 TFLOP/s against 831 on causal attention of 4 x 4096.
constexpr bool kShufflesFirst = kQFp8;
// A scale of zero would turn a masked -inf into NaN.
constexpr float kLeastScale = 1e-30f;

// A thread holds rows g and g + 8 of its warp's 16: element i of an accumulator belongs to thread row i / 2 % 2.
using Logits = float[kKvTile / 2];
using Output = float[kHeadDimVo / 2];
using Weights = unsigned[kKvTile * kElementBytes / 8];

// fp8 queries may have a factor for each head, and so for each row.
constexpr int kRowScales = kQFp8 ? 2 : 1;

// What a thread knows of a segment's tile while it walks the keys.
struct ThreadRows {
  int lo[2], hi[2];          // keys its rows see
  float scale[kRowScales];   // of raw products, into a soft cap's tanh or the log2 domain
  float slope[2];            // ALiBi, in the log2 domain
  int position[2];

  ThreadRows() = default;
  __device__ __forceinline__ ThreadRows(const AttentionParams& params, const QueuedWork& work, int consumer, int warp) {
    const Tile& tile = work.tile;
    int kv_head = work.segment.kv_head, last_key = work.segment.kv_end - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int row_in_tile = consumer * kWarpgroupRows + warp * kWarpRows + lane_idx() / 4 + r * 8;
      Row row = make_row(params, tile, kv_head, row_in_tile);
      lo[r] = row.lo, hi[r] = min(row.hi, last_key);
      slope[r] = kAlibi && row_in_tile < tile.num_rows ? __ldg(params.alibi_slopes + row.head) * kLog2E : 0.f;
      position[r] = row.position;
      if constexpr (kQFp8) scale[r] = params.q_scale != nullptr && row_in_tile < tile.num_rows ? __ldg(params.q_scale + row.head) : 1.f;
    }
    float logit_scale = params.sm_scale * (params.k_scale != nullptr ? __ldg(params.k_scale + kv_head) : 1.f);
    logit_scale = kSoftCap ? logit_scale / params.logits_soft_cap : logit_scale * kLog2E;
#pragma unroll
    for (int r = 0; r < kRowScales; ++r) scale[r] = fmaxf(kQFp8 ? logit_scale * scale[r] : logit_scale, kLeastScale);
  }
};

struct RowState {
  float max[2];  // reference of the exponentials in the log2 domain, at most kLargestDepth below the true maximum
  float sum[2];  // this thread's share of the sum of exponentials

  RowState() = default;
  // Before any key. Rows that do not exist never see one, and would have their warp look for references in every tile.
  __device__ __forceinline__ explicit RowState(const ThreadRows& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) max[r] = rows.hi[r] < rows.lo[r] ? 0.f : kNoMax, sum[r] = 0.f;
  }
};

// From what finish_logits leaves of thread row `r` to the log2 domain: a factor that the exponent applies.
__device__ __forceinline__ float exponent_scale(const AttentionParams& params, const ThreadRows& rows, int r) {
  return kAlibi ? 1.f : kSoftCap ? params.logits_soft_cap * kLog2E : rows.scale[r % kRowScales];
}

// Whether some row of a consumer does not see all keys of the tile from `key_begin` on.
__device__ __forceinline__ bool needs_mask(const QueuedWork& work, int consumer, int key_begin) {
  return key_begin < work.seen_from[consumer] || key_begin + kKvTile - 1 > work.seen_to[consumer];
}

// Raw products to logits, up to exponent_scale: soft cap and ALiBi, then -inf for the keys that a row does not see.
__device__ __forceinline__ void finish_logits(const AttentionParams& params, const QueuedWork& work, int consumer, const ThreadRows& rows, int key_begin,
                                              bool is_masked, Logits& s) {
  int lane_key = key_begin + lane_idx() % 4 * 2;
  if constexpr (kSoftCap) {
#pragma unroll
    for (int i = 0; i < kKvTile / 2; ++i) s[i] = tanh_ex2(s[i] * rows.scale[i / 2 % 2 % kRowScales]);
  }
  if constexpr (kAlibi) {
    // One conversion per row: distances in a tile are exact in float.
    float distance[2] = {static_cast<float>(lane_key - rows.position[0]), static_cast<float>(lane_key - rows.position[1])};
#pragma unroll
    for (int i = 0; i < kKvTile / 2; ++i) {
      float scale = kSoftCap ? params.logits_soft_cap * kLog2E : rows.scale[i / 2 % 2 % kRowScales];
      s[i] = fmaf(s[i], scale, rows.slope[i / 2 % 2] * (distance[i / 2 % 2] + (i / 4 * 8 + i % 2)));
    }
  }
  if (is_masked) {
    // Few tiles come here, so where accumulators fill the registers the bounds are found anew.
    ThreadRows bounds = kHeadDimVo > 128 || kKvTile > 128 || kConsumers > 2 ? ThreadRows(params, work, consumer, threadIdx.x / 32 % 4) : rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int lo = bounds.lo[r] - lane_key, hi = bounds.hi[r] - lane_key;
#pragma unroll
      for (int i = r * 2; i < kKvTile / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int column = i / 4 * 8 + e;
          if (column < lo || column > hi) s[i + e] = neg_inf();
        }
      }
    }
  }
}

// Over the four lanes of a thread row.
template <class T>
__device__ __forceinline__ T row_max(T x) {
  x = max(x, __shfl_xor_sync(kFullWarp, x, 1));
  return max(x, __shfl_xor_sync(kFullWarp, x, 2));
}

// The largest logit of this thread in each of its rows.
__device__ __forceinline__ void float_maxima(const Logits& s, float (&largest)[2]) {
  // Two chains per row, so that neighbouring operations do not wait for each other.
  float chain[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) chain[i / 2][i % 2] = s[i];
#pragma unroll
  for (int i = 4; i < kKvTile / 2; ++i) chain[i / 2 % 2][i % 2] = fmaxf(chain[i / 2 % 2][i % 2], s[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = fmaxf(chain[r][0], chain[r][1]);
}

// The same by comparing bits as integers, of which Hopper compares three at a time: exact unless it is negative.
__device__ __forceinline__ void integer_maxima(const Logits& s, int (&largest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int chain[2] = {__float_as_int(s[r * 2]), __float_as_int(s[r * 2 + 1])};
#pragma unroll
    for (int i = r * 2 + 4; i < kKvTile / 2; i += 4) {
      int& value = chain[i / 4 % 2];
      value = max(max(value, __float_as_int(s[i])), __float_as_int(s[i + 1]));
    }
    largest[r] = max(chain[0], chain[1]);
  }
}

// Whether every reference holds for the logits of a tile, which a warp votes on with what each lane sees: lanes exchange nothing. Compared as
// integers, with zero in place of a largest logit that is negative: so a reference far below that is said not to hold.
__device__ __forceinline__ bool references_hold(const AttentionParams& params, const ThreadRows& rows, const Logits& s, const RowState& state) {
  bool outgrown = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int chain[2] = {0, 0};
#pragma unroll
    for (int i = r * 2; i < kKvTile / 2; i += 4) {
      int& value = chain[i / 4 % 2];
      value = max(max(value, __float_as_int(s[i])), __float_as_int(s[i + 1]));
    }
    outgrown |= __int_as_float(max(chain[0], chain[1])) * exponent_scale(params, rows, r) > state.max[r] + kLargestDepth;
  }
  return !__any_sync(kFullWarp, outgrown);
}

// The largest logit of each row.
__device__ __forceinline__ void row_maxima(const Logits& s, const RowState& state, float (&largest)[2]) {
  bool is_exact = false;
  if constexpr (kShufflesFirst && kConsumers == 2) {  // three consumers have no registers for both ways
    int bits[2];
    integer_maxima(s, bits);
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = __int_as_float(bits[r] = row_max(bits[r]));
    // Where no logit is positive, that is enough for a reference which none of those would move.
    is_exact = !__any_sync(kFullWarp, bits[0] < 0 && state.max[0] < -kLargestDepth || bits[1] < 0 && state.max[1] < -kLargestDepth);
  }
  if (!is_exact) {
    float_maxima(s, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = row_max(largest[r]);
  }
}

// Take the logits of a tile into the rows' references. Where one moves, sums are brought to it, and so must the output be: by `rescale`, and
// true.
__device__ __forceinline__ bool update_reference(const AttentionParams& params, const ThreadRows& rows, const Logits& s, RowState& state, float (&rescale)[2]) {
  rescale[0] = rescale[1] = 1.f;
  if (!kShufflesFirst && references_hold(params, rows, s, state)) return false;
  float largest[2];
  row_maxima(s, state, largest);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // A reference a little below the maximum is as good, and most tiles then leave the output as it is.
    float scaled = largest[r] * exponent_scale(params, rows, r);
    float new_max = scaled > state.max[r] + kLargestDepth ? scaled - kReferenceDepth : state.max[r];
    rescale[r] = ex2(state.max[r] - new_max);
    state.max[r] = new_max;
    state.sum[r] *= rescale[r];
  }
  return !kShufflesFirst || __any_sync(kFullWarp, rescale[0] != 1.f || rescale[1] != 1.f);
}

// Make the logits of a tile exponentials, and add them to the running sums.
__device__ __forceinline__ void exponentiate(const AttentionParams& params, const ThreadRows& rows, Logits& s, RowState& state) {
  float scale[kRowScales];
#pragma unroll
  for (int r = 0; r < kRowScales; ++r) scale[r] = exponent_scale(params, rows, r);
  float sum[2][2];  // two chains per row here too
#pragma unroll
  for (int i = 0; i < kKvTile / 2; ++i) {
    s[i] = ex2(fmaf(s[i], scale[i / 2 % 2 % kRowScales], -state.max[i / 2 % 2]));
    if (i < 4) {
      sum[i / 2][i % 2] = s[i];
    } else {
      sum[i / 2 % 2][i % 2] += s[i];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[r] += sum[r][0] + sum[r][1];
}

// Exponentials as the left operand of a product: chunk j of 16 keys is weights 4j .. 4j + 3, with no exchange between threads.
__device__ __forceinline__ void pack_weights(const Logits& s, Weights& p) {
  if constexpr (kQFp8) {
    // Of 16 keys a thread holds columns 2c, 2c + 1, 2c + 8 and 2c + 9, and the product sums them as 4c to 4c + 3: turned values lie so.
#pragma unroll
    for (int i = 0; i < kKvTile / 8; ++i) {
      int first = i / 2 * 8 + i % 2 * 2;
      p[i] = pack_e4m3(s[first], s[first + 1], s[first + 4], s[first + 5]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kKvTile / 4; ++i) p[i] = pack_pair<kMmaElement>(s[2 * i], s[2 * i + 1]);
  }
}

// No product may be in flight.
__device__ __forceinline__ void rescale_output(Output& o, const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < kHeadDimVo / 2; ++i) o[i] *= rescale[i / 2 % 2];
}

// The whole row's state, on each of its four lanes, as finish_row and finish_part take it.
__device__ __forceinline__ void reduce_rows(RowState& state) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], 1);
    state.sum[r] += __shfl_xor_sync(kFullWarp, state.sum[r], 2);
    if (state.sum[r] == 0.f) state.max[r] = neg_inf();
  }
}
