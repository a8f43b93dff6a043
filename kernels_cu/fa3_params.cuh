// SPDX-License-Identifier: Apache-2.0
// The argument of the fa3 kernels: what every attention kernel gets, and K and V as the copy engine sees them.
#pragma once

#include "params.cuh"
#include "ptx/tma.cuh"

struct Fa3Params {
  AttentionParams base;
  // Maps have dimensions (head dimension, slot, KV head, page); a box is 64 elements of `box_rows` slots. Ragged: one page of all keys.
  int box_rows;
  int num_pages;  // the first page that does not exist: boxes there become zeros
  TensorMap k, v;
};
static_assert(sizeof(AttentionParams) == 288 && sizeof(Fa3Params) == 576, "FA3_PARAMS in cupyinfer/backends/params.py says otherwise");
