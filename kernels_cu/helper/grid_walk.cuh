// SPDX-License-Identifier: Apache-2.0
// Walks (row, column) pairs with the stride of the grid, in 64 bits but without 64-bit division.
#pragma once

struct GridWalk {
  long long row;
  int column;
  int num_columns, row_step, column_step;

  // From the pair with index `first`, `step` pairs at a time; both fit 32 bits because grids of helper kernels are bounded.
  __device__ __forceinline__ GridWalk(unsigned first, unsigned step, unsigned num_columns)
      : row(first / num_columns),
        column(first % num_columns),
        num_columns(num_columns),
        row_step(step / num_columns),
        column_step(step % num_columns) {}

  __device__ __forceinline__ void next() {
    row += row_step;
    column += column_step;
    if (column >= num_columns) column -= num_columns, ++row;
  }
};
