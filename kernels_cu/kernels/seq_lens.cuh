// SPDX-License-Identifier: Apache-2.0
// Number of cached tokens of every request from its page table; cupyinfer/backends/append.py mirrors the parameters.
#pragma once

#include "helper/index_array.cuh"

struct SeqLensParams {
  IndexArray kv_indptr;         // [batch_size + 1]
  IndexArray kv_last_page_len;  // [batch_size]
  IndexArray seq_lens;          // [batch_size], written
  long long page_size;
};

extern "C" __global__ void __launch_bounds__(256) seq_lens(const __grid_constant__ SeqLensParams params) {
  long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long idx = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; idx < params.seq_lens.length; idx += stride) {
    long long num_pages = load_index(params.kv_indptr, idx + 1) - load_index(params.kv_indptr, idx);
    // A request without pages is empty whatever its last-page length says.
    store_index(params.seq_lens, idx, num_pages > 0 ? (num_pages - 1) * params.page_size + load_index(params.kv_last_page_len, idx) : 0);
  }
}
