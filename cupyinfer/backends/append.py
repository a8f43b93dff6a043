# SPDX-License-Identifier: Apache-2.0
"""Writing into paged caches and reading page tables, in NumPy and as kernel launches with their parameter records."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyinfer.backends.helper_kernel import INDEX_ARRAY, index_fields, launch_helper
from cupyinfer.interop import ArrayView, numpy_array

Ints = npt.NDArray[np.int64]

_SIDE_INTS = ("rows_stride_token", "rows_stride_head", "cache_stride_page", "cache_stride_slot", "cache_stride_head", "row_bytes")
_APPEND_SIDE = np.dtype([("rows", np.uint64), ("cache", np.uint64)] + [(name, np.int64) for name in _SIDE_INTS], align=True)

#: NumPy record with the layout of ``struct AppendParams``.
APPEND_PARAMS = np.dtype(
    [("key", _APPEND_SIDE), ("value", _APPEND_SIDE)]
    + [(name, INDEX_ARRAY) for name in ("batch_indices", "positions", "kv_indices", "kv_indptr")]
    + [("num_tokens", np.int64), ("num_pages", np.int64)]
    + [(name, np.int32) for name in ("num_kv_heads", "page_size", "access_bytes", "unused")],
    align=True,
)
#: NumPy record with the layout of ``struct BatchIndicesPositionsParams``.
BATCH_INDICES_POSITIONS_PARAMS = np.dtype([(name, INDEX_ARRAY) for name in ("append_indptr", "seq_lens", "batch_indices", "positions")])
#: NumPy record with the layout of ``struct SeqLensParams``.
SEQ_LENS_PARAMS = np.dtype([(name, INDEX_ARRAY) for name in ("kv_indptr", "kv_last_page_len", "seq_lens")] + [("page_size", np.int64)])

# kVectorsPerWarp of the append kernel.
_VECTORS_PER_WARP = 128


def append_cuda(
    rows: Sequence[ArrayView], caches: Sequence[ArrayView], indices: Sequence[ArrayView], itemsize: int, device_index: int
) -> None:
    """Launch the append kernel.

    Args:
        rows: keys and values, [num_tokens, num_kv_heads, head_dim].
        caches: K and V cache as [num_pages, page_size, num_kv_heads, head_dim], whatever their strides.
        indices: `batch_indices`, `positions`, `kv_indices`, `kv_indptr` on the GPU.
        itemsize: bytes per element.
        device_index: the current device.
    """
    num_tokens, num_kv_heads, _ = rows[0].shape
    num_pages, page_size = caches[0].shape[:2]
    sides = [_append_side(new, cache, itemsize) for new, cache in zip(rows, caches, strict=True)]
    access_bytes = gcd(16, *(field for side in sides for field in side))
    params = np.zeros(1, APPEND_PARAMS)
    params[0] = (*sides, *map(index_fields, indices), num_tokens, num_pages, num_kv_heads, page_size, access_bytes, 0)
    num_vectors = num_kv_heads * sum(side[-1] for side in sides) // access_bytes
    launch_helper("append_paged_kv_cache", params, num_tokens * -(-num_vectors // _VECTORS_PER_WARP), device_index)


def _append_side(new: ArrayView, cache: ArrayView, itemsize: int) -> tuple[int, ...]:
    """The fields of ``struct AppendSide``; all of them count bytes, so their common divisor is the widest access."""
    strides = (step * itemsize for step in (*new.strides[:2], *cache.strides[:3]))
    return (new.ptr, cache.ptr, *strides, new.shape[2] * itemsize)


def append_host(rows: Sequence[ArrayView], caches: Sequence[ArrayView], indices: Sequence[Ints]) -> None:
    """What the append kernel does, in NumPy; arguments as for `append_cuda`, with checked indices as int64."""
    batch_indices, positions, kv_indices, kv_indptr = indices
    tokens = np.nonzero(batch_indices >= 0)[0]
    page_size = caches[0].shape[1]
    pages = kv_indices[kv_indptr[batch_indices[tokens]] + positions[tokens] // page_size]
    for new, cache in zip(rows, caches, strict=True):
        # Bits are copied, never converted: a float8 cache may be given as bytes.
        _bits(cache)[pages, positions[tokens] % page_size] = _bits(new)[tokens]


def _bits(view: ArrayView) -> npt.NDArray[Any]:
    array = numpy_array(view)
    return array.view(f"u{array.dtype.itemsize}")


def batch_indices_positions_cuda(append_indptr: ArrayView, seq_lens: ArrayView, outputs: Sequence[ArrayView], device_index: int) -> None:
    """Launch the kernel that writes `outputs`, the request and the position of every token."""
    params = np.zeros(1, BATCH_INDICES_POSITIONS_PARAMS)
    params[0] = tuple(map(index_fields, (append_indptr, seq_lens, *outputs)))
    launch_helper("batch_indices_positions", params, -(-outputs[0].shape[0] // 32), device_index)


def batch_indices_positions_host(append_indptr: Ints, seq_lens: Ints, num_tokens: int) -> tuple[Ints, Ints]:
    """Request and position of every token; -1 and 0 for the padding after the last request's tokens."""
    tokens = np.arange(num_tokens)
    batch_indices = np.searchsorted(append_indptr[1:], tokens, side="right")
    is_padding = batch_indices == len(seq_lens)
    positions = tokens + np.append(seq_lens - append_indptr[1:], 0)[batch_indices]
    return np.where(is_padding, -1, batch_indices), np.where(is_padding, 0, positions)


def seq_lens_cuda(kv_indptr: ArrayView, kv_last_page_len: ArrayView, output: ArrayView, page_size: int, device_index: int) -> None:
    """Launch the kernel that writes `output`, the number of cached tokens of every request."""
    params = np.zeros(1, SEQ_LENS_PARAMS)
    params[0] = (*map(index_fields, (kv_indptr, kv_last_page_len, output)), page_size)
    launch_helper("seq_lens", params, -(-output.shape[0] // 32), device_index)
