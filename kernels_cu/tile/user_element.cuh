// SPDX-License-Identifier: Apache-2.0
// 16-bit floating-point elements of a user variant's tensors, read as float.
#pragma once

struct Float16 {
  unsigned short bits;
  __device__ __forceinline__ operator float() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
};

struct Bfloat16 {
  unsigned short bits;
  __device__ __forceinline__ operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
