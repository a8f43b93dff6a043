// SPDX-License-Identifier: Apache-2.0
// Global to shared memory: the query rows of a warp, and the K and V tiles of the CTA.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "tile/prefill_layout.cuh"
#include "tile/prefill_rope.cuh"

// Queries that change on their way in: transformed, rotated, or turned into the half type and column order of fp8 products.
constexpr bool kConvertQ = kRope || kFp8Kv || kUserQuery;
// bfloat16 reaches beyond half, so its rows are scaled by a power of two on their way to half.
constexpr bool kScaleQRows = kMmaElement != kQElement;

// From a raw product of one KV head to a logit in the log2 domain, to a logit as a fraction of the soft cap, or to the natural logit
// that a user's transform takes.
__device__ __forceinline__ float head_logit_scale(const AttentionParams& params, int kv_head) {
  float scale = params.sm_scale * (params.k_scale != nullptr ? __ldg(params.k_scale + kv_head) : 1.f);
  if constexpr (kUserLogit) return scale;
  return kSoftCap ? scale / params.logits_soft_cap : scale * kLog2E;
}

// A scale of zero would turn a masked -inf into NaN.
constexpr float kLeastScale = 1e-30f;

// Element offset in q of the row of the warp's tile that this lane stands for, and whether there is one.
struct LaneQRow {
  long long offset;
  bool valid;
  int position;

  __device__ __forceinline__ LaneQRow(const AttentionParams& params, const Work& work) {
    unsigned thread = recompute_from(threadIdx.x);
    int row_in_tile = thread / 32 * kWarpRows + thread % 32 % kWarpRows;
    Row row = make_row(params, work.tile, work.segment.kv_head, row_in_tile);
    valid = row_in_tile < work.tile.num_rows;
    position = row.position;
    offset = (static_cast<long long>(work.tile.q_begin) + row.token) * params.q_stride_token + row.head * params.q_stride_head;
    if (!valid) offset = 0;
  }
};

// Copy the warp's query rows as they are; rows past the tile's last become zeros.
__device__ __forceinline__ void copy_q_rows(const AttentionParams& params, const Work& work, unsigned q_tile) {
  constexpr int kChunks = kQRowBytes / 16;
  LaneQRow lane_row(params, work);
  unsigned thread = recompute_from(threadIdx.x), lane = thread % 32, warp_row = thread / 32 * kWarpRows;
#pragma unroll 4
  for (unsigned step = 0; step < kWarpRows * kChunks / 32; ++step) {
    unsigned idx = step * 32 + lane, row = idx / kChunks, chunk = idx % kChunks;
    long long offset = __shfl_sync(kFullWarp, lane_row.offset, row);
    bool valid = static_cast<int>(warp_row + row) < work.tile.num_rows;
    cp_async_16(q_tile + Swizzle<kQRowBytes>::offset(warp_row + row, chunk),
                static_cast<const unsigned char*>(params.q) + offset * 2 + chunk * 16, valid);
  }
}

// Byte offset, in a row of the query tile, of dims i and i + 1 (i even). ldmatrix reads fp8 keys as 16-bit units, which
// gives a lane dims 4c .. 4c + 3 of 16 where the product wants 2c, 2c + 1 and 2c + 8, 2c + 9: queries take the same order.
__device__ __forceinline__ unsigned q_pair_offset(int row_in_tile, int i) {
  int pair = i / 2 % 8;
  if constexpr (kFp8Kv) pair = pair / 2 + pair % 2 * 4;
  return Swizzle<kQRowBytes>::offset(row_in_tile, i / 16 * 2 + pair / 4) + pair % 4 * 4;
}

// The factor that brings a row's largest magnitude to [2^14, 2^15), where half still has all its digits, from that
// magnitude's bits; and its inverse. Both are powers of two inside float's range.
__device__ __forceinline__ float2 half_range_scale(unsigned largest) {
  unsigned exponent = max(largest >> 23, 15u);
  return {__uint_as_float((268u - exponent) << 23), __uint_as_float((exponent - 14u) << 23)};
}

// Load, transform, rotate and convert the warp's query rows, one row at a time. Rows that are scaled on their way to half undo that in
// their logit scale.
__device__ __forceinline__ void convert_q_rows(const AttentionParams& params, const Work& work, unsigned char* q_tile, const float2* turns,
                                               float* logit_scales) {
  constexpr int kSteps = (kHeadDimQk / 2 + 63) / 64;
  LaneQRow lane_row(params, work);
  float head_scale = head_logit_scale(params, work.segment.kv_head);
  unsigned thread = recompute_from(threadIdx.x), lane = thread % 32;
#pragma unroll 2
  for (int r = 0; r < kWarpRows; ++r) {
    int row_in_tile = thread / 32 * kWarpRows + r;
    const unsigned short* source = static_cast<const unsigned short*>(params.q) + __shfl_sync(kFullWarp, lane_row.offset, r);
    float position = static_cast<float>(__shfl_sync(kFullWarp, lane_row.position, r));
    float value[kSteps][4] = {};
    unsigned largest = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      int i = (step * 32 + lane) * 2;
      if (i >= kHeadDimQk / 2 || row_in_tile >= work.tile.num_rows) continue;
      float(&x)[4] = value[step];
      unpack_pair<kQElement>(__ldg(reinterpret_cast<const unsigned*>(source + i)), x[0], x[1]);
      unpack_pair<kQElement>(__ldg(reinterpret_cast<const unsigned*>(source + i + kHeadDimQk / 2)), x[2], x[3]);
      if constexpr (kUserQuery) {
        Row row = make_row(params, work.tile, work.segment.kv_head, row_in_tile);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = user_query(params, work.tile, row, i + e % 2 + e / 2 * (kHeadDimQk / 2), x[e]);
      }
      if constexpr (kRope) {
        rotate(rope_cos_sin(turns[i], position), x[0], x[2]);
        rotate(rope_cos_sin(turns[i + 1], position), x[1], x[3]);
      }
      largest = __float_as_uint(fmaxf(__uint_as_float(largest), fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])))));
    }
    float scale = 1.f;
    if constexpr (kScaleQRows) {
      float2 there_and_back = half_range_scale(__reduce_max_sync(kFullWarp, largest));
      scale = there_and_back.x;
      if (lane == 0) logit_scales[row_in_tile] = fmaxf(head_scale * there_and_back.y, kLeastScale);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      int i = (step * 32 + lane) * 2;
      if (i >= kHeadDimQk / 2) continue;
      const float(&x)[4] = value[step];
      *reinterpret_cast<unsigned*>(q_tile + q_pair_offset(row_in_tile, i)) = pack_pair<kMmaElement>(x[0] * scale, x[1] * scale);
      *reinterpret_cast<unsigned*>(q_tile + q_pair_offset(row_in_tile, i + kHeadDimQk / 2)) = pack_pair<kMmaElement>(x[2] * scale, x[3] * scale);
    }
  }
}

// Every warp fills its own rows of the query tile, and reads no others. Synchronise the CTA before logit_scales are read.
__device__ __forceinline__ void load_q_tile(const AttentionParams& params, const Work& work, unsigned char* q_tile, const float2* turns,
                                            float* logit_scales) {
  if constexpr (kConvertQ) {
    convert_q_rows(params, work, q_tile, turns, logit_scales);
  } else {
    copy_q_rows(params, work, smem_address(q_tile));
  }
  if constexpr (!kScaleQRows) {
    if (recompute_from(threadIdx.x) == 0) logit_scales[0] = fmaxf(head_logit_scale(params, work.segment.kv_head), kLeastScale);
  }
}

// Where the key this lane looks up for its warp lies; lanes l and l + 16 look up the same one. Nothing is read for keys
// that no row sees: their page may not exist.
__device__ __forceinline__ KvSlot lane_kv_slot(const AttentionParams& params, const Work& work, int key_begin) {
  unsigned thread = recompute_from(threadIdx.x);
  int key = key_begin + static_cast<int>(thread / 32 * kWarpKeys + thread % kWarpKeys);
  return key >= work.segment.first_seen && key < work.segment.kv_end ? kv_slot(params, work.tile, key) : KvSlot{0, 0};
}

// How a warp copies its 16 rows of a K or V tile: one step is a 16-byte chunk per lane, kLaneChunks of them in each of kStepRows rows.
template <bool kIsK>
struct CopySteps {
  static constexpr int kRowBytes = kIsK ? kKRowBytes : kVRowBytes, kChunks = kRowBytes / 16;
  static constexpr int kLaneChunks = (kChunks & -kChunks) < 32 ? kChunks & -kChunks : 32, kStepRows = 32 / kLaneChunks;
  static_assert(kLaneChunks >= static_cast<int>(Swizzle<kRowBytes>::kSpan) && kWarpKeys % kStepRows == 0, "steps keep within the swizzle");
};

// Start the warp's 16 rows of a K or V tile; rows of keys that no query row sees become zeros. `slot` is lane_kv_slot's, and
// counts for paged caches only: the rows of ragged ones are one stride apart.
template <bool kIsK>
__device__ __forceinline__ void load_kv_tile(const AttentionParams& params, const Work& work, int key_begin, KvSlot slot, unsigned tile) {
  using Steps = CopySteps<kIsK>;
  constexpr int kRowBytes = Steps::kRowBytes, kLaneChunks = Steps::kLaneChunks;
  unsigned thread = recompute_from(threadIdx.x), lane_row = thread % 32 / kLaneChunks, lane_chunk = thread % kLaneChunks;
  unsigned warp_key = thread / 32 * kWarpKeys;
  int first_key = key_begin + static_cast<int>(warp_key);
  // This lane's keys that some row sees: `num_seen` of them, after the first `num_unseen`.
  int num_unseen = work.segment.first_seen - first_key - static_cast<int>(lane_row);
  unsigned num_seen = static_cast<unsigned>(max(0, work.segment.kv_end - work.segment.first_seen));
  if constexpr (kPaged) {
    slot = {static_cast<int>(recompute_from(slot.page)), static_cast<int>(recompute_from(slot.slot))};
  } else {
    slot = {0, work.tile.kv_base + first_key + static_cast<int>(lane_row)};
  }
  int kv_head = work.segment.kv_head;
  long long lane_offset = kIsK ? k_row_offset(params, slot, kv_head) : v_row_offset(params, slot, kv_head);
  long long row_stride = (kIsK ? params.k_stride_token : params.v_stride_token) * kKvBytes;
  const unsigned char* source = static_cast<const unsigned char*>(kIsK ? params.k : params.v) + lane_chunk * 16;
  unsigned lane_target = tile + Swizzle<kRowBytes>::offset(warp_key + lane_row, lane_chunk);
#pragma unroll
  for (int row = 0; row < kWarpKeys; row += Steps::kStepRows) {
    long long offset = kPaged ? __shfl_sync(kFullWarp, lane_offset, row + lane_row) : lane_offset + row * row_stride;
    unsigned target = Swizzle<kRowBytes>::advance_rows(lane_target, row);
#pragma unroll
    for (int chunk = 0; chunk < Steps::kChunks; chunk += kLaneChunks) {
      cp_async_16(target + chunk * 16, source + offset + chunk * 16, static_cast<unsigned>(row - num_unseen) < num_seen);
    }
  }
}

// Tiles after a segment's first come by NextRows, so that few instructions for addresses stand between the barrier and the first product.
// fp8 rows are half as long and have half as many; with a single stage they hide behind the products.
constexpr bool kNextRows = kNumStages == 2 && !kFp8Kv;

// The warp's 16 keys of every tile lie one stride apart: tiles begin at multiples of 16 keys.
__device__ __forceinline__ bool evenly_spaced(const AttentionParams& params) { return !kPaged || params.page_size % kWarpKeys == 0; }

// lane_kv_slot for a tile that is not its segment's first; where keys are evenly spaced, every lane looks up the warp's first one.
__device__ __forceinline__ KvSlot next_kv_slot(const AttentionParams& params, const Work& work, int key_begin) {
  unsigned thread = recompute_from(threadIdx.x);
  int key = key_begin + static_cast<int>(thread / 32 * kWarpKeys + (evenly_spaced(params) ? 0 : thread % kWarpKeys));
  return key < work.segment.kv_end ? kv_slot(params, work.tile, key) : KvSlot{0, 0};
}

// load_kv_tile with a single address per lane, for evenly spaced keys of a tile that is not its segment's first: no key there lies left of
// every row's window.
template <bool kIsK>
struct NextRows {
  using Steps = CopySteps<kIsK>;
  const unsigned char* source;
  unsigned target;
  int num_seen;

  // `slot` is next_kv_slot's, `stage` where K of that tile will lie.
  __device__ __forceinline__ NextRows(const AttentionParams& params, const Work& work, int key_begin, KvSlot slot, unsigned stage) {
    unsigned thread = recompute_from(threadIdx.x), lane_row = thread % 32 / Steps::kLaneChunks, lane_chunk = thread % Steps::kLaneChunks;
    unsigned warp_key = thread / 32 * kWarpKeys;
    int first_key = key_begin + static_cast<int>(warp_key + lane_row);
    num_seen = work.segment.kv_end - first_key;
    if constexpr (!kPaged) slot = {0, work.tile.kv_base + first_key - static_cast<int>(lane_row)};
    slot.slot += lane_row;
    int kv_head = work.segment.kv_head;
    long long offset = (kIsK ? k_row_offset(params, slot, kv_head) : v_row_offset(params, slot, kv_head)) + lane_chunk * 16;
    source = static_cast<const unsigned char*>(kIsK ? params.k : params.v) + offset;
    target = stage + Swizzle<Steps::kRowBytes>::offset(warp_key + lane_row, lane_chunk);
  }
  __device__ __forceinline__ void start(const AttentionParams& params) { start_if<false>(params, true); }
  // Nothing happens unless `wanted`.
  template <bool kMaybe>
  __device__ __forceinline__ void start_if(const AttentionParams& params, bool wanted) {
#pragma unroll
    for (int row = 0; row < kWarpKeys; row += Steps::kStepRows) {
#pragma unroll
      for (int chunk = 0; chunk < Steps::kChunks; chunk += Steps::kLaneChunks) {
        // What is constant comes last, where it is part of the instruction.
        unsigned to = Swizzle<Steps::kRowBytes>::advance_rows(target, row) + (kIsK ? 0 : kKBytes) + chunk * 16;
        if constexpr (kMaybe) {
          cp_async_16_if(wanted, to, source + chunk * 16, row < num_seen);
        } else {
          cp_async_16(to, source + chunk * 16, row < num_seen);
        }
      }
      // Opaque, so that rows take one addition each instead of an address each that is kept.
      source += Steps::kStepRows * (kIsK ? params.k_stride_token : params.v_stride_token) * kKvBytes;
      asm volatile("" : "+l"(source));
    }
  }
};
