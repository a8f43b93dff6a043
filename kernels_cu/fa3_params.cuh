// SPDX-License-Identifier: Apache-2.0
// The argument of the fa3 kernels: what every attention kernel gets, and the arrays as the copy engine sees them.
#pragma once

#include "params.cuh"
#include "ptx/tma.cuh"

struct Fa3Params {
  AttentionParams base;
  // Maps have dimensions (head dimension, slot, KV head, page); a box is 64 elements of `box_rows` slots. Ragged: one page of all keys.
  int box_rows;
  int num_pages;  // the first page that does not exist: boxes there become zeros
  // Whether q and o are moved by boxes too: maps have dimensions (head dimension, head, token), a box is 64 elements of 32 packed rows.
  int q_boxes, o_boxes;
  TensorMap k, v, q, o;
};
static_assert(sizeof(AttentionParams) == 304 && sizeof(Fa3Params) == 832, "FA3_PARAMS in cupyinfer/backends/params.py says otherwise");
