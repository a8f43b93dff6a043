// SPDX-License-Identifier: Apache-2.0
// The end of a segment of a 16-row tile: warps leave their states in shared memory and go on; they write the result out together
// when each of them has come to the end of its next segment, so that no warp waits for another.
#pragma once

#include "tile/decode_state.cuh"

constexpr int kColumnGroups = kHeadDimVo / 16;

// What the warps leave behind of one segment, in the order of their shares of it.
struct JoinSpace {
  // Accumulators of a tile as their thread has them, side by side: the four of rows g and g + 8, or where there are up to 8 rows two.
  float columns[kNumWarps][kColumnGroups * 8 * 32];
  float row_max[16][kNumWarps];
  float row_sum[16][kNumWarps];
};

// One segment on its way out, in static shared memory.
struct JoinRecord {
  Tile tile;
  Segment segment;
  MergeGroup group;
};

// The same value, of which the compiler knows nothing before this point: what follows from it is not computed ahead of the keys, and takes no
// registers there.
__device__ __forceinline__ int kept_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// What all warps say of one row, in as few loads as there can be.
__device__ __forceinline__ void load_of_warps(const float (&source)[kNumWarps], float (&values)[kNumWarps]) {
  constexpr int kAtOnce = kNumWarps < 4 ? kNumWarps : 4;
  struct alignas(4 * kAtOnce) Some {
    float values[kAtOnce];
  };
#pragma unroll
  for (int i = 0; i < kNumWarps / kAtOnce; ++i) {
    Some some = reinterpret_cast<const Some*>(source)[i];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) values[i * kAtOnce + j] = some.values[j];
  }
}

// One row over all warps: how much each warp counts, and how the row finishes.
struct JoinedRow {
  float weight[kNumWarps];
  RowFinish finish;

  __device__ __forceinline__ void join(const AttentionParams& params, const JoinRecord& record, const JoinSpace& space, int row_in_tile) {
    float row_sum[kNumWarps], joint_max = neg_inf();
    load_of_warps(space.row_max[row_in_tile], weight);
    load_of_warps(space.row_sum[row_in_tile], row_sum);
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) joint_max = fmaxf(joint_max, weight[w]);
    float reference = joint_max == neg_inf() ? 0.f : joint_max;
    float joint_sum = 0.f;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) {
      weight[w] = ex2(weight[w] - reference);
      joint_sum += row_sum[w] * weight[w];
    }
    int kv_head = record.segment.kv_head;
    finish = record.segment.group < 0 && row_in_tile < record.tile.num_rows
                 ? finish_row(params, make_row(params, record.tile, kv_head, row_in_tile), kv_head, joint_max, joint_sum)
                 : finish_part(joint_max, joint_sum);
  }
};

// 16 neighbouring columns of one row as this thread has them: columns 2c, 2c + 1 of two output tiles.
__device__ __forceinline__ void write_columns(const AttentionParams& params, const JoinRecord& record, int row_in_tile, int group, int c,
                                              const float (&even)[2], const float (&odd)[2]) {
  if (record.segment.group < 0) {
    unsigned short* o = output_row(params, record.tile, make_row(params, record.tile, record.segment.kv_head, row_in_tile)) + group * 16;
    if constexpr (kFp8) {
      // Even and odd dimensions come from different tiles: together a thread has four neighbours.
      *reinterpret_cast<uint2*>(o + 4 * c) = {pack_pair<kOElement>(even[0], odd[0]), pack_pair<kOElement>(even[1], odd[1])};
    } else {
      *reinterpret_cast<unsigned*>(o + 2 * c) = pack_pair<kOElement>(even[0], even[1]);
      *reinterpret_cast<unsigned*>(o + 8 + 2 * c) = pack_pair<kOElement>(odd[0], odd[1]);
    }
  } else {
    long long part = part_row(record.group, record.tile, record.segment) + row_in_tile;
    float* o = params.partial_o + part * kHeadDimVo + group * 16;
    if constexpr (kFp8) {
      *reinterpret_cast<float4*>(o + 4 * c) = {even[0], odd[0], even[1], odd[1]};
    } else {
      *reinterpret_cast<float2*>(o + 2 * c) = {even[0], even[1]};
      *reinterpret_cast<float2*>(o + 8 + 2 * c) = {odd[0], odd[1]};
    }
  }
}

// The user's transform on columns of a final row: output tiles 2 * group and 2 * group + 1.
__device__ __forceinline__ void transform_columns(const AttentionParams& params, const JoinRecord& record, int row_in_tile, int group, int c,
                                                  float (&columns)[2][2]) {
  if (record.segment.group >= 0 || row_in_tile >= record.tile.num_rows) return;
  Row row = make_row(params, record.tile, record.segment.kv_head, row_in_tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 2; ++j) columns[half][j] = user_output(params, record.tile, row, output_dim(2 * group + half, c, j), columns[half][j]);
  }
}

// 16 neighbouring columns of the thread's rows, summed over the warps in order, finished and written.
template <int kRows>
__device__ __forceinline__ void write_group(const AttentionParams& params, const JoinRecord& record, const JoinSpace& space,
                                            const JoinedRow (&joined)[kRows], int group, int lane) {
  struct alignas(8 * kRows) Accumulators {
    float of_row[kRows][2];
  };
  float columns[kRows][2][2] = {};
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Accumulators left = reinterpret_cast<const Accumulators*>(space.columns[w])[(2 * group + half) * 32 + lane];
#pragma unroll
      for (int i = 0; i < 2 * kRows; ++i) columns[i / 2][half][i % 2] += left.of_row[i / 2][i % 2] * joined[i / 2].weight[w];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    int row_in_tile = lane / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < 2; ++j) columns[r][0][j] *= joined[r].finish.scale, columns[r][1][j] *= joined[r].finish.scale;
    if constexpr (kUserOutput) transform_columns(params, record, row_in_tile, group, lane % 4, columns[r]);
    if (row_in_tile < record.tile.num_rows) write_columns(params, record, row_in_tile, group, lane % 4, columns[r][0], columns[r][1]);
  }
}

// Write the result of all warps: each warp takes every kNumWarps-th group of 16 columns. `kRows` is 2 where the tile has more than 8 rows.
template <int kRows>
__device__ __forceinline__ void write_joined(const AttentionParams& params, const JoinRecord& record, const JoinSpace& space, int warp, int lane) {
  lane = kept_here(lane);
  JoinedRow joined[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) joined[r].join(params, record, space, lane / 4 + 8 * r);
  if constexpr (kColumnGroups <= kNumWarps) {
    // Outside of any loop the columns are on their way while the rows' weights are computed.
    write_group(params, record, space, joined, warp, lane);
  } else {
#pragma unroll 1
    for (int group = warp; group < kColumnGroups; group += kNumWarps) write_group(params, record, space, joined, group, lane);
  }
  if (lane % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    int row_in_tile = lane / 4 + 8 * r;
    if (row_in_tile >= record.tile.num_rows) return;
    // Every warp stores the log-sum-exps of a part: they must arrive with its columns.
    if (record.segment.group >= 0) {
      params.partial_lse[part_row(record.group, record.tile, record.segment) + row_in_tile] = joined[r].finish.lse;
    } else if (warp == 0) {
      store_lse(params, record.tile, make_row(params, record.tile, record.segment.kv_head, row_in_tile), joined[r].finish.lse);
    }
  }
}

// Parts that half a warp has on their way at a time.
constexpr int kPartsAtOnce = kHeadDimVo == 256 ? 4 : 8;

// Write 16 columns of a unit's output from its parts: a thread takes four columns, and one half of the warp the even parts, the other one
// the odd parts, each in their order.
__device__ __forceinline__ void merge_joined(const AttentionParams& params, const JoinRecord& record, int first_column, int lane) {
  lane = kept_here(lane);
  int num_rows = record.tile.num_rows, num_parts = record.group.num_parts;
#pragma unroll 1
  for (int first = 0; first < num_rows * 4; first += 16) {
    int row_in_tile = (first + lane % 16) / 4, column = first_column + lane % 4 * 4;
    bool exists = row_in_tile < num_rows;
    long long part_row = record.group.first_row + static_cast<long long>(lane / 16) * num_rows + row_in_tile;
    const float* lse = params.partial_lse + part_row;
    const float* o = params.partial_o + part_row * kHeadDimVo + column;
    long long step = 2 * num_rows;
    float row_max = neg_inf(), row_sum = 0.f, sum[4] = {};
    int part = lane / 16;
    do {
      float part_lse[kPartsAtOnce];
      float4 part_o[kPartsAtOnce];
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        bool counts = exists && part < num_parts;
        part_lse[i] = counts ? load_l2(lse) : neg_inf();
        part_o[i] = counts ? load_l2(reinterpret_cast<const float4*>(o)) : float4{0.f, 0.f, 0.f, 0.f};
        part += 2, lse += step, o += step * kHeadDimVo;
        // Two additions to a step; the compiler would rather multiply for every part.
        asm("" : "+l"(lse), "+l"(o));
      }
      float batch_max = row_max;
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) batch_max = fmaxf(batch_max, part_lse[i]);
      // Every part may be empty: keep -inf out of the differences.
      float reference = batch_max == neg_inf() ? 0.f : batch_max;
      float rescale = ex2(row_max - reference);
      row_max = batch_max;
      row_sum *= rescale;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] *= rescale;
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        float weight = ex2(part_lse[i] - reference);
        row_sum += weight;
        sum[0] += weight * part_o[i].x, sum[1] += weight * part_o[i].y, sum[2] += weight * part_o[i].z, sum[3] += weight * part_o[i].w;
      }
    } while (part - lane / 16 < num_parts);
    float joint_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 16));
    float weight = ex2(row_max - (joint_max == neg_inf() ? 0.f : joint_max));
    auto over_halves = [&](float x) {
      x *= weight;
      return x + __shfl_xor_sync(0xffffffffu, x, 16);
    };
    row_sum = over_halves(row_sum);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] = over_halves(sum[j]);
    if (!exists || lane >= 16) continue;
    int kv_head = record.segment.kv_head;
    Row row = make_row(params, record.tile, kv_head, row_in_tile);
    RowFinish finish = finish_row(params, row, kv_head, joint_max, row_sum);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j] *= finish.scale;
      if constexpr (kUserOutput) sum[j] = user_output(params, record.tile, row, column + j, sum[j]);
    }
    *reinterpret_cast<uint2*>(output_row(params, record.tile, row) + column) = {pack_pair<kOElement>(sum[0], sum[1]), pack_pair<kOElement>(sum[2], sum[3])};
    if (column == 0) store_lse(params, record.tile, row, finish.lse);
  }
}

// Records in use at a time: a warp looks at segment n's last when it writes segment n + 1, and may be one segment behind another.
constexpr int kJoinRecords = 4;

// The segments of a CTA on their way out. The barrier of segment n ends a phase when every warp has left its state there: with two
// spaces, for all but the last segment. A warp writes segment n - 1 before it arrives there for n, so that the phase also says that the
// other space is free.
// Each warp announces and merges its own columns of a merge group, with a counter of its own: no warp waits for another's stores.
struct JoinQueue {
  JoinSpace* spaces;
  JoinRecord* records;
  unsigned barriers;  // one for even segments, one for odd ones
  int warp, lane;
  int count;          // segments left behind so far
  int arrived_before; // in lane 0: parts that had arrived before the last one this warp announced; -1 when it has looked at that since

  static __device__ __forceinline__ void init(unsigned barriers) {
    for (int i = 0; i < 2; ++i) mbarrier_init(barriers + 8 * i, kNumWarps * 32);
  }

  // A segment begins. Where its record lay, no warp looks any more: all of them have left the one before the last behind.
  __device__ __forceinline__ void begin(const Tile& tile, const Segment& segment) const {
    if (threadIdx.x == 0) records[count % kJoinRecords].tile = tile, records[count % kJoinRecords].segment = segment;
  }

  // Leave this warp's state of the segment behind, and write out the segment whose turn it is: the one before, so that no warp waits, or
  // with one space the same one. With the last segment, all that is left is written.
  __device__ __forceinline__ void turn(const AttentionParams& params, bool is_last, int num_rows, const MergeGroup& group, int share, const WarpState& state) {
    constexpr bool kOneSpace = kJoinSlots == 1;
    int outgoing = kOneSpace ? count : count - 1;
    if (kOneSpace) {
      __syncthreads();  // the only space may still be read
    } else if (count > 0) {
      wait(outgoing);
    }
    leave(num_rows, group, share, state);
    if (outgoing < 0 && is_last) outgoing = count;
    if (outgoing >= 0) {
      do {
        // The count of a part comes back while its warp goes on, so it is looked at one turn later.
        merge_if_last(params, outgoing - 1);
        if (outgoing > count) break;
        // There is nothing to go on with but this segment: wait until every warp has left it behind.
        if (outgoing == count) __syncthreads();
        write(params, outgoing);
        ++outgoing;
      } while (is_last);
    }
    if (!kOneSpace && !is_last) arrive();
    ++count;
  }

 private:
  __device__ __forceinline__ void wait(int n) const { mbarrier_wait(barriers + n % 2 * 8, n / 2 % 2); }

  // Every thread, for what it wrote and read itself.
  __device__ __forceinline__ void arrive() const { mbarrier_arrive(barriers + count % 2 * 8); }

  __device__ __forceinline__ void leave(int num_rows, const MergeGroup& group, int share, const WarpState& state) const {
    JoinSpace& space = spaces[count % kJoinSlots];
    if (num_rows > 8) {
      float4* columns = reinterpret_cast<float4*>(space.columns[share]) + lane;
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) columns[n * 32] = {state.o[n][0], state.o[n][1], state.o[n][2], state.o[n][3]};
    } else {
      float2* columns = reinterpret_cast<float2*>(space.columns[share]) + lane;
#pragma unroll
      for (int n = 0; n < kOutputTiles; ++n) columns[n * 32] = {state.o[n][0], state.o[n][1]};
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) space.row_max[lane / 4 + 8 * r][share] = state.row_max(r), space.row_sum[lane / 4 + 8 * r][share] = state.row_sum[r];
    }
    if (threadIdx.x == 0) records[count % kJoinRecords].group = group;
  }

  // Write this warp's columns of segment n, which every warp has left behind.
  __device__ __forceinline__ void write(const AttentionParams& params, int n) {
    if (warp >= kColumnGroups) return;
    const JoinRecord& record = records[static_cast<unsigned>(n) % kJoinRecords];
    const JoinSpace& space = spaces[static_cast<unsigned>(n) % kJoinSlots];
    if (record.tile.num_rows > 8) {
      write_joined<2>(params, record, space, warp, lane);
    } else {
      write_joined<1>(params, record, space, warp, lane);
    }
    if (record.segment.group < 0) return;
    __syncwarp();
    if (lane == 0) arrived_before = atomic_increment_acq_rel(arrival_counter(params, record.segment, warp));
  }

  // If the part of segment n that this warp announced was the last of its group, merge this warp's columns.
  __device__ __forceinline__ void merge_if_last(const AttentionParams& params, int n) {
    int before = __shfl_sync(0xffffffffu, arrived_before, 0);
    arrived_before = -1;
    const JoinRecord& record = records[static_cast<unsigned>(n) % kJoinRecords];
    if (before < 0 || before != record.group.num_parts - 1) return;
    // What lane 0 has seen arrive, all lanes may read from here on.
    __syncwarp();
    // Leave the counter as the plan set it, so that the next run finds it zero.
    if (lane == 0) *arrival_counter(params, record.segment, warp) = 0;
#pragma unroll 1
    for (int group = warp; group < kColumnGroups; group += kNumWarps) {
      merge_joined(params, record, group * 16, lane);
    }
  }
};
