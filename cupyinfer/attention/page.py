# SPDX-License-Identifier: Apache-2.0
"""Filling paged KV caches: append new keys and values, and the index arrays that say where they go."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cupyinfer.attention.call_errors import checked_call
from cupyinfer.attention.operands import check_dimensions, check_rows, check_shape, common_device, index_device, index_view
from cupyinfer.attention.options import check_kv_layout
from cupyinfer.attention.run_arrays import cache_views
from cupyinfer.backends import append
from cupyinfer.backends.helper_kernel import on_device
from cupyinfer.dtypes import FP8_TYPES, HALF_TYPES
from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.interop import (
    ArrayView,
    Device,
    as_view,
    empty_output,
    hand_back,
    memory_is_shared,
    numpy_array,
    overlaps_itself,
    release_after_work,
    require_writable,
    use_device,
)
from cupyinfer.schedule.geometry import Ints, check_int, host_integers, paged_kv_lengths

# Integers stand for the bits of a type the array library does not have. Grouped by bytes per element.
_ELEMENT_TYPES = {1: (*FP8_TYPES, "uint8", "int8"), 2: (*HALF_TYPES, "uint16", "int16")}


@checked_call
def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    """Copy new keys and values into the slots of a paged cache, in place.

    Token ``t`` goes to position ``positions[t]`` of request ``b = batch_indices[t]``: to slot ``positions[t] % page_size`` of page
    ``kv_indices[kv_indptr[b] + positions[t] // page_size]``. The page table already counts the new tokens. A token whose batch index
    is negative is padding and is left out, so a CUDA graph can be captured for more tokens than a step has.

    On NumPy arrays the copy is done at once; on a GPU it is put on CuPy's current stream of the cache's device. Any stride is
    honoured except in the head dimension, which is contiguous. Elements are copied bit by bit: 16-bit floats, fp8, or integers
    of the same size that stand for their bits.

    Index arrays are int32 or int64. For a cache on a GPU each may lie there or on the host; a host array is copied into CuPy's memory
    pool first, which a stream under capture cannot do. When all five lie on the host they are checked. Otherwise a token that points
    outside of the page table, or to a page outside of the cache, is left out without an error.

    Args:
        append_key: [num_tokens, num_kv_heads, head_dim_qk].
        append_value: [num_tokens, num_kv_heads, head_dim_vo].
        batch_indices: [num_tokens], request of each token; `get_batch_indices_positions` computes it.
        positions: [num_tokens], position of each token in its request, from 0.
        paged_kv_cache: (k_cache, v_cache), each [num_pages, page_size, num_kv_heads, head_dim] for NHD or
            [num_pages, num_kv_heads, page_size, head_dim] for HND; or one array of both, [num_pages, 2, ...].
        kv_indices: [kv_indptr[-1]] page ids; further entries are not used.
        kv_indptr: [batch_size + 1] first entry of each request in `kv_indices`.
        kv_last_page_len: [batch_size] tokens in each request's last page, in 1..page_size.
        kv_layout: "NHD" or "HND".

    Raises:
        ArgumentTypeError: an array has the wrong element type, or is none.
        ArgumentError: a wrong shape, stride, device, layout or read-only cache; or an index out of range that the host can see.
        StateError: host index arrays while the stream is being captured.
    """
    caches = _writable_caches(paged_kv_cache, kv_layout)
    rows = (as_view(append_key, "append_key"), as_view(append_value, "append_value"))
    itemsize = _check_elements(rows, caches)
    names = ("paged_kv_cache", "the V part of paged_kv_cache", "append_key", "append_value")
    device = common_device(dict(zip(names, (*caches, *rows), strict=True)))
    num_tokens = rows[0].shape[0]
    indices = {
        "batch_indices": index_view(batch_indices, "batch_indices", num_tokens, "one per token of append_key"),
        "positions": index_view(positions, "positions", num_tokens, "one per token of append_key"),
        "kv_indices": index_view(kv_indices, "kv_indices"),
        "kv_indptr": index_view(kv_indptr, "kv_indptr"),
    }
    batch_size = indices["kv_indptr"].shape[0] - 1
    if batch_size < 0:
        raise ArgumentError("kv_indptr: is empty, a batch of n requests has n + 1 offsets")
    last_page_len = index_view(kv_last_page_len, "kv_last_page_len", batch_size, "one per request of kv_indptr")
    index_device(device, {**indices, "kv_last_page_len": last_page_len})
    if all(view.device.kind == "cpu" for view in (*indices.values(), last_page_len)):
        host = {name: _host_ints(view, name) for name, view in indices.items()}
        _check_indices(
            **host, last_page_len=_host_ints(last_page_len, "kv_last_page_len"), num_pages=caches[0].shape[0], page_size=caches[0].shape[1]
        )
        if device.kind == "cpu":
            append.append_host(rows, caches, list(host.values()))
            return
    if num_tokens == 0:
        return
    with use_device(device.index):
        on_gpu = [on_device(view, device.index, name) for name, view in indices.items()]
        append.append_cuda(rows, caches, on_gpu, itemsize, device.index)
        release_after_work((*rows, *caches, *on_gpu))


@checked_call
def get_batch_indices_positions(
    append_indptr: Any, seq_lens: Any, nnz: int, batch_indices: Any = None, positions: Any = None
) -> tuple[Any, Any]:
    """For every token of a ragged append: its request, and its position in that request.

    The last appended token of request ``b`` is at position ``seq_lens[b] - 1``. Entries past ``append_indptr[-1]`` are padding,
    with batch index -1 and position 0.

    Args:
        append_indptr: int32 or int64 [batch_size + 1], first token of each request.
        seq_lens: int32 or int64 [batch_size], tokens of each request in the cache after the append; `get_seq_lens` computes it.
        nnz: tokens to describe, at least ``append_indptr[-1]``.
        batch_indices: int32 or int64 [nnz] to write to; None allocates int32.
        positions: the same for positions.

    Returns:
        ``(batch_indices, positions)``, on the GPU if an input lies there, in the array type that came in.

    Raises:
        ArgumentTypeError: an array has the wrong element type, or is none.
        ArgumentError: lengths that do not fit, arrays of different devices, or, with arrays on the host, offsets that decrease,
            more tokens than `nnz`, or a request shorter than its append.
    """
    nnz = check_int(nnz, "nnz", 0)
    indptr = index_view(append_indptr, "append_indptr")
    if indptr.shape[0] == 0:
        raise ArgumentError("append_indptr: is empty, a batch of n requests has n + 1 offsets")
    lengths = index_view(seq_lens, "seq_lens", indptr.shape[0] - 1, "one per request of append_indptr")
    device, like = _device_and_type({"append_indptr": (indptr, append_indptr), "seq_lens": (lengths, seq_lens)})
    given = [
        None if array is None else _output_view(array, name, nnz, device)
        for name, array in (("batch_indices", batch_indices), ("positions", positions))
    ]
    _check_outputs(dict(zip(("batch_indices", "positions"), given, strict=True)), {"append_indptr": indptr, "seq_lens": lengths})
    if device.kind == "cpu":
        results = [empty_output((nnz,), "int32", device) if view is None else numpy_array(view) for view in given]
        offsets, kv_len = _host_ints(indptr, "append_indptr"), _host_ints(lengths, "seq_lens")
        _check_append_lengths(offsets, kv_len, nnz)
        for result, values in zip(results, append.batch_indices_positions_host(offsets, kv_len, nnz), strict=True):
            result[:] = values
    else:
        with use_device(device.index):
            results = [empty_output((nnz,), "int32", device) if view is None else None for view in given]
            outputs = [view or as_view(result, "output") for view, result in zip(given, results, strict=True)]
            inputs = (on_device(indptr, device.index, "append_indptr"), on_device(lengths, device.index, "seq_lens"))
            append.batch_indices_positions_cuda(*inputs, outputs, device.index)
            release_after_work((*inputs, *outputs))
    first, second = (
        hand_back(result, like) if array is None else array for array, result in zip((batch_indices, positions), results, strict=True)
    )
    return first, second


@checked_call
def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Tokens of every request in a paged cache: ``(pages - 1) * page_size + kv_last_page_len``, and 0 without pages.

    Args:
        kv_indptr: int32 or int64 [batch_size + 1], first page-table entry of each request.
        kv_last_page_len: int32 or int64 [batch_size], tokens in each request's last page.
        page_size: tokens per page.

    Returns:
        int32 [batch_size], on the GPU if an input lies there, in the array type that came in.

    Raises:
        ArgumentTypeError: an array has the wrong element type, or is none.
        ArgumentError: lengths that do not fit, arrays of different devices, or, with arrays on the host, an entry out of range.
    """
    page_size = check_int(page_size, "page_size", 1)
    indptr = index_view(kv_indptr, "kv_indptr")
    if indptr.shape[0] == 0:
        raise ArgumentError("kv_indptr: is empty, a batch of n requests has n + 1 offsets")
    batch_size = indptr.shape[0] - 1
    last = index_view(kv_last_page_len, "kv_last_page_len", batch_size, "one per request of kv_indptr")
    device, like = _device_and_type({"kv_indptr": (indptr, kv_indptr), "kv_last_page_len": (last, kv_last_page_len)})
    if device.kind == "cpu":
        result = empty_output((batch_size,), "int32", device)
        names = "kv_indptr", "kv_last_page_len"
        result[:] = paged_kv_lengths(_host_ints(indptr, names[0]), _host_ints(last, names[1]), page_size, names).each
    else:
        with use_device(device.index):
            result = empty_output((batch_size,), "int32", device)
            inputs = (on_device(indptr, device.index, "kv_indptr"), on_device(last, device.index, "kv_last_page_len"))
            append.seq_lens_cuda(*inputs, as_view(result, "output"), page_size, device.index)
            release_after_work(inputs)
    return hand_back(result, like)


def _writable_caches(paged_kv_cache: Any, kv_layout: str) -> tuple[ArrayView, ArrayView]:
    """K and V of a writable paged cache as [num_pages, page_size, num_kv_heads, head_dim], whatever layout and strides they have."""
    order = (0, 1, 2, 3) if check_kv_layout(kv_layout) == "NHD" else (0, 2, 1, 3)
    views = cache_views(paged_kv_cache, kv_layout)
    for view, part in zip(views, "KV", strict=True):
        require_writable(view, "paged_kv_cache")
        if overlaps_itself(view.shape, view.strides):
            raise ArgumentError(f"paged_kv_cache: strides {view.strides} make slots of {part} overlap")
    if not _are_apart(*(view._replace(ptr=0, owner=None) for view in views), views[1].ptr - views[0].ptr):
        raise ArgumentError("paged_kv_cache: K and V share memory; one would be written over the other")
    k, v = (_reordered(view, order) for view in views)
    return k, v


@lru_cache(maxsize=1024)
def _are_apart(k: ArrayView, v: ArrayView, distance: int) -> bool:
    """Whether two caches share no byte, by layout and distance alone, so that the layers of a model are looked at once or twice."""
    begin = 1 << 56  # further from both ends of the address space than any distance
    return not memory_is_shared(k._replace(ptr=begin), v._replace(ptr=begin + distance))


def _reordered(view: ArrayView, order: tuple[int, ...]) -> ArrayView:
    return view._replace(shape=tuple(view.shape[axis] for axis in order), strides=tuple(view.strides[axis] for axis in order))


def _check_elements(rows: tuple[ArrayView, ArrayView], caches: tuple[ArrayView, ArrayView]) -> int:
    """Check element types and shapes of the four arrays; returns bytes per element."""
    k_cache, v_cache = caches
    itemsize = next((size for size, names in _ELEMENT_TYPES.items() if k_cache.dtype in names), 0)
    if not itemsize:
        known = ", ".join((*_ELEMENT_TYPES[2], *_ELEMENT_TYPES[1]))
        raise ArgumentTypeError(f"paged_kv_cache: got {k_cache.dtype}, expected one of {known}")
    if v_cache.dtype != k_cache.dtype:
        raise ArgumentTypeError(f"paged_kv_cache: K is {k_cache.dtype} and V is {v_cache.dtype}, both have one element type")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ArgumentError(f"paged_kv_cache: K and V differ in pages, page size or heads: {k_cache.shape[:3]} and {v_cache.shape[:3]}")
    if k_cache.shape[1] < 1:
        raise ArgumentError("paged_kv_cache: the page size is 0, a page holds at least 1 key")
    for name, new, cache in (("append_key", rows[0], k_cache), ("append_value", rows[1], v_cache)):
        stand_in = new.dtype in _ELEMENT_TYPES[itemsize] and ("int" in new.dtype or "int" in cache.dtype)
        if new.dtype != cache.dtype and not stand_in:
            raise ArgumentTypeError(f"{name}: got {new.dtype}, expected {cache.dtype} like the cache; nothing is converted")
        check_dimensions(new, name, "[num_tokens, num_kv_heads, head_dim]")
        check_shape(new, name, (rows[0].shape[0], *cache.shape[2:]), "[num_tokens, num_kv_heads, head_dim] to fit append_key and the cache")
        for view, argument in ((new, name), (cache, "paged_kv_cache")):
            check_rows(view, argument)
    return itemsize


def _check_indices(
    batch_indices: Ints, positions: Ints, kv_indices: Ints, kv_indptr: Ints, last_page_len: Ints, num_pages: int, page_size: int
) -> None:
    """Raise ArgumentError unless every token that is not padding has its slot in the cache."""
    kv_len = paged_kv_lengths(kv_indptr, last_page_len, page_size, ("kv_indptr", "kv_last_page_len")).each
    used = kv_indices[: kv_indptr[-1]]
    if len(used) < kv_indptr[-1]:
        raise ArgumentError(f"kv_indices: has {len(used)} entries, kv_indptr ends at {kv_indptr[-1]}")
    outside = (used < 0) | (used >= num_pages)
    if outside.any():
        at = int(np.argmax(outside))
        raise ArgumentError(f"kv_indices: entry {at} is page {used[at]}, the cache has {num_pages} pages")
    if batch_indices.max(initial=-1) >= len(kv_len):
        at = int(np.argmax(batch_indices))
        raise ArgumentError(f"batch_indices: token {at} has request {batch_indices[at]}, kv_indptr describes {len(kv_len)}")
    limits = np.append(kv_len, 0)[np.maximum(batch_indices, -1)]
    wrong = (batch_indices >= 0) & ((positions < 0) | (positions >= limits))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ArgumentError(f"positions: token {at} is at {positions[at]}, its request {batch_indices[at]} has {limits[at]} tokens")


def _check_append_lengths(append_indptr: Ints, seq_lens: Ints, nnz: int) -> None:
    lengths = np.diff(append_indptr)
    if append_indptr[0] != 0:
        raise ArgumentError(f"append_indptr: begins with {append_indptr[0]}, offsets begin with 0")
    if lengths.min(initial=0) < 0:
        at = int(np.argmin(lengths))
        raise ArgumentError(f"append_indptr: decreases from {append_indptr[at]} to {append_indptr[at + 1]} at entry {at + 1}")
    if append_indptr[-1] > nnz:
        raise ArgumentError(f"nnz: got {nnz}, append_indptr ends at {append_indptr[-1]}")
    if (seq_lens < lengths).any():
        at = int(np.argmax(seq_lens < lengths))
        raise ArgumentError(f"seq_lens: request {at} has {seq_lens[at]} tokens, of which {lengths[at]} are appended")


def _host_ints(view: ArrayView, argument: str) -> Ints:
    return host_integers(numpy_array(view), argument)


def _device_and_type(inputs: dict[str, tuple[ArrayView, Any]]) -> tuple[Device, Any]:
    """Where index arrays are worked on, the GPU if any of them lies there, and the array whose type results have."""
    device, like = next(((view.device, array) for view, array in inputs.values() if view.device.kind == "cuda"), (None, None))
    if device is None:
        view, array = next(iter(inputs.values()))
        return view.device, array
    index_device(device, {name: view for name, (view, _) in inputs.items()})
    return device, like


def _check_outputs(outputs: dict[str, ArrayView | None], inputs: dict[str, ArrayView]) -> None:
    """Refuse arrays to write to that overlap themselves, each other or what is read."""
    others = dict(inputs)
    for name, view in outputs.items():
        if view is None:
            continue
        if overlaps_itself(view.shape, view.strides):
            raise ArgumentError(f"{name}: stride {view.strides[0]} makes its entries overlap")
        for other, one in others.items():
            if one.device == view.device and memory_is_shared(view, one):
                raise ArgumentError(f"{name}: shares memory with {other}, which would be written over")
        others[name] = view


def _output_view(array: Any, argument: str, nnz: int, device: Device) -> ArrayView:
    view = index_view(array, argument, nnz, "one per token of nnz")
    require_writable(view, argument)
    if view.device != device:
        raise ArgumentError(f"{argument}: lies on {view.device}, expected {device} like append_indptr")
    return view
