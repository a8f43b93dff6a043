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
// Warps of warpgroup 0. Of 16 bits one copies K and hands out segments, one copies V, and two carry queries and outputs, 32 rows of every
// consumer at a time. Of fp8 one copies K and V, one carries rows, and two turn values, each a share of the dims.
constexpr bool kQFp8 = kQElement == Element::kE4m3;
constexpr int kKWarp = 0, kVWarp = 1, kFirstRowsWarp = kQFp8 ? 1 : 2, kRowsWarps = kQFp8 ? 1 : 2, kRowsOfWarp = 32;
constexpr int kFirstTurner = kFirstRowsWarp + kRowsWarps, kTurners = 2;
// Threads that read a published segment: all warps' but the one's that publishes, and those that turn values.
constexpr int kWorkReaders = (kConsumerWarps + 3 - (kQFp8 ? kTurners : 0)) * 32;
// Registers of a thread after warpgroups have shared them out anew; together they are at most what the CTA starts with.
constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kQFp8 ? 40 : kHeadDimVo <= 64 ? 72 : 56;
constexpr bool kFewRegisters = kProducerRegisters <= 40;
constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : kConsumers == 3 ? 160 : kQFp8 ? 232 : kHeadDimVo <= 64 ? 216 : 224;

// Operands of products are 16-bit elements, or e4m3 of queries and cache alike.
constexpr int kElementBytes = kQFp8 ? 1 : 2;
// Operand tiles lie as blocks of columns, 128 bytes to a row (64 where fp8 heads have no 128), in the swizzle of that width that copies
// and products share.
constexpr int kBlockRowBytes = kHeadDimQk * kElementBytes % 128 == 0 && kHeadDimVo * kElementBytes % 128 == 0 ? 128 : 64;
constexpr int kBlockColumns = kBlockRowBytes / kElementBytes;
constexpr int kQkBlocks = kHeadDimQk / kBlockColumns, kVoBlocks = kHeadDimVo / kBlockColumns;
constexpr int kQBlockBytes = kWarpgroupRows * kBlockRowBytes, kKvBlockBytes = kKvTile * kBlockRowBytes;
constexpr int kQBytes = kQkBlocks * kQBlockBytes;  // of one warpgroup
constexpr int kKBytes = kQkBlocks * kKvBlockBytes, kVBytes = kVoBlocks * kKvBlockBytes;
// fp8 values are multiplied from a second tile with the keys of a column side by side, in blocks of as many keys as divide a tile.
constexpr int kTurnedRowBytes = kKvTile % 128 == 0 ? 128 : kKvTile % 64 == 0 ? 64 : 32;
constexpr int kTurnedBlockBytes = kHeadDimVo * kTurnedRowBytes;
// Outputs lie in blocks of 64 columns, 128 bytes to a row.
constexpr int kOBlockColumns = 64, kOBlockRowBytes = 128, kOBlockBytes = kWarpgroupRows * kOBlockRowBytes;
constexpr int kOBlocks = kHeadDimVo / kOBlockColumns, kOBytes = kOBlocks * kOBlockBytes;
// A consumer's rows have as many buffers as shared memory has room for: queries arrive in one, and their outputs leave from it. With two
// or more, products of the next segment begin before those of this one have ended; wider heads finish one segment before the next.
constexpr int kRowsBytes = kQBytes > kOBytes ? kQBytes : kOBytes;
constexpr int kQBuffers = kHeadDimQk > 128 ? 1 : kQFp8 || kKvTile > 128 ? 2 : 3;
constexpr bool kJoinSegments = kQBuffers > 1;
// Copies of V are in flight beside its tiles, as many as there is room for.
constexpr int kCopyStages = kKvTile > 160 ? 1 : kNumStages;

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
               kQFull = kWorkEmpty + kWorkSlots, kQDone = kQFull + kConsumers * kQBuffers,
               // fp8 only: copies of V, from which warps turn tiles.
               kVCopied = kQDone + kConsumers * kQBuffers, kVTurned = kVCopied + kNumStages, kNumBarriers = kVTurned + (kQFp8 ? kNumStages : 0) };

// Stages of a ring of tiles, which one of its barriers names.
__device__ __forceinline__ constexpr int ring_stages(int ring) { return ring == kVCopied || ring == kVTurned ? kCopyStages : kNumStages; }

using Cursor = WorkCursor<false, kFewRegisters>;

// Of a tile's keys, the first that some row sees, and the first that does not exist: kNoTile behind the last tile.
struct KeyBounds {
  static constexpr int kNoTile = 0;
  int first_seen, first_missing;
};

struct Control {
  unsigned long long barriers[kNumBarriers];
  QueuedWork works[kWorkSlots];
  Cursor cursor;                  // of the warp that publishes
  KeyBounds copied[kNumStages];   // of the copies of V
  float order[kQFp8 ? kConsumerThreads : 1];  // written so that maxima come before a wait, never read
  int is_last;
};

// Tiles after which fp8 products are taken out of their accumulators, which hold too few bits for long sums.
// What the adders cut off of values with a mean grows with the keys between, so there are 2560 of those at most.
constexpr int kBankTiles = kKvTile > 160 ? 2560 / kKvTile : 16;
constexpr bool kHasBank = kQFp8;

// Byte offsets from the first multiple of 1024 in dynamic shared memory.
constexpr int kKOffset = 0, kVOffset = kKOffset + kNumStages * kKBytes, kVCopyOffset = kVOffset + kNumStages * kVBytes;
constexpr int kQOffset = kVCopyOffset + (kQFp8 ? kCopyStages * kVBytes : 0);
constexpr int kBankOffset = kQOffset + kConsumers * kQBuffers * kRowsBytes;
constexpr int kControlOffset = kBankOffset + (kHasBank ? kCtaTileQ * kHeadDimVo * 2 : 0);
constexpr int kControlBytes = kQFp8 ? 1024 + kCtaTileQ * 8 : 1280, kAlignmentSlack = 1024;

static_assert(sizeof(Control) <= kControlBytes, "the control block has outgrown its place");
static_assert(kSmemBytes == kControlOffset + kControlBytes + kAlignmentSlack, "fa3_smem_bytes in cupyinfer/schedule/tiles.py says otherwise");
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kCtaThreads / 8 * 8 * (1 + kConsumers), "a warpgroup would wait for registers for ever");
static_assert(kConsumers == 2 || kConsumers <= 4 && !kSoftCap && !kAlibi, "registers are shared out among so many");
static_assert(kCtaTileQ % kWarpgroupRows == 0 && kCtaThreads == kConsumerThreads + kWarpgroupThreads, "a consumer per 64 rows, and a producer");
static_assert(!kQFp8 || kKvElement == Element::kE4m3, "fp8 queries meet a cache of their own type");
static_assert(kHeadDimQk % kBlockColumns == 0 && kHeadDimVo % kBlockColumns == 0 && kKvTile % (32 / kElementBytes) == 0, "tiles are whole blocks");

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
  // Tile `count` of the CTA, counted over all segments, lies in stage count % kNumStages.
  __device__ __forceinline__ unsigned k_tile(unsigned count) const { return base + kKOffset + count % kNumStages * kKBytes; }
  __device__ __forceinline__ unsigned v_tile(unsigned count) const { return base + kVOffset + count % kNumStages * kVBytes; }
  // Where fp8 values arrive, before they are turned into a V tile.
  __device__ __forceinline__ unsigned v_copy(unsigned count) const { return base + kVCopyOffset + count % kCopyStages * kVBytes; }
  // Queries, and then outputs, of the segment in slot `slot` of the work ring.
  __device__ __forceinline__ int q_buffer(int consumer, unsigned slot) const { return consumer * kQBuffers + slot % kQBuffers; }
  __device__ __forceinline__ unsigned q_tile(int consumer, unsigned slot) const { return base + kQOffset + q_buffer(consumer, slot) * kRowsBytes; }
  // The segment in that slot; the slots follow each other in a ring.
  __device__ __forceinline__ QueuedWork& work(unsigned slot) const { return control->works[slot % kWorkSlots]; }
};

// Byte offset of a 16-byte chunk of a row of queries, and of outputs, in a consumer's buffer.
__device__ __forceinline__ unsigned query_chunk_offset(unsigned row, unsigned chunk) {
  constexpr unsigned kBlockChunks = kBlockRowBytes / 16;
  return chunk / kBlockChunks * kQBlockBytes + Swizzle<kBlockRowBytes>::offset(row, chunk % kBlockChunks);
}
__device__ __forceinline__ unsigned output_chunk_offset(unsigned row, unsigned chunk) {
  return chunk / 8 * kOBlockBytes + Swizzle<kOBlockRowBytes>::offset(row, chunk % 8);
}

// Wait until stage or slot `count` of a ring has been filled, or emptied by the user before.
__device__ __forceinline__ void wait_full(const Shared& shared, Barrier ring, unsigned count) {
  mbarrier_sleep(shared.barrier(ring + count % ring_stages(ring)), count / ring_stages(ring) & 1);
}
__device__ __forceinline__ void wait_empty(const Shared& shared, Barrier ring, unsigned count) {
  mbarrier_sleep(shared.barrier(ring + count % ring_stages(ring)), (count / ring_stages(ring) & 1) ^ 1);
}

// One thread of the CTA. Barriers of segments count every thread that wrote or read what they hand over, and so release its accesses:
// racecheck cannot follow a __syncwarp and then one lane's arrival, and once per segment all of them cost nothing that can be measured.
__device__ __forceinline__ void init_barriers(const Fa3Params& params, const Shared& shared) {
  for (int stage = 0; stage < kNumStages; ++stage) {
    mbarrier_init(shared.barrier(kKFull + stage), 1), mbarrier_init(shared.barrier(kKEmpty + stage), kConsumers);
    mbarrier_init(shared.barrier(kVFull + stage), kQFp8 ? kTurners : 1), mbarrier_init(shared.barrier(kVEmpty + stage), kConsumers);
    if (kQFp8) mbarrier_init(shared.barrier(kVCopied + stage), 1), mbarrier_init(shared.barrier(kVTurned + stage), kTurners);
  }
  for (int slot = 0; slot < kWorkSlots; ++slot) {
    mbarrier_init(shared.barrier(kWorkFull + slot), kConsumers), mbarrier_init(shared.barrier(kWorkEmpty + slot), kWorkReaders);
  }
  for (int buffer = 0; buffer < kConsumers * kQBuffers; ++buffer) {
    // Copies by the copy engine are announced by one lane, others by the lane that makes them, 32 rows at a time.
    mbarrier_init(shared.barrier(kQFull + buffer), kWarpgroupRows / kRowsOfWarp * (params.q_boxes ? 1 : 32));
    mbarrier_init(shared.barrier(kQDone + buffer), kWarpgroupThreads);
  }
  mbarrier_init_fence();
}

// Wait for the segment in slot `slot` of the work ring.
__device__ __forceinline__ const QueuedWork& wait_for_work(const Shared& shared, unsigned slot) {
  mbarrier_sleep(shared.barrier(kWorkFull + slot % kWorkSlots), slot / kWorkSlots & 1);
  return shared.work(slot);
}

// What follows from the result is computed where it is used, and holds no register on the way there.
__device__ __forceinline__ unsigned recompute_from(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// All threads of a warp: it has read what it needs of that segment.
__device__ __forceinline__ void release_work(const Shared& shared, unsigned slot) {
  mbarrier_arrive(shared.barrier(kWorkEmpty + recompute_from(slot) % kWorkSlots));
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
