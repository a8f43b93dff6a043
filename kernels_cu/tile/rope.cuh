// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, rotate-half: dims i and i + head_dim / 2 turn by position * theta^(-2 i / head_dim) / rope_scale.
#pragma once

#include "ptx/convert.cuh"
#include "params.cuh"

constexpr int kRopePairs = kHeadDimQk / 2;

// Turns per position as a float and its rounding error: a float alone is 0.06 radians off a million positions away.
__device__ __forceinline__ void fill_rope_turns(const AttentionParams& params, float2* turns) {
  for (int i = threadIdx.x; i < kRopePairs; i += kNumWarps * 32) {
    double turn = exp2(-2.0 * i / kHeadDimQk * params.rope_log2_theta) * params.rope_rcp_scale * 0.15915494309189535;
    float high = static_cast<float>(turn);
    turns[i] = {high, static_cast<float>(turn - high)};
  }
}

// Cosine and sine of `position` times a frequency, reduced to half a turn before the hardware sees it.
__device__ __forceinline__ float2 rope_cos_sin(float2 turn, float position) {
  float product = turn.x * position;
  float error = fmaf(turn.x, position, -product);
  float angle = ((product - rintf(product)) + fmaf(turn.y, position, error)) * 6.283185307f;
  return {__cosf(angle), __sinf(angle)};
}

__device__ __forceinline__ void rotate(float2 cos_sin, float& low, float& high) {
  float rotated = low * cos_sin.x - high * cos_sin.y;
  high = fmaf(high, cos_sin.x, low * cos_sin.y);
  low = rotated;
}

// Rotate two neighbouring dims of each half, as pairs of `kElement`.
template <Element kElement>
__device__ __forceinline__ void rotate_pair(unsigned& low, unsigned& high, float2 cos_sin_0, float2 cos_sin_1) {
  float low_0, low_1, high_0, high_1;
  unpack_pair<kElement>(low, low_0, low_1);
  unpack_pair<kElement>(high, high_0, high_1);
  rotate(cos_sin_0, low_0, high_0);
  rotate(cos_sin_1, low_1, high_1);
  low = pack_pair<kElement>(low_0, low_1);
  high = pack_pair<kElement>(high_0, high_1);
}
