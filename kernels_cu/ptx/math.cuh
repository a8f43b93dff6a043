// SPDX-License-Identifier: Apache-2.0
// Special functions and small numeric helpers, one instruction each where the hardware has one.
#pragma once

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of a normal number, with an error of at most its last bit, and without the branch that an exact division takes.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The greater ones of two pairs of bfloat16.
__device__ __forceinline__ unsigned max_bf16_pair(unsigned a, unsigned b) {
  unsigned pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// row_max + log2(row_sum), for a positive sum. The sum's exponent is added to the maximum first, both being exact or nearly so, and only
// the logarithm of what is left, near one, is approximate: lg2 of a sum of 2^10 has an error that a result near zero would show.
__device__ __forceinline__ float log_sum(float row_max, float row_sum) {
  // The mantissa is in [sqrt(1/2), sqrt(2)). It comes from a product, so that a sum that is no number or infinite stays one.
  int exponent = min((__float_as_int(row_sum) - 0x3f3504f3) >> 23, 126);
  float mantissa = row_sum * __int_as_float((127 - exponent) << 23);
  return row_max + static_cast<float>(exponent) + lg2(mantissa);
}

// tanh to float's own precision, which a logit needs that is scaled by the cap again: tanh.approx has 11 bits only. Near zero the
// formula with one exponential cancels, and an odd polynomial takes its place (fitted on Chebyshev nodes over [0, 0.6], 7e-8).
__device__ __forceinline__ float tanh_ex2(float x) {
  float square = x * x;
  float small = fmaf(square, fmaf(square, fmaf(square, fmaf(square, -0.00627639f, 0.02111621f), -0.05387514f), 0.13332924f), -0.3333333f);
  float large = 1.f - __fdividef(2.f, ex2(x * (2.f * kLog2E)) + 1.f);
  return fabsf(x) < 0.6f ? fmaf(x * square, small, x) : large;
}
