# SPDX-License-Identifier: Apache-2.0
"""Tensor maps of caches, queries and outputs for the copy engine, made by the driver and kept per array."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any, NamedTuple

from cupyinfer.dtypes import itemsize
from cupyinfer.errors import BackendUnavailable, UnsupportedError

MAP_BYTES = 128
_MAP_ALIGNMENT = 64

# Values of the driver's enumerations; fp8 travels as bytes. Swizzles by the bytes they span.
_DATA_TYPE = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0}
_SWIZZLE = {64: 2, 128: 3}
_INTERLEAVE_NONE, _PROMOTION_256B, _FILL_ZEROS = 0, 3, 0


class CacheShape(NamedTuple):
    """A K or V cache as (head dimension, slot, KV head, page), with strides in elements; a ragged one is a single page of all keys."""

    head_dim: int
    num_slots: int
    num_heads: int
    num_pages: int
    token_stride: int
    head_stride: int
    page_stride: int


@cache
def _encode_function() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"backend: fa3 needs a CUDA driver with cuTensorMapEncodeTiled (CUDA 12 or newer): {error}") from error
    function.restype = ctypes.c_int
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_int, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer, *[ctypes.c_int] * 4]
    return function


@lru_cache(maxsize=1024)
def cache_map(address: int, shape: CacheShape, box_rows: int, box_bytes: int, dtype: str) -> bytes:
    """The tensor map of a cache, with boxes of `box_bytes` columns by `box_rows` slots of one head and page.

    Args:
        address: of the first element, a multiple of 16.
        shape: sizes and strides.
        box_rows: slots per box, at most 256.
        box_bytes: 64 or 128, the width of a swizzled row.
        dtype: "float16", "bfloat16" or "float8_e4m3fn".

    Raises:
        BackendUnavailable: there is no driver, or an old one.
        UnsupportedError: the driver cannot describe such an array.
    """
    sizes = shape.head_dim, shape.num_slots, shape.num_heads, shape.num_pages
    encoded, status = _encode(address, sizes, shape[4:], (box_bytes // itemsize(dtype), box_rows, 1, 1), dtype)
    if status:
        raise UnsupportedError(f"backend: fa3 cannot copy from a cache of {shape} (driver error {status}); take 'fa2'")
    return encoded


class RowsShape(NamedTuple):
    """Queries or outputs as (head dimension, head, token), with strides in elements."""

    head_dim: int
    num_heads: int
    num_tokens: int
    head_stride: int
    token_stride: int


@lru_cache(maxsize=1024)
def rows_map(address: int, shape: RowsShape, box_heads: int, box_tokens: int, box_bytes: int, dtype: str) -> bytes | None:
    """The tensor map of queries or outputs, with boxes of `box_bytes` columns by `box_heads` heads of `box_tokens` tokens.

    Returns:
        None where the driver cannot describe such an array.

    Raises:
        BackendUnavailable: there is no driver, or an old one.
    """
    encoded, status = _encode(address, shape[:3], shape[3:], (box_bytes // itemsize(dtype), box_heads, box_tokens), dtype)
    return None if status else encoded


def _encode(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], dtype: str) -> tuple[bytes, int]:
    """A tensor map and the driver's status; `strides` in elements are those of all dimensions but the first."""
    # A dimension of one element is never stepped over, but its stride must be one the driver takes.
    element = itemsize(dtype)
    steps = [element * (stride if size > 1 else sizes[0]) for size, stride in zip(sizes[1:], strides, strict=True)]
    rank, box_bytes = len(sizes), box[0] * element
    storage = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    begin = -ctypes.addressof(storage) % _MAP_ALIGNMENT
    status = _encode_function()(
        ctypes.addressof(storage) + begin,
        _DATA_TYPE[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*steps),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE,
        _SWIZZLE[box_bytes],
        _PROMOTION_256B,
        _FILL_ZEROS,
    )
    return storage.raw[begin : begin + MAP_BYTES], int(status)
