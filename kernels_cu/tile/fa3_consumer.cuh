// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: 64 query rows against every key of a segment, the softmax of one tile under the products of another.
#pragma once

#include "ptx/wgmma_fp8.cuh"
#include "tile/fa3_fp8_bank.cuh"
#include "tile/fa3_output.cuh"

// Two warpgroups take turns to issue products, so that one's softmax runs under the other's. Wide heads have enough products of their own,
// and among more warpgroups some is always at its products: measured on an H200 at head_dim 64, 541 TFLOP/s against 527 with four. fp8
// products are too short for that.
constexpr bool kTakeTurns = kHeadDimVo <= 128 && (kConsumers == 2 || kQFp8);
// Whether a turn lasts until its products are done, rather than issued. fp8 ones are so short that warpgroups fall in step otherwise: all
// multiply, and then all are in their softmax. Measured on an H200 at head_dim 128, 855 TFLOP/s against 787 on 16384 keys.
constexpr bool kTurnsLast = kQFp8;
// Whether a tile's maxima are found under the warpgroup's own product with values. Where products are as short as at head_dim 128 the
// tensor cores wait for what comes behind: measured on an H200, 642 TFLOP/s against 618 with tiles of 128 keys, of fp8 855 against 736.
// To keep the exponentials there too is slower.
constexpr bool kMaximaFirst = kConsumers > 2 ? !kQFp8 : (kQFp8 ? kHeadDimVo : kHeadDimQk) <= 128;
// Whether values are waited for before both products are issued, rather than between them. More than two warpgroups gain 6% on an H200,
// two lose 2%.
constexpr bool kWaitForBoth = kConsumers > 2 && !kQFp8;
// What is the same for the warpgroups' descriptors; V is summed over its rows, and its column blocks are a tile apart. A turned V is
// summed along its rows, as K is.
constexpr unsigned long long kRowsAreColumns = wgmma_rows_base<kBlockRowBytes>();
constexpr unsigned long long kValues = kQFp8 ? wgmma_rows_base<kTurnedRowBytes>() : wgmma_descriptor_base(kKvBlockBytes);
// Summands of a product are 32 bytes, of a row or (16-bit values) 16 rows.
constexpr int kStepElements = 32 / kElementBytes, kBlockSteps = kBlockRowBytes / 32, kTurnedSteps = kTurnedRowBytes / 32;

template <bool kFp8, int kColumns>
struct Product {
  using Type = Wgmma<kColumns>;
};
template <int kColumns>
struct Product<true, kColumns> {
  using Type = WgmmaFp8<kColumns>;
};

__device__ __forceinline__ void multiply_qk(Logits& s, unsigned q_tile, unsigned k_tile) {
  unsigned long long q = wgmma_descriptor(kRowsAreColumns, q_tile), k = wgmma_descriptor(kRowsAreColumns, k_tile);
#pragma unroll
  for (int step = 0; step < kHeadDimQk / kStepElements; ++step) {
    int block = step / kBlockSteps, bytes = step % kBlockSteps * 32;
    Product<kQFp8, kKvTile>::Type::smem(s, q + (block * kQBlockBytes + bytes) / 16, k + (block * kKvBlockBytes + bytes) / 16, step > 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void multiply_pv(Output& o, const Weights& p, unsigned v_tile) {
  unsigned long long v = wgmma_descriptor(kValues, v_tile);
#pragma unroll
  for (int step = 0; step < kKvTile / kStepElements; ++step) {
    int offset = kQFp8 ? step / kTurnedSteps * kTurnedBlockBytes + step % kTurnedSteps * 32 : step * kStepElements * kBlockRowBytes;
    Product<kQFp8, kHeadDimVo>::Type::registers(o, p + step * 4, v + offset / 16, 1);
  }
  wgmma_commit();
}

struct Consumer {
  const Fa3Params& params;
  Shared shared;
  OutputBank bank;
  int index, warp;      // of the warpgroup among consumers, of the warp in it
  unsigned count = 0;   // tiles of the CTA whose products are done
  unsigned slot = 0;    // of the current segment

  __device__ __forceinline__ Consumer(const Fa3Params& params, const Shared& shared)
      : params(params), shared(shared), bank(shared), index(threadIdx.x / kWarpgroupThreads - 1), warp(threadIdx.x / 32 % 4) {}

  __device__ __forceinline__ void begin_turn() const {
    if constexpr (kTakeTurns) named_barrier_sync(kTurnBarrier + index, 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (kTakeTurns) named_barrier_arrive(kTurnBarrier + (index + 1) % kConsumers, 2 * kWarpgroupThreads);
  }
  // The warpgroup has finished reading the stage of tile `tile`.
  __device__ __forceinline__ void release(Barrier ring, unsigned tile) const {
    if (threadIdx.x % kWarpgroupThreads == 0) mbarrier_arrive(shared.barrier(ring + tile % kNumStages));
  }
  // Maxima are computed before the wait that follows: a store of what depends on all of them cannot sink below it. Nor can a vote.
  __device__ __forceinline__ void order_before_wait(const RowState& state) const {
    if constexpr (!kShufflesFirst) return;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem_address(&shared.control->order[threadIdx.x - kWarpgroupThreads])), "f"(state.max[0] + state.max[1])
                 : "memory");
  }
  // The warpgroup's products have ended, and with them its part of a turn that lasts.
  __device__ __forceinline__ void end_products(Logits& s, Output& o) const {
    wgmma_wait<0>();
    if constexpr (kTurnsLast) end_turn();
    bind_registers(o);
    bind_registers(s);
    release(kVEmpty, count);
  }
  // The softmax of a tile while its warpgroup's product with the values of the tile before runs, and the end of that product. Returns and
  // gives what update_reference does.
  __device__ __forceinline__ bool softmax_under_product(const ThreadRows& rows, Logits& s, Weights& p, RowState& state, Output& o, float (&rescale)[2]) const {
    if constexpr (!kMaximaFirst) end_products(s, o);
    bool moves = update_reference(params.base, rows, s, state, rescale);
    // For more than two consumers ptxas finds registers in this order only, and moves the wait up all the same.
    if constexpr (kConsumers > 2) exponentiate(params.base, rows, s, state);
    if constexpr (kMaximaFirst) {
      order_before_wait(state);
      end_products(s, o);
    }
    if constexpr (kConsumers == 2) exponentiate(params.base, rows, s, state);
    pack_weights(s, p);
    return moves;
  }

  // V rows past the request's last key, or left of every row's window, hold what was there before, or belong to others: any bits at
  // all, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_unseen_values(const QueuedWork& work, int key_begin, unsigned v_tile) const {
    int first_seen = work.segment.first_seen - key_begin, first_missing = work.tile.kv_len - key_begin;
    if (kQFp8 || (first_seen <= 0 && first_missing >= kKvTile)) return;  // fp8 values were cleared before they were turned
    constexpr int kChunks = kBlockRowBytes / 16;
    for (int idx = threadIdx.x % kWarpgroupThreads; idx < kKvTile * kChunks; idx += kWarpgroupThreads) {
      int key = idx / kChunks;
      if (key >= first_seen && key < first_missing) continue;
#pragma unroll
      for (int block = 0; block < kVoBlocks; ++block) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v_tile + block * kKvBlockBytes + idx * 16), "r"(0) : "memory");
      }
    }
    // All warpgroups write the same zeros, so neither has to wait for the other.
    fence_async_proxy();
    sync_warpgroup(index);
  }

  // The first tile of a segment, with nothing else in flight: its queries are waited for, its weights are ready on return.
  __device__ __forceinline__ void begin_segment(const QueuedWork& work, ThreadRows& rows, Logits& s, Weights& p, RowState& state, Output& o) {
    rows = ThreadRows(params.base, work, index, warp);
    state = RowState(rows);
    bank.open();
#pragma unroll
    for (int i = 0; i < kHeadDimVo / 2; ++i) o[i] = 0.f;
    wait_for_queries(slot);
    wait_full(shared, kKFull, count);
    wgmma_fence();
    multiply_qk(s, shared.q_tile(index, slot), shared.k_tile(count));
    wgmma_wait<0>();
    bind_registers(s);
    release(kKEmpty, count);
    finish_logits(params.base, work, index, rows, work.segment.kv_begin, needs_mask(work, index, work.segment.kv_begin), s);
    float rescale[2];
    update_reference(params.base, rows, s, state, rescale);
    exponentiate(params.base, rows, s, state);
    pack_weights(s, p);
  }

  // The remaining products with keys, but for the last one with values.
  __device__ __forceinline__ void continue_segment(const QueuedWork& work, const ThreadRows& rows, Logits& s, Weights& p, RowState& state, Output& o) {
    unsigned q_tile = shared.q_tile(index, slot);
    int key_end = work.segment.kv_end;
    if (work.segment.first_seen > work.segment.kv_begin && work.segment.kv_begin + kKvTile < key_end) {
      wait_full(shared, kVFull, count);
      clear_unseen_values(work, work.segment.kv_begin, shared.v_tile(count));
    }
#pragma unroll 1
    for (int key_begin = work.segment.kv_begin + kKvTile; key_begin < key_end; key_begin += kKvTile) {
      float rescale[2];
      bool is_masked = needs_mask(work, index, key_begin);
      wait_full(shared, kKFull, count + 1);
      if constexpr (kWaitForBoth) wait_full(shared, kVFull, count);
      begin_turn();
      wgmma_fence();
      multiply_qk(s, q_tile, shared.k_tile(count + 1));
      if constexpr (!kWaitForBoth) {
        wait_full(shared, kVFull, count);
        wgmma_fence();
      }
      multiply_pv(o, p, shared.v_tile(count));
      if constexpr (!kTurnsLast) end_turn();
      wgmma_wait<1>();
      bind_registers(s);
      release(kKEmpty, count + 1);
      finish_logits(params.base, work, index, rows, key_begin, is_masked, s);
      if (softmax_under_product(rows, s, p, state, o, rescale)) rescale_output(o, rescale);
      if constexpr (kHasBank) bank.deposit(o, state);
      ++count;
    }
  }

  // The last product of a segment, and its rows on their way out.
  __device__ __forceinline__ void end_segment(const QueuedWork& work, const Weights& p, RowState& state, Output& o) {
    wait_full(shared, kVFull, count);
    clear_unseen_values(work, last_tile(work), shared.v_tile(count));
    wgmma_fence();
    multiply_pv(o, p, shared.v_tile(count));
    wgmma_wait<0>();
    bind_registers(o);
    release(kVEmpty, count);
    ++count;
    if constexpr (kHasBank) bank.withdraw(o, state);
    if (work.segment.group < 0) {
      sync_warpgroup(index);  // other warps' products may still read the queries that outputs take the place of
      stage(work, o, state);
    } else {
      hand_back_buffer();
      write_part(params.base, work, o, state, index, warp);
      if (arrive_part<ConsumerThreads>(params.base, work.segment, work.group, &shared.control->is_last)) merge_rows(params.base, work);
    }
  }

  // As end_segment of one and begin_segment of the following, under each other: neither the queries of the one nor the first softmax of
  // the other leave the tensor cores idle.
  __device__ __forceinline__ void join_segments(const QueuedWork& work, const QueuedWork& following, ThreadRows& rows, Logits& s, Weights& p, RowState& state,
                                                Output& o) {
    wait_for_queries(slot + 1);
    wait_full(shared, kKFull, count + 1);
    wait_full(shared, kVFull, count);
    clear_unseen_values(work, last_tile(work), shared.v_tile(count));
    bool is_masked = needs_mask(following, index, following.segment.kv_begin);
    begin_turn();
    wgmma_fence();
    multiply_qk(s, shared.q_tile(index, slot + 1), shared.k_tile(count + 1));
    multiply_pv(o, p, shared.v_tile(count));
    if constexpr (!kTurnsLast) end_turn();
    rows = ThreadRows(params.base, following, index, warp);
    RowState finished = state;
    state = RowState(rows);
    wgmma_wait<1>();
    bind_registers(s);
    release(kKEmpty, count + 1);
    finish_logits(params.base, following, index, rows, following.segment.kv_begin, is_masked, s);
    float rescale[2];
    softmax_under_product(rows, s, p, state, o, rescale);
    ++count;
    if constexpr (kHasBank) bank.withdraw(o, finished);
    bank.open();
    // Where a turn began, all warps are past the segment's products with keys since.
    if constexpr (!kTakeTurns) sync_warpgroup(index);
    stage(work, o, finished);
#pragma unroll
    for (int i = 0; i < kHeadDimVo / 2; ++i) o[i] = 0.f;
  }

  // First key of a segment's last tile.
  static __device__ __forceinline__ int last_tile(const QueuedWork& work) {
    int begin = work.segment.kv_begin;
    return begin + (work.segment.kv_end - 1 - begin) / kKvTile * kKvTile;
  }

  __device__ __forceinline__ void wait_for_queries(unsigned some_slot) const {
    mbarrier_sleep(shared.barrier(kQFull + shared.q_buffer(index, some_slot)), some_slot / kQBuffers & 1);
    // cp.async writes as ordinary stores do. The wait makes what cp_async_arrive tracked visible to this thread, and its own fence, behind
    // that, to the products: the threads that copy are gone before there is anything to fence.
    if (!params.q_boxes) fence_async_proxy();
  }
  // All threads: the warp needs the current segment's queries no more.
  __device__ __forceinline__ void hand_back_buffer() const {
    mbarrier_arrive(shared.barrier(kQDone + shared.q_buffer(index, recompute_from(slot))));
  }

  // Hand finished rows to the warps that store them. No warp of the warpgroup may still be at the segment's products with keys.
  __device__ __forceinline__ void stage(const QueuedWork& work, const Output& o, RowState& state) {
    stage_rows(params.base, work, o, state, index, warp, shared.q_tile(index, slot));
    fence_async_proxy();
    hand_back_buffer();
  }

  __device__ __forceinline__ const QueuedWork& work_in(unsigned some_slot) const { return shared.work(some_slot); }

  // From `slot` on, the next segment with keys; those without are dealt with on the way. False when there is none.
  __device__ __forceinline__ bool find_work() {
#pragma unroll 1
    while (true) {
      const QueuedWork& work = wait_for_work(shared, slot);
      if (!work.valid || work.has_keys()) return work.valid;
      write_empty_rows(params.base, work, index, warp);
      wait_for_queries(slot);
      hand_back_buffer();
      release_work(shared, slot++);
    }
  }

  __device__ __forceinline__ void consume() {
    // The first warpgroup's first turn.
    if (kTakeTurns && index == kConsumers - 1) end_turn();
    ThreadRows rows;
    RowState state;
    Output o;
    Logits s;
    Weights p;
    bool joined = false;
#pragma unroll 1
    while (true) {
      if (!joined) {
        if (!find_work()) return;
        begin_segment(work_in(slot), rows, s, p, state, o);
      }
      continue_segment(work_in(slot), rows, s, p, state, o);
      const QueuedWork& work = work_in(slot);
      const QueuedWork& following = wait_for_work(shared, slot + 1);
      // Merging needs the registers that a join occupies.
      joined = kJoinSegments && following.valid && following.has_keys() && work.segment.group < 0;
      if constexpr (kJoinSegments) {
        if (joined) join_segments(work, following, rows, s, p, state, o);
      }
      if (!joined) end_segment(work, p, state, o);
      release_work(shared, slot++);
    }
  }
};
