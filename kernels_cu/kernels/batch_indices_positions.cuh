// SPDX-License-Identifier: Apache-2.0
// For every token of a ragged append: its request and its position there; cupyinfer/backends/append.py mirrors the parameters.
#pragma once

#include "helper/index_array.cuh"

struct BatchIndicesPositionsParams {
  IndexArray append_indptr;  // [batch_size + 1]
  IndexArray seq_lens;       // [batch_size]
  IndexArray batch_indices;  // [num_tokens], written
  IndexArray positions;      // [num_tokens], written
};

extern "C" __global__ void __launch_bounds__(256) batch_indices_positions(const __grid_constant__ BatchIndicesPositionsParams params) {
  long long batch_size = params.seq_lens.length;
  long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long token = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; token < params.batch_indices.length; token += stride) {
    // Number of requests that end at or before the token: the first of append_indptr[1:] above it. Empty requests are passed over.
    long long low = 0, high = batch_size;
    while (low < high) {
      long long middle = (low + high) / 2;
      if (load_index(params.append_indptr, middle + 1) > token) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    // Tokens before the first request or past the last one are padding, which append_paged_kv_cache leaves out.
    bool padding = low == batch_size || load_index(params.append_indptr, low) > token;
    store_index(params.batch_indices, token, padding ? -1 : low);
    store_index(params.positions, token, padding ? 0 : load_index(params.seq_lens, low) - load_index(params.append_indptr, low + 1) + token);
  }
}
