// SPDX-License-Identifier: Apache-2.0
// Conversions between float and the 16-bit and 8-bit element types.
#pragma once

// Two floats rounded to a pair of `kElement`, `low` in the low half.
template <Element kElement>
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
  unsigned packed;
  if constexpr (kElement == Element::kBfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <Element kElement>
__device__ __forceinline__ void unpack_pair(unsigned packed, float& low, float& high) {
  if constexpr (kElement == Element::kBfloat16) {
    low = __uint_as_float(packed << 16);
    high = __uint_as_float(packed & 0xffff0000u);
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(packed));
  }
}

// Two fp8 values in the low 16 bits of `packed` to a pair of halves, exactly.
__device__ __forceinline__ unsigned fp8_pair_to_half(unsigned packed) {
  if constexpr (kKvElement == Element::kE5m2) {
    // e5m2 is the upper byte of a half.
    return __byte_perm(packed, 0, 0x1404);
  } else {
#if __CUDA_ARCH__ >= 890
    unsigned pair;
    asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.rn.f16x2.e4m3x2 %0, t;}" : "=r"(pair) : "r"(packed));
    return pair;
#else
    // sign to bit 15, exponent and mantissa to bits 13..7; the exponent bias of half is 8 larger, so scale by 2^8.
    unsigned spread = __byte_perm(packed, 0, 0x1404);
    unsigned bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
    unsigned pair;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(bits), "r"(0x5c005c00u));
    return pair;
#endif
  }
}

// The same of a spread pair: one fp8 value in the upper byte of each half of `spread`, zeros below.
__device__ __forceinline__ unsigned fp8_spread_to_half(unsigned spread) {
  if constexpr (kKvElement == Element::kE5m2) return spread;
  unsigned bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  unsigned pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(bits), "r"(0x5c005c00u));
  return pair;
}

// Four fp8 values to two pairs of halves, exactly: of neighbours (bytes 0 and 1, 2 and 3), or with `kInterleaved` of bytes 0 and 2, 1 and 3.
// Both halves of a register are converted where they lie: cutting them out first would cost an instruction each.
template <bool kInterleaved>
__device__ __forceinline__ void fp8_quad_to_half(unsigned packed, unsigned& first, unsigned& second) {
#if __CUDA_ARCH__ >= 890
  if constexpr (kKvElement == Element::kE4m3) {
    unsigned pairs = kInterleaved ? __byte_perm(packed, 0, 0x3120) : packed;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(first), "=r"(second) : "r"(pairs));
    return;
  }
#endif
  first = fp8_spread_to_half(__byte_perm(packed, 0, kInterleaved ? 0x2404 : 0x1404));
  second = fp8_spread_to_half(__byte_perm(packed, 0, kInterleaved ? 0x3414 : 0x3424));
}

// Four floats rounded to e4m3, the first in the lowest byte; beyond 448 they become 448.
__device__ __forceinline__ unsigned pack_e4m3(float x0, float x1, float x2, float x3) {
  unsigned packed;
  asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}
