// SPDX-License-Identifier: Apache-2.0
// Where sums of fp8 products are kept: the adders of 8-bit products hold about 14 bits and cut off the rest, too few for the sum of a long row.
#pragma once

#include "tile/fa3_softmax.cuh"

// A thread's share of the output that it has deposited. After every kBankTiles tiles accumulators are added to it and begin anew at zero.
// It holds means of values rather than sums, as half: means are as small as values are, and rounding to nearest leaves no bias.
struct OutputBank {
  static constexpr int kRegisters = kHeadDimVo / 4;
  // Values of e4m3 reach 448, half 65504: as far up as they go leaves small means most bits.
  static constexpr float kLog2Unit = -6.f;
  static constexpr float kNothing = 1e38f;

  unsigned slot;       // of this thread, 16 bytes in each row of kConsumerThreads
  int tiles_left;      // until the next deposit
  float reference[2];  // log2 of what a deposited value 1 stands for; kNothing before the first deposit of a segment

  __device__ __forceinline__ explicit OutputBank(const Shared& shared) : slot(shared.base + kBankOffset + (threadIdx.x - kWarpgroupThreads) * 16) {}

  // A segment begins.
  __device__ __forceinline__ void open() { tiles_left = kBankTiles, reference[0] = kNothing; }

  // After each tile: where that many have been summed, accumulators relative to state.max go into the bank.
  __device__ __forceinline__ void deposit(Output& o, const RowState& state) {
    if (--tiles_left > 0) return;
    withdraw(o, state);
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float weights = state.sum[r];
      weights += __shfl_xor_sync(kFullWarp, weights, 1);
      weights += __shfl_xor_sync(kFullWarp, weights, 2);
      // A row that has seen no key has no weights.
      float exponent = lg2(fmaxf(weights, kLeastScale)) + kLog2Unit;
      factor[r] = ex2(-exponent);
      reference[r] = state.max[r] + exponent;
    }
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4) {
      unsigned packed[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) packed[e] = pack_pair<Element::kFloat16>(o[(i + e) * 2] * factor[e % 2], o[(i + e) * 2 + 1] * factor[e % 2]);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(slot + i * kConsumerThreads * 4), "r"(packed[0]), "r"(packed[1]), "r"(packed[2]),
                   "r"(packed[3])
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kHeadDimVo / 2; ++i) o[i] = 0.f;
    tiles_left = kBankTiles;
  }

  // What the segment has deposited, back to its accumulators.
  __device__ __forceinline__ void withdraw(Output& o, const RowState& state) const {
    if (reference[0] == kNothing) return;
    float rescale[2] = {ex2(reference[0] - state.max[0]), ex2(reference[1] - state.max[1])};
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4) {
      unsigned banked[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(banked[0]), "=r"(banked[1]), "=r"(banked[2]), "=r"(banked[3])
                   : "r"(slot + i * kConsumerThreads * 4)
                   : "memory");
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float low, high;
        unpack_pair<Element::kFloat16>(banked[e], low, high);
        o[(i + e) * 2] = fmaf(low, rescale[e % 2], o[(i + e) * 2]);
        o[(i + e) * 2 + 1] = fmaf(high, rescale[e % 2], o[(i + e) * 2 + 1]);
      }
    }
  }
};
