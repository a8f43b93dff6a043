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

__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh from one exponential: tanh.approx has 11 bits only, too few for a logit that is scaled by the cap again.
__device__ __forceinline__ float tanh_ex2(float x) {
  float e = ex2(x * (2.f * kLog2E));
  return 1.f - __fdividef(2.f, e + 1.f);
}
