// SPDX-License-Identifier: Apache-2.0
// Where sums of fp8 products are kept in full float: the adders of 8-bit products hold about 14 bits, too few for the sum of a long row.
#pragma once

#include "tile/fa3_softmax.cuh"

constexpr int kDepositKeys = kBankKeys > 0 ? kBankKeys : 1;

// A thread's share of the output that it has deposited. Every kDepositKeys keys accumulators are added to it and begin anew at zero.
struct OutputBank {
  unsigned slot;          // of this thread, 16 bytes in each row of kConsumerThreads
  float reference[2];     // of what is deposited, as RowState::max

  __device__ __forceinline__ explicit OutputBank(const Shared& shared)
      : slot(shared.base + kBankOffset + (threadIdx.x - kWarpgroupThreads) * 16), reference{0.f, 0.f} {}

  // Accumulators of `key` keys of the segment, relative to `max`, go into the bank where that many make a deposit.
  __device__ __forceinline__ void deposit(int key, Output& o, const float (&max)[2]) {
    if (key % kDepositKeys != 0) return;
    add(key > kDepositKeys, o, max);
#pragma unroll
    for (int i = 0; i < kHeadDimVo / 2; i += 4) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(slot + i * kConsumerThreads * 4), "f"(o[i]), "f"(o[i + 1]), "f"(o[i + 2]), "f"(o[i + 3])
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kHeadDimVo / 2; ++i) o[i] = 0.f;
    reference[0] = max[0], reference[1] = max[1];
  }

  // What the segment deposited, whose last tile begins at key `key` of it, back to its accumulators.
  __device__ __forceinline__ void withdraw(int key, Output& o, const float (&max)[2]) const { add(key >= kDepositKeys, o, max); }

 private:
  __device__ __forceinline__ void add(bool any, Output& o, const float (&max)[2]) const {
    if (!any) return;
    float rescale[2] = {ex2(reference[0] - max[0]), ex2(reference[1] - max[1])};
#pragma unroll
    for (int i = 0; i < kHeadDimVo / 2; i += 4) {
      float banked[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(banked[0]), "=f"(banked[1]), "=f"(banked[2]), "=f"(banked[3])
                   : "r"(slot + i * kConsumerThreads * 4)
                   : "memory");
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i + e] = fmaf(banked[e], rescale[e / 2], o[i + e]);
    }
  }
};
