// SPDX-License-Identifier: Apache-2.0
// The private K/V ring of one warp: blocks of keys stream through it by halves, across segment and request boundaries.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/sync.cuh"
#include "tile/kv_address.cuh"
#include "tile/swizzle.cuh"
#include "tile/rows.cuh"

// A block is one or two parts of 16 keys, the keys of one k-step of the product with values.
constexpr int kPartKeys = 16, kBlockParts = kBlockKeys / kPartKeys;
constexpr int kKRowChunks = kHeadDimQk * kKvBytes / 16;
constexpr int kVRowChunks = kHeadDimVo * kKvBytes / 16;
// A slot of the ring holds the keys of one block, or its values.
constexpr int kSlotBytes = kBlockKeys * 16 * (kKRowChunks > kVRowChunks ? kKRowChunks : kVRowChunks);

// Rows that one instruction of a warp copies when whole rows divide its 32 chunks, else 0.
constexpr int kKRowsAtOnce = 32 % kKRowChunks == 0 ? 32 / kKRowChunks : 0;
constexpr int kVRowsAtOnce = 32 % kVRowChunks == 0 ? 32 / kVRowChunks : 0;

// Past head_dim 128 registers are too few to keep where a head's rows begin.
constexpr bool kKeepsRows = kHeadDimQk <= 128;

// Nor, with RoPE, are there any to remember how many blocks have been dealt.
constexpr bool kDealsOn = kHeadDimQk <= 128 || kPosEncoding != PosEncoding::kRopeLlama;

// Blocks are dealt to the warps in turn, on and on over the segments of a CTA: a segment begins with the warp after the one that had
// the last block of the segment before, so that uneven ends do not add up on the same warps.
struct BlockDeal {
  unsigned num_dealt = 0;

  // First key of this warp's first block of the next segment, or a key past the segment's end.
  __device__ __forceinline__ int first_key(const Segment& segment, int warp) {
    int key = segment.kv_begin + static_cast<int>((warp - num_dealt) % kNumWarps) * kBlockKeys;
    if constexpr (kDealsOn) num_dealt += (segment.kv_end - segment.kv_begin + kBlockKeys - 1) / kBlockKeys;
    return key;
  }

  // Which of the segment's first kNumWarps blocks began the share of `warp`, a later key of which is `key`. Shares are joined in that order,
  // so that a result does not depend on what else its CTA has done.
  static __device__ __forceinline__ int share(const Segment& segment, int key, int warp) {
    return kDealsOn ? static_cast<unsigned>(key - segment.kv_begin) / kBlockKeys % kNumWarps : warp;
  }
};

// `row_of_key` is the row of the block's key `lane % kBlockKeys`. Keys that no row sees, whose bits in `seen` are 0, become zeros.
// A call, for its instructions would lie in the way of blocks that are copied by part.
template <int kRowChunks>
__device__ __noinline__ void copy_by_key(const char* row_of_key, unsigned slot_address, unsigned seen) {
  static_assert(kBlockKeys * kRowChunks % 32 == 0, "a block is copied by whole warps");
  int lane = threadIdx.x % 32;
  auto row_of = [&](int row) { return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row_of_key), row)); };
  if constexpr (32 % kRowChunks == 0) {
    constexpr int kRowsAtOnce = 32 / kRowChunks;
    int first_row = lane / kRowChunks, chunk = lane % kRowChunks;
    unsigned target = slot_address + Swizzle<kRowChunks * 16>::offset(first_row, chunk);
    seen >>= first_row;
#pragma unroll
    for (int row = 0; row < kBlockKeys; row += kRowsAtOnce) {
      cp_async_16(Swizzle<kRowChunks * 16>::advance_rows(target, row), row_of(first_row + row) + chunk * 16, seen >> row & 1);
    }
  } else {
#pragma unroll
    for (int step = 0; step < kBlockKeys * kRowChunks / 32; ++step) {
      int idx = step * 32 + lane;
      int row = idx / kRowChunks, chunk = idx % kRowChunks;
      cp_async_16(slot_address + Swizzle<kRowChunks * 16>::offset(row, chunk), row_of(row) + chunk * 16, seen >> row & 1);
    }
  }
}

// How a lane copies a block whose parts lie inside one page each: by stepping from row to row.
struct PartCopy {
  const char* sources[kBlockParts];  // of its chunk of the first rows that are copied at once
  long long step_bytes;              // to the next rows
  unsigned target;

  // Unless the block is whole, keys that no row sees, whose bits in `seen` are 0, become zeros. Their pages may not exist; a copy of no
  // bytes does not look.
  template <bool kWhole>
  __device__ __forceinline__ void run(unsigned seen) const {
#pragma unroll
    for (int part = 0; part < kBlockParts; ++part) {
      const char* source = sources[part];
#pragma unroll
      for (int first = part * kPartKeys; first < (part + 1) * kPartKeys; first += kKRowsAtOnce > 0 ? kKRowsAtOnce : kPartKeys) {
        unsigned to = Swizzle<kKRowChunks * 16>::advance_rows(target, first);
        if constexpr (kWhole) {
          cp_async_16(to, source);
        } else {
          cp_async_16(to, source, seen >> first & 1);
        }
        source += step_bytes;
      }
    }
  }
};

// A block of which some keys are not seen, out of the way of the others.
__device__ __noinline__ void copy_seen_rows(const char* first_source, const char* last_source, long long step_bytes, unsigned target, unsigned seen) {
  PartCopy copy;
  copy.sources[0] = first_source, copy.sources[kBlockParts - 1] = last_source;
  copy.step_bytes = step_bytes, copy.target = target;
  copy.run<false>(seen >> (threadIdx.x % 32 / kKRowChunks));
}

// Page ids of a warp's first block, from where they lie if every tile has equally many: asked for together with the records that say
// where they do lie, they save a trip to memory if that is so.
struct PageGuess {
  unsigned entry;  // of the first id in the page table
  int slot;        // of the block's first key in that page: it decides whether the second part lies in the next one
  int pages[kBlockParts];

  __device__ __forceinline__ PageGuess(const AttentionParams& params, bool by_part, int warp, int lane) {
    if constexpr (!kPaged) return;
    int key = warp * kBlockKeys + (by_part ? 0 : lane % kBlockKeys);
    int page_idx = divide(key, params.by_page_size);
    entry = divide(blockIdx.x, params.by_num_kv_heads) * static_cast<unsigned>(params.entries_per_tile) + page_idx;
    slot = key - page_idx * params.page_size;
#pragma unroll
    for (int part = 0; part < kBlockParts; ++part) {
      unsigned at = entry + (part > 0 && slot + part * kPartKeys >= params.page_size);
      if (at < static_cast<unsigned>(params.num_entries)) pages[part] = __ldg(params.page_indices + at);
    }
  }
};

// Runs ahead of the arithmetic. Page ids are loaded one block before the copies that need them, so that no copy waits for one.
// Where parts lie inside one page each, a block is copied by stepping from row to row; elsewhere it is addressed key by key.
struct BlockLoader {
  bool by_part;            // parts lie inside one page each
  PageGuess guess;         // only to start with
  WorkCursor<true> cursor;
  BlockDeal deal;
  Tile tile;
  Segment segment;
  int warp, lane;
  int key;                 // first key of the next block, past the segment's end when there is none
  int pages[kBlockParts];  // by part: of each part's first key; else the first one of key `key + lane % kBlockKeys`
  int slot;                // of the same key in the first of these pages
  // This head's row at slot 0 of page 0; by part, the chunk of the row below it that this lane copies first.
  const char *k_rows, *v_rows;

  __device__ __forceinline__ BlockLoader(const AttentionParams& params, int warp_idx, int lane_idx)
      : by_part(kKRowsAtOnce > 0 && kVRowsAtOnce > 0 && (!kPaged || params.page_size % kPartKeys == 0)),
        guess(params, by_part, warp_idx, lane_idx),
        cursor(params),
        warp(warp_idx),
        lane(lane_idx),
        key(-kNumWarps * kBlockKeys) {
    segment.kv_end = 0;
  }

  // Copy the next half-block, which the caller knows to be keys or values. Always closes one group. To start with, a first call for
  // values copies nothing and finds the first block.
  template <bool kStart>
  __device__ __forceinline__ void load_half(const AttentionParams& params, bool keys, unsigned slot_address) {
    if (__builtin_expect(key < segment.kv_end, true)) {
      if (keys) {
        copy<true>(params, slot_address);
      } else {
        if (!kStart || key >= 0) copy<false>(params, slot_address);
        key += kNumWarps * kBlockKeys;
        seek<kStart>(params);
      }
    }
    cp_async_commit();
  }

 private:
  // Whether any row of the tile may see the key; the others' pages may not exist.
  __device__ __forceinline__ bool is_seen(int some_key) const { return some_key >= segment.first_seen && some_key < segment.kv_end; }

  // Find this warp's next block at or after `key`, and load its page ids.
  template <bool kStart>
  __device__ __forceinline__ void seek(const AttentionParams& params) {
    while (__builtin_expect(key >= segment.kv_end, false)) {
      if (!cursor.next(params, tile, segment)) {
        segment.kv_end = -kNumWarps * kBlockKeys;
        return;
      }
      key = deal.first_key(segment, warp);
      if constexpr (kKeepsRows) k_rows = first_row<true>(params), v_rows = first_row<false>(params);
      if (warp == 0) prefetch_query(params);
    }
    int own_key = by_part ? key : key + lane % kBlockKeys;
    if (!by_part && !is_seen(own_key)) return;
    if constexpr (kPaged) {
      int page_idx = divide(own_key, params.by_page_size);
      slot = own_key - page_idx * params.page_size;
      unsigned entry = tile.kv_base + page_idx;
      bool guessed = entry == guess.entry && (kBlockParts == 1 || slot == guess.slot);
      if (kStart && guessed && entry + kBlockParts <= static_cast<unsigned>(params.num_entries)) {
#pragma unroll
        for (int part = 0; part < kBlockParts; ++part) pages[part] = guess.pages[part];
        return;
      }
      const int* ids = params.page_indices + entry;
      pages[0] = __ldg(ids);
#pragma unroll
      for (int part = 1; part < kBlockParts; ++part) {
        // The same page again, or the next one; chosen by the address, for a choice by value would wait for the load.
        if (by_part && key + part * kPartKeys < segment.kv_end) pages[part] = __ldg(ids + (slot + part * kPartKeys >= params.page_size));
      }
    } else {
      slot = tile.kv_base + own_key;
    }
  }

  // The query is read when the arithmetic gets to the segment: have it in L2 by then.
  __device__ __forceinline__ void prefetch_query(const AttentionParams& params) const {
    Row row = make_row(params, tile, segment.kv_head, lane & 15);
    if ((lane & 15) >= tile.num_rows) return;
    const unsigned short* q = static_cast<const unsigned short*>(params.q) + (static_cast<long long>(tile.q_begin) + row.token) * params.q_stride_token +
                              row.head * params.q_stride_head;
    for (int dim = lane < 16 ? 0 : 64; dim < kHeadDimQk; dim += 128) prefetch_l2(q + dim);
  }

  // Strides are whole chunks of 16 bytes, and fewer than 2^32 of them.
  static __device__ __forceinline__ unsigned chunks(long long stride) { return static_cast<unsigned>(stride / (16 / kKvBytes)); }
  static __device__ __forceinline__ unsigned long long times(int index, unsigned stride) {
    if constexpr (!kKeepsRows) return static_cast<unsigned long long>(static_cast<unsigned>(index)) * stride;
    // One instruction, which the compiler does not find by itself once it has taken a stride's conversion out of the loop. It needs a
    // register more.
    unsigned long long product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(index), "r"(stride));
    return product;
  }

  // What `k_rows` and `v_rows` hold.
  template <bool kIsK>
  __device__ __forceinline__ const char* first_row(const AttentionParams& params) const {
    unsigned long long offset = times(segment.kv_head, chunks(kIsK ? params.k_stride_head : params.v_stride_head));
    if (by_part) offset += times(lane / kKRowChunks, chunks(kIsK ? params.k_stride_token : params.v_stride_token)) + lane % kKRowChunks;
    return static_cast<const char*>(kIsK ? params.k : params.v) + offset * 16;
  }

  // The row of `k_rows` or `v_rows` in one slot of a page.
  template <bool kIsK>
  __device__ __forceinline__ const char* row_address(const AttentionParams& params, int page, int slot_in_page) const {
    unsigned long long offset = times(slot_in_page, chunks(kIsK ? params.k_stride_token : params.v_stride_token));
    if constexpr (kPaged) offset += times(page, chunks(kIsK ? params.k_stride_page : params.v_stride_page));
    return (!kKeepsRows ? first_row<kIsK>(params) : kIsK ? k_rows : v_rows) + offset * 16;
  }

  template <bool kIsK>
  __device__ __forceinline__ void copy(const AttentionParams& params, unsigned slot_address) const {
    if constexpr (kKRowsAtOnce > 0 && kVRowsAtOnce > 0) {
      if (__builtin_expect(by_part, true)) {
        copy_by_part<kIsK>(params, slot_address);
        return;
      }
    }
    bool seen = is_seen(key + lane % kBlockKeys);
    // Of a key that is not seen the page id may be anything: a copy of no bytes does not look.
    copy_by_key<kIsK ? kKRowChunks : kVRowChunks>(row_address<kIsK>(params, kPaged ? pages[0] : 0, slot), slot_address, __ballot_sync(0xffffffffu, seen));
  }

  template <bool kIsK>
  __device__ __forceinline__ void copy_by_part(const AttentionParams& params, unsigned slot_address) const {
    static_assert(kKRowChunks == kVRowChunks || kKRowsAtOnce == 0 || kVRowsAtOnce == 0, "keys and values are copied by the same steps");
    PartCopy copy;
    copy.step_bytes = (kIsK ? params.k_stride_token : params.v_stride_token) * (kKRowsAtOnce * kKvBytes);
    copy.target = slot_address + Swizzle<kKRowChunks * 16>::offset(lane / kKRowChunks, lane % kKRowChunks);
#pragma unroll
    for (int part = 0; part < kBlockParts; ++part) {
      // Part 1 lies behind part 0 in its page, or begins the next one.
      int first_slot = !kPaged || part == 0 || slot + part * kPartKeys < params.page_size ? slot + part * kPartKeys : 0;
      copy.sources[part] = row_address<kIsK>(params, kPaged ? pages[part] : 0, first_slot);
    }
    if (__builtin_expect(key >= segment.first_seen && key + kBlockKeys <= segment.kv_end, true)) {
      copy.run<true>(0);
    } else {
      copy_seen_rows(copy.sources[0], copy.sources[kBlockParts - 1], copy.step_bytes, copy.target, __ballot_sync(0xffffffffu, is_seen(key + lane % kBlockKeys)));
    }
  }
};

// Where a warp's arithmetic is in its ring.
struct RingPosition {
  unsigned ring, slot;

  __device__ __forceinline__ explicit RingPosition(unsigned ring_address) : ring(ring_address), slot(ring_address) {}

  // Wait for this slot's half-block. Every lane is then also done with the slot behind, which may be overwritten.
  __device__ __forceinline__ void wait() const {
    cp_async_wait<kNumStages - 2>();
    __syncwarp();
  }
  __device__ __forceinline__ unsigned behind() const { return slot == ring ? ring + (kNumStages - 1) * kSlotBytes : slot - kSlotBytes; }
  __device__ __forceinline__ void advance() { slot = slot == ring + (kNumStages - 1) * kSlotBytes ? ring : slot + kSlotBytes; }
};
