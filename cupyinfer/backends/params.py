# SPDX-License-Identifier: Apache-2.0
"""The arguments of the attention kernels, mirroring kernels_cu/params.cuh and fa3_params.cuh field by field."""

from __future__ import annotations

import numpy as np

_POINTERS = (
    "q", "k", "v", "o", "lse",
    "tiles", "cta_work", "merge_groups", "page_indices", "partial_o", "partial_lse",
    "alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale", "mask",
)  # fmt: skip
_STRIDES = (
    "q_stride_token", "q_stride_head",
    "k_stride_page", "k_stride_token", "k_stride_head",
    "v_stride_page", "v_stride_token", "v_stride_head",
    "o_stride_token", "o_stride_head",
)  # fmt: skip
_DIVISORS = ("by_group_size", "by_num_kv_heads", "by_page_size")
_INTS = ("num_qo_heads", "num_kv_heads", "group_size", "page_size", "causal", "window_left")
_FLOATS = ("sm_scale", "logits_soft_cap", "v_scale_tensor", "rope_rcp_scale", "rope_log2_theta")

#: NumPy record with the layout of ``struct AttentionParams``.
ATTENTION_PARAMS = np.dtype(
    [(name, np.uint64) for name in _POINTERS]
    + [(name, np.int64) for name in _STRIDES]
    + [(name, np.uint64) for name in _DIVISORS]
    + [(name, np.int32) for name in _INTS]
    + [(name, np.float32) for name in _FLOATS]
    + [("max_tiles", np.int32), ("unit_step", np.int32), ("num_entries", np.int32), ("entries_per_tile", np.int32)],
    align=True,
)

#: NumPy record with the layout of ``struct Fa3Params``; the driver's tensor maps lie at multiples of 64 bytes.
FA3_PARAMS = np.dtype(
    {
        "names": ["base", "box_rows", "num_pages", "q_boxes", "o_boxes", "k", "v", "q", "o"],
        "formats": [ATTENTION_PARAMS, np.int32, np.int32, np.int32, np.int32, "V128", "V128", "V128", "V128"],
        "offsets": [0, 304, 308, 312, 316, 320, 448, 576, 704],
        "itemsize": 832,
    }
)


def divisor(number: int) -> int:
    """A divisor below 2^31 as `divide` of params.cuh takes it: ``ceil(2^(31 + l) / number)``, above it ``l = ceil(log2(number))``."""
    shift = (number - 1).bit_length()
    return shift << 32 | -(-(1 << (31 + shift)) // number)
