// SPDX-License-Identifier: Apache-2.0
// Who does what in an fa3 CTA, and where everything lies in shared memory.
#pragma once

#include "fa3_params.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/output.cuh"
#include "tile/swizzle.cuh"

constexpr bool kAlibi = kPosEncoding == PosEncoding::kAlibi;
constexpr unsigned kFullWarp = 0xffffffffu;

// Warpgroup 0 feeds the CTA, each of the others owns 64 query rows.
constexpr int kWarpgroupThreads = 128, kWarpgroupRows = 64, kWarpRows = 16;
constexpr int kConsumers = kCtaTileQ / kWarpgroupRows;
constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads, kConsumerWarps = kConsumerThreads / 32;
constexpr int kCtaThreads = kNumWarps * 32;
// Warps of warpgroup 0: one copies K and hands out segments, one copies V, and two carry queries and outputs, each half of the rows of
// every consumer.
constexpr int kKWarp = 0, kVWarp = 1, kFirstRowsWarp = 2, kRowsWarps = 2, kRowsOfWarp = kWarpgroupRows / kRowsWarps;
// Warps that read a published segment: all but the one that publishes.
constexpr int kWorkReaders = kConsumerWarps + 1 + kRowsWarps;
// Registers of a thread after warpgroups have shared them out anew; together they are what the CTA starts with.
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kHeadDimVo <= 64 ? 72 : 56;
constexpr bool kFewRegisters = kProducerRegisters < 40;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kHeadDimVo <= 64 ? 216 : 224;

// Operand tiles lie as blocks of 64 columns, 128 bytes to a row, in the 128-byte swizzle that copies and products share.
constexpr int kBlockColumns = 64, kBlockRowBytes = 128;
constexpr int kQkBlocks = kHeadDimQk / kBlockColumns, kVoBlocks = kHeadDimVo / kBlockColumns;
constexpr int kQBlockBytes = kWarpgroupRows * kBlockRowBytes, kKvBlockBytes = kKvTile * kBlockRowBytes;
constexpr int kQBytes = kQkBlocks * kQBlockBytes;  // of one warpgroup
constexpr int kKBytes = kQkBlocks * kKvBlockBytes, kVBytes = kVoBlocks * kKvBlockBytes;
// A consumer's rows have as many buffers as shared memory has room for: queries arrive in one, and their outputs leave from it. With two
// or more, products of the next segment begin before those of this one have ended; wider heads finish one segment before the next.
constexpr int kQBuffers = kHeadDimQk > 128 ? 1 : kKvTile > 128 ? 2 : 3;
constexpr bool kJoinSegments = kQBuffers > 1;

// A segment as the producer hands it on; `valid` is false past the last one.
struct QueuedWork {
  Tile tile;
  Segment segment;
  MergeGroup group;
  bool valid;
  int seen_from[kConsumers], seen_to[kConsumers];  // keys that every row of a consumer sees

  __device__ __forceinline__ bool has_keys() const { return segment.kv_begin < segment.kv_end; }
  // Final rows leave through shared memory.
  __device__ __forceinline__ bool is_staged() const { return has_keys() && segment.group < 0; }
};

constexpr int kWorkSlots = 4;
enum Barrier { kKFull = 0, kKEmpty = kKFull + kNumStages, kVFull = kKEmpty + kNumStages, kVEmpty = kVFull + kNumStages,
               kWorkFull = kVEmpty + kNumStages, kWorkEmpty = kWorkFull + kWorkSlots,
               // Of each consumer's buffers: queries are there; queries are done with, and outputs are there if the segment has any.
               kQFull = kWorkEmpty + kWorkSlots, kQDone = kQFull + kConsumers * kQBuffers, kNumBarriers = kQDone + kConsumers * kQBuffers };

using Cursor = WorkCursor<false, kFewRegisters>;

struct Control {
  unsigned long long barriers[kNumBarriers];
  QueuedWork works[kWorkSlots];
  Cursor cursor;                  // of the warp that publishes
  float order[kConsumerThreads];  // written so that exponentials come before a wait, never read
  int is_last;
};

// Byte offsets from the first multiple of 1024 in dynamic shared memory.
constexpr int kKOffset = 0, kVOffset = kKOffset + kNumStages * kKBytes, kQOffset = kVOffset + kNumStages * kVBytes;
constexpr int kControlOffset = kQOffset + kConsumers * kQBuffers * kQBytes;
constexpr int kControlBytes = 1024 + kCtaTileQ * 8, kAlignmentSlack = 1024;

static_assert(sizeof(Control) <= kControlBytes, "the control block has outgrown its place");
static_assert(kSmemBytes == kControlOffset + kControlBytes + kAlignmentSlack, "fa3_smem_bytes in cupyinfer/schedule/tiles.py says otherwise");
static_assert(kConsumers == 2 || kConsumers == 3 && !kSoftCap && !kAlibi, "registers are shared out among so many");
static_assert(kCtaTileQ % kWarpgroupRows == 0 && kCtaThreads == kConsumerThreads + kWarpgroupThreads, "a consumer per 64 rows, and a producer");
static_assert(kHeadDimVo <= kHeadDimQk, "outputs take the place of queries");
static_assert(kHeadDimQk % kBlockColumns == 0 && kHeadDimVo % kBlockColumns == 0 && kKvTile % 16 == 0, "tiles are whole blocks");

__device__ __forceinline__ int lane_idx() { return threadIdx.x % 32; }
// The same for warpgroup 0, whose few registers must not hold what follows from it through whole loops: read anew each time.
__device__ __forceinline__ int producer_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Shared memory of the CTA, as addresses for the hardware and as a pointer to the control block, made from one another: a register each
// would be too many.
struct Shared {
  unsigned base;
  Control* control;

  __device__ __forceinline__ explicit Shared(unsigned char* smem) {
    base = (smem_address(smem) + kAlignmentSlack - 1) / kAlignmentSlack * kAlignmentSlack;
    control = static_cast<Control*>(__cvta_shared_to_generic(base + kControlOffset));
  }
  __device__ __forceinline__ unsigned barrier(int which) const { return base + kControlOffset + which * 8; }
  // Tile `count` of the CTA, counted over all segments, lies in stage count % 2.
  __device__ __forceinline__ unsigned k_tile(unsigned count) const { return base + kKOffset + count % kNumStages * kKBytes; }
  __device__ __forceinline__ unsigned v_tile(unsigned count) const { return base + kVOffset + count % kNumStages * kVBytes; }
  // Queries, and then outputs, of the segment in slot `slot` of the work ring.
  __device__ __forceinline__ int q_buffer(int consumer, unsigned slot) const { return consumer * kQBuffers + slot % kQBuffers; }
  __device__ __forceinline__ unsigned q_tile(int consumer, unsigned slot) const { return base + kQOffset + q_buffer(consumer, slot) * kQBytes; }
  // The segment in that slot; the slots follow each other in a ring.
  __device__ __forceinline__ QueuedWork& work(unsigned slot) const { return control->works[slot % kWorkSlots]; }
};

// Byte offset of a 16-byte chunk of a row in a consumer's buffer.
__device__ __forceinline__ unsigned row_chunk_offset(unsigned row, unsigned chunk) {
  return chunk / 8 * kQBlockBytes + Swizzle<kBlockRowBytes>::offset(row, chunk % 8);
}

// Wait until stage or slot `count` of a ring has been filled, or emptied by the user before.
__device__ __forceinline__ void wait_full(const Shared& shared, Barrier ring, unsigned count) {
  mbarrier_sleep(shared.barrier(ring + count % kNumStages), count / kNumStages & 1);
}
__device__ __forceinline__ void wait_empty(const Shared& shared, Barrier ring, unsigned count) {
  mbarrier_sleep(shared.barrier(ring + count % kNumStages), (count / kNumStages & 1) ^ 1);
}

// One thread of the CTA.
__device__ __forceinline__ void init_barriers(const Fa3Params& params, const Shared& shared) {
  for (int stage = 0; stage < kNumStages; ++stage) {
    mbarrier_init(shared.barrier(kKFull + stage), 1), mbarrier_init(shared.barrier(kKEmpty + stage), kConsumers);
    mbarrier_init(shared.barrier(kVFull + stage), 1), mbarrier_init(shared.barrier(kVEmpty + stage), kConsumers);
  }
  for (int slot = 0; slot < kWorkSlots; ++slot) {
    mbarrier_init(shared.barrier(kWorkFull + slot), 1), mbarrier_init(shared.barrier(kWorkEmpty + slot), kWorkReaders);
  }
  for (int buffer = 0; buffer < kConsumers * kQBuffers; ++buffer) {
    // Copies by the copy engine are announced by one lane, others by the lane that makes them.
    mbarrier_init(shared.barrier(kQFull + buffer), kRowsWarps * (params.q_boxes ? 1 : 32));
    mbarrier_init(shared.barrier(kQDone + buffer), kWarpgroupThreads / 32);
  }
  mbarrier_init_fence();
}

// Wait for the segment in slot `slot` of the work ring.
__device__ __forceinline__ const QueuedWork& wait_for_work(const Shared& shared, unsigned slot) {
  mbarrier_sleep(shared.barrier(kWorkFull + slot % kWorkSlots), slot / kWorkSlots & 1);
  return shared.work(slot);
}

// The warp has read what it needs of that segment.
__device__ __forceinline__ void release_work(const Shared& shared, unsigned slot) {
  __syncwarp();
  if (lane_idx() == 0) mbarrier_arrive(shared.barrier(kWorkEmpty + slot % kWorkSlots));
}

// Named barriers: a turn and a meeting point for each consumer warpgroup, and one where all consumers meet.
constexpr int kTurnBarrier = 1, kWarpgroupBarrier = kTurnBarrier + kConsumers, kConsumerBarrier = kWarpgroupBarrier + kConsumers;

__device__ __forceinline__ void sync_warpgroup(int consumer) { named_barrier_sync(kWarpgroupBarrier + consumer, kWarpgroupThreads); }

// The threads that merge parts.
struct ConsumerThreads {
  static __device__ __forceinline__ int index() { return threadIdx.x - kWarpgroupThreads; }
  static __device__ __forceinline__ int count() { return kConsumerThreads; }
  static __device__ __forceinline__ void sync() { named_barrier_sync(kConsumerBarrier, kConsumerThreads); }
};
