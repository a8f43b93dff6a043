// SPDX-License-Identifier: Apache-2.0
// The one argument of every attention kernel; cupyinfer/backends/params.py mirrors it field by field.
#pragma once

// A kernel with a user variant begins with a generated `struct UserParams`, whose members are the variant's parameters and hooks,
// and with these flags; see cupyinfer/jit/user_variant.py.
#ifndef CUPYINFER_USER_VARIANT
constexpr bool kUserQuery = false, kUserLogit = false, kUserMask = false, kUserOutput = false;
#endif

struct AttentionParams {
  // Arrays. Strides are in elements; the head dimension is contiguous.
  const void* q;    // [num_tokens, num_qo_heads, head_dim_qk]
  const void* k;    // paged: [num_pages, page_size, num_kv_heads, head_dim_qk] by strides; ragged: [num_keys, ...]
  const void* v;
  void* o;          // [num_tokens, num_qo_heads, head_dim_vo]
  float* lse;       // [num_tokens, num_qo_heads] contiguous, base 2, or null
  // The plan: records as docs/ARCHITECTURE.md lists them.
  const int* tiles;
  const int* cta_work;
  int* merge_groups;
  const int* page_indices;
  float* partial_o;
  float* partial_lse;
  // Optional per-head values, null when absent.
  const float* alibi_slopes;  // [num_qo_heads]
  const float* sinks;         // [num_qo_heads], natural-log logits
  const float* q_scale;       // [num_qo_heads], of fp8 queries only
  const float* k_scale;       // [num_kv_heads]
  const float* v_scale;       // [num_kv_heads]
  const unsigned char* mask;  // packed custom mask, little-endian bits
  long long q_stride_token, q_stride_head;
  long long k_stride_page, k_stride_token, k_stride_head;
  long long v_stride_page, v_stride_token, v_stride_head;
  long long o_stride_token, o_stride_head;
  unsigned long long by_group_size, by_num_kv_heads, by_page_size;  // divisors as divide() takes them
  int num_qo_heads, num_kv_heads, group_size, page_size;
  int causal, window_left;    // window_left < 0: no window
  float sm_scale;             // includes per-tensor q_scale and k_scale
  float logits_soft_cap;      // used only by variants with a soft cap
  float v_scale_tensor;       // per-tensor v_scale, 1 when absent
  float rope_rcp_scale;       // 1 / rope_scale
  float rope_log2_theta;      // log2(rope_theta)
  int max_tiles;              // tile records that exist, used or not
  int unit_step;              // from one unit of a CTA's share to the next
  int num_entries, entries_per_tile;  // of the page table: all, and a guess at how many a tile has
#ifdef CUPYINFER_USER_VARIANT
  alignas(8) UserParams user;
#endif
};

// Division by a number the host knows, in three instructions. With l = ceil(log2(divisor)) the low half of `by` is ceil(2^(31+l) / divisor),
// below 2^32, and the high half l. Exact for all dividends and divisors below 2^31, since rounding adds less than dividend * divisor.
__device__ __forceinline__ int divide(int dividend, unsigned long long by) {
  return __umulhi(static_cast<unsigned>(dividend) << 1, static_cast<unsigned>(by)) >> static_cast<unsigned>(by >> 32);
}
