// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup: 64 query rows against every key of a segment, the softmax of one tile under the products of another.
#pragma once

#include "tile/fa3_output.cuh"
#include "tile/fa3_query.cuh"

// Warpgroups take turns to issue products, so that one's softmax runs under the other's. Wide heads have enough products of their own.
constexpr bool kTakeTurns = kHeadDimVo <= 128;
// What is the same for the warpgroups' descriptors; V is summed over its rows, and its column blocks are a tile apart.
constexpr unsigned long long kRowsAreColumns = wgmma_descriptor_base(16), kRowsAreSummed = wgmma_descriptor_base(kKvBlockBytes);

__device__ __forceinline__ void multiply_qk(Logits& s, unsigned q_tile, unsigned k_tile) {
  unsigned long long q = wgmma_descriptor(kRowsAreColumns, q_tile), k = wgmma_descriptor(kRowsAreColumns, k_tile);
#pragma unroll
  for (int step = 0; step < kHeadDimQk / 16; ++step) {
    // 16 dims are 32 bytes of a row; four such steps are a block.
    Wgmma<kKvTile>::smem(s, q + (step / 4 * kQBlockBytes + step % 4 * 32) / 16, k + (step / 4 * kKvBlockBytes + step % 4 * 32) / 16, step > 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void multiply_pv(Output& o, const Weights& p, unsigned v_tile) {
  unsigned long long v = wgmma_descriptor(kRowsAreSummed, v_tile);
#pragma unroll
  for (int step = 0; step < kKvTile / 16; ++step) Wgmma<kHeadDimVo>::registers(o, p + step * 4, v + step * 16 * kBlockRowBytes / 16, 1);
  wgmma_commit();
}

struct Consumer {
  const Fa3Params& params;
  Shared shared;
  int index, warp;      // of the warpgroup among consumers, of the warp in it
  unsigned count = 0;   // tiles of the CTA whose products are done

  __device__ __forceinline__ Consumer(const Fa3Params& params, const Shared& shared)
      : params(params), shared(shared), index(threadIdx.x / kWarpgroupThreads - 1), warp(threadIdx.x / 32 % 4) {}

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
  // Exponentials are computed before the wait that follows: a store of what depends on all of them cannot sink below it.
  __device__ __forceinline__ void order_before_wait(const RowState& state) const {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem_address(&shared.control->order[threadIdx.x - kWarpgroupThreads])), "f"(state.sum[0] + state.sum[1])
                 : "memory");
  }

  // V rows past the request's last key hold what was there before, or belong to others: any bits at all, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_missing_values(const QueuedWork& work, int key_begin, unsigned v_tile) const {
    int first_missing = work.tile.kv_len - key_begin;
    if (first_missing >= kKvTile) return;
    constexpr int kChunks = kBlockRowBytes / 16;
    for (int idx = threadIdx.x % kWarpgroupThreads + first_missing * kChunks; idx < kKvTile * kChunks; idx += kWarpgroupThreads) {
#pragma unroll
      for (int block = 0; block < kVoBlocks; ++block) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v_tile + block * kKvBlockBytes + idx * 16), "r"(0) : "memory");
      }
    }
    // Both warpgroups write the same zeros, so neither has to wait for the other.
    fence_async_proxy();
    sync_warpgroup(index);
  }

  // All keys of a segment. On return nothing is in flight but the queries of the next segment.
  __device__ __forceinline__ void attend(const QueuedWork& work, unsigned slot, RowState& state, Output& o) {
    unsigned q_tile = shared.q_tile(index);
    ThreadRows rows(params.base, work, index, warp);
    int key_begin = work.segment.kv_begin, num_tiles = (work.segment.kv_end - key_begin + kKvTile - 1) / kKvTile;
    Logits s;
    Weights p;
    float rescale[2];
    wait_full(shared, kKFull, count);
    wgmma_fence();
    multiply_qk(s, q_tile, shared.k_tile(count));
    wgmma_wait<0>();
    bind_registers(s);
    release(kKEmpty, count);
    finish_logits(params.base, rows, key_begin, s);
    update_softmax(rows, s, state, rescale);
    pack_weights(s, p);
#pragma unroll 1
    for (int tile = 1; tile < num_tiles; ++tile) {
      key_begin += kKvTile;
      wait_full(shared, kKFull, count + 1);
      begin_turn();
      wgmma_fence();
      multiply_qk(s, q_tile, shared.k_tile(count + 1));
      wait_full(shared, kVFull, count);
      wgmma_fence();
      multiply_pv(o, p, shared.v_tile(count));
      end_turn();
      wgmma_wait<1>();
      bind_registers(s);
      release(kKEmpty, count + 1);
      finish_logits(params.base, rows, key_begin, s);
      update_softmax(rows, s, state, rescale);
      order_before_wait(state);
      wgmma_wait<0>();
      bind_registers(o);
      bind_registers(s);
      release(kVEmpty, count);
      pack_weights(s, p);
      rescale_output(o, rescale);
      ++count;
    }
    if constexpr (kPrefetchQ) load_following_q(slot);
    wait_full(shared, kVFull, count);
    clear_missing_values(work, key_begin, shared.v_tile(count));
    wgmma_fence();
    multiply_pv(o, p, shared.v_tile(count));
    wgmma_wait<0>();
    bind_registers(o);
    release(kVEmpty, count);
    ++count;
  }

  // Wait for the segment in slot `slot` of the work ring.
  __device__ __forceinline__ const QueuedWork& wait_for_work(unsigned slot) const {
    mbarrier_wait(shared.barrier(kWorkFull + slot % kWorkSlots), slot / kWorkSlots & 1);
    return shared.control->works[slot % kWorkSlots];
  }

  // Start copying the next segment's queries; every product with this one's is done.
  __device__ __forceinline__ void load_following_q(unsigned slot) const {
    sync_warpgroup(index);
    const QueuedWork& following = wait_for_work(slot + 1);
    if (following.valid) load_q_rows(params.base, following, shared.q_tile(index), index, warp);
  }

  __device__ __forceinline__ void write(const QueuedWork& work, const Output& o, RowState& state) const {
    if (work.segment.group < 0) {
      if constexpr (!kPrefetchQ) sync_warpgroup(index);
      unsigned char* control = reinterpret_cast<unsigned char*>(shared.control);
      unsigned char* staging = control - kControlOffset + (shared.o_tile(index) - shared.base) + warp * kWarpRows * kORowBytes;
      write_direct(params.base, work, o, state, index, warp, staging);
    } else {
      write_part(params.base, work, o, state, index, warp);
      finish_part_of_group<ConsumerThreads>(params.base, work.tile, work.segment, work.group, &shared.control->is_last);
    }
  }

  __device__ __forceinline__ void consume() {
    // The first warpgroup's first turn.
    if (kTakeTurns && index == kConsumers - 1) end_turn();
#pragma unroll 1
    for (unsigned slot = 0;; ++slot) {
      const QueuedWork& work = wait_for_work(slot);
      if (!work.valid) return;
      // Output was staged where these queries go.
      if constexpr (!kPrefetchQ) sync_warpgroup(index);
      if (!kPrefetchQ || slot == 0) load_q_rows(params.base, work, shared.q_tile(index), index, warp);
      cp_async_wait<0>();
      fence_async_proxy();
      sync_warpgroup(index);
      RowState state = {{kNoMax, kNoMax}, {0.f, 0.f}};
      Output o;
#pragma unroll
      for (int i = 0; i < kHeadDimVo / 2; ++i) o[i] = 0.f;
      if (work.segment.kv_begin < work.segment.kv_end) {
        attend(work, slot, state, o);
      } else if constexpr (kPrefetchQ) {
        load_following_q(slot);
      }
      write(work, o, state);
      __syncwarp();
      if (lane_idx() == 0) mbarrier_arrive(shared.barrier(kWorkEmpty + slot % kWorkSlots));
    }
  }
};
