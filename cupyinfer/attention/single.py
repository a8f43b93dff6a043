# SPDX-License-Identifier: Apache-2.0
"""Attention of one request, without a plan: sized, planned and run in one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cupyinfer.attention.call_errors import checked_call, options_of
from cupyinfer.attention.decode import decode_request
from cupyinfer.attention.options import check_kv_layout
from cupyinfer.attention.plan import plan_attention
from cupyinfer.attention.prefill import ragged_prefill_request
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.attention.workspaces import Workspaces
from cupyinfer.backends.device import read_profile
from cupyinfer.dtypes import FP8_QUERY_TYPE, FP8_TYPES, HALF_TYPES, canonical_dtype
from cupyinfer.errors import ArgumentError, ArgumentTypeError, CupyInferError
from cupyinfer.interop import ArrayView, Device, as_view, empty_output, use_device
from cupyinfer.schedule.geometry import check_flag
from cupyinfer.schedule.profile import HOST_PROFILE, DeviceProfile

#: Arguments of the request functions that a call supplies.
_SET_BY_CALL = ("kv_layout", "q_data_type", "head_dim_vo", "data_type", "o_data_type", "copy_pages")
#: The array that what the request functions call so comes from.
_COMES_FROM = {
    "num_qo_heads": "q",
    "num_qo_heads, num_kv_heads": "q, k",
    "head_dim": "q",
    "q_data_type": "q",
    "qo_indptr": "q",
    "num_kv_heads": "k",
    "page_size": "k",
    "indptr": "k",
    "kv_indptr": "k",
    "head_dim_vo": "v",
}


@contextmanager
def _in_own_words(set_by_call: Iterable[str], options: Mapping[str, Any], function: str) -> Iterator[None]:
    """Let errors of a request name the arrays that its arguments were read from, which the caller did not pass by those names."""
    if clash := [name for name in set_by_call if name in options]:
        raise ArgumentTypeError(f"{clash[0]}: {function} takes no such argument, or took it already")
    try:
        yield
    except CupyInferError as error:
        name, _, rest = str(error).partition(":")
        if name not in _COMES_FROM:
            raise
        raise type(error)(f"{_COMES_FROM[name]}: {name}{rest}") from None


def _check_types(q: ArrayView, k: ArrayView, v: ArrayView, q_data_type: Any, kv_data_type: Any, q_types: Sequence[str]) -> tuple[str, str]:
    """Element types of the queries, of `q_types`, and of keys and values: the arrays' own, unless the caller says what bytes stand for."""
    if q_data_type is None and q.dtype not in q_types:
        raise ArgumentTypeError(f"q: got {q.dtype}, expected one of {', '.join(q_types)}")
    q_type = q.dtype if q_data_type is None else canonical_dtype(q_data_type, "q_data_type", tuple(q_types))
    known = (*HALF_TYPES, *FP8_TYPES)
    if kv_data_type is None:
        if k.dtype not in known:
            raise ArgumentTypeError(f"k: got {k.dtype}, expected one of {', '.join(known)}; fp8 as bytes needs kv_data_type")
        if k.dtype != q_type and (k.dtype in HALF_TYPES or q_type == FP8_QUERY_TYPE):
            kind = "16-bit keys" if k.dtype in HALF_TYPES else "their keys"
            raise ArgumentTypeError(f"k: got {k.dtype} for {q_type} queries; {kind} have the queries' type")
    if kv_data_type is None and v.dtype != k.dtype:
        raise ArgumentTypeError(f"v: got {v.dtype}, k is {k.dtype}; both have one element type")
    return q_type, k.dtype if kv_data_type is None else canonical_dtype(kv_data_type, "kv_data_type", known)


@checked_call
@options_of(decode_request, supplied=_SET_BY_CALL)
def single_decode_with_kv_cache(
    q: Any, k: Any, v: Any, kv_layout: str = "NHD", *, return_lse: bool = False, q_scale: float | None = None,
    k_scale: Any = None, v_scale: Any = None, kv_data_type: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Attention of one query token.

    Workspaces come from CuPy's memory pool (NumPy: the heap) for the time of the call.

    Args:
        q: [num_qo_heads, head_dim].
        k: [kv_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads, kv_len, head_dim] (HND).
        v: the same with head_dim_vo.
        kv_layout: "NHD" or "HND".
        return_lse: also return the base-2 log-sum-exp.
        q_scale, k_scale, v_scale: factors, as for `BatchDecodeWithPagedKVCacheWrapper.run`.
        kv_data_type: the cache's element type when k and v are fp8 bytes in uint8 arrays; by default that of k.
        options: pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, alibi_slopes, sinks, as for
            `BatchDecodeWithPagedKVCacheWrapper.plan`.

    Returns:
        [num_qo_heads, head_dim_vo] as the array type of `q`; with return_lse a pair of it and float32 [num_qo_heads].

    Raises:
        ArgumentError, ArgumentTypeError: an argument that does not fit, by name.
    """
    query = as_view(q, "q")
    if len(query.shape) != 2:
        raise ArgumentError(f"q: got shape {query.shape}, expected (num_qo_heads, head_dim)")
    keys, values = _ragged(k, v)
    heads_first = check_kv_layout(kv_layout) == "HND"
    kv_len, num_kv_heads = keys.shape[:2][::-1] if heads_first else keys.shape[:2]
    # All keys are one page: a single row of the page table, read through a four-dimensional view.
    pages = tuple(view._replace(shape=(1, *view.shape), strides=(0, *view.strides)) for view in (keys, values))
    q_type, kv_type = _check_types(query, keys, values, None, kv_data_type, HALF_TYPES)
    with _in_own_words(_SET_BY_CALL, options, "single_decode_with_kv_cache"):
        request = decode_request(
            [0, min(kv_len, 1)],
            [0] * min(kv_len, 1),
            [kv_len],
            query.shape[0],
            num_kv_heads,
            query.shape[1],
            max(kv_len, 1),
            kv_layout=kv_layout,
            q_data_type=q_type,
            kv_data_type=kv_type,
            head_dim_vo=values.shape[2],
            **options,
        )
    request.kv_names = "k", "v"
    if not kv_len:
        # A page without keys: the cache is never read, so any shape that fits the plan will do.
        pages = tuple(_one_key(view, heads_first) for view in pages)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return _run_once(request, q, query, pages[0], pages[1], return_lse, scales)


def _one_key(view: ArrayView, heads_first: bool) -> ArrayView:
    """A page of one key that is never read: an empty array may have any strides."""
    num_heads, head_dim = view.shape[1 if heads_first else 2], view.shape[3]
    shape = (1, num_heads, 1, head_dim) if heads_first else (1, 1, num_heads, head_dim)
    return view._replace(shape=shape, strides=(0, head_dim, head_dim, 1))


@checked_call
@options_of(ragged_prefill_request, supplied=_SET_BY_CALL)
def single_prefill_with_kv_cache(
    q: Any, k: Any, v: Any, kv_layout: str = "NHD", *, return_lse: bool = False, q_scale: Any = None, k_scale: Any = None,
    v_scale: Any = None, q_data_type: Any = None, kv_data_type: Any = None, o_data_type: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Attention of the query tokens of one request.

    Workspaces come from CuPy's memory pool (NumPy: the heap) for the time of the call.

    Args:
        q: [qo_len, num_qo_heads, head_dim_qk].
        k: [kv_len, num_kv_heads, head_dim_qk] (NHD) or [num_kv_heads, kv_len, head_dim_qk] (HND).
        v: the same with head_dim_vo.
        kv_layout, return_lse, k_scale, v_scale, kv_data_type: as for `single_decode_with_kv_cache`.
        q_scale: as for `BatchPrefillWithRaggedKVCacheWrapper.run`.
        q_data_type: the queries' element type when q is fp8 bytes in a uint8 array; by default that of q.
        o_data_type: the output's element type, which fp8 queries need; for others that of q.
        options: causal, custom_mask ([qo_len, kv_len] or flattened), packed_custom_mask, window_left and the rest, as for
            `BatchPrefillWithRaggedKVCacheWrapper.plan`.

    Returns:
        [qo_len, num_qo_heads, head_dim_vo] as the array type of `q`; with return_lse a pair of it and float32 [qo_len, num_qo_heads].

    Raises:
        ArgumentError, ArgumentTypeError: an argument that does not fit, by name.
    """
    query = as_view(q, "q")
    if len(query.shape) != 3:
        raise ArgumentError(f"q: got shape {query.shape}, expected (qo_len, num_qo_heads, head_dim)")
    keys, values = _ragged(k, v)
    kv_len, num_kv_heads = keys.shape[:2][::-1] if check_kv_layout(kv_layout) == "HND" else keys.shape[:2]
    mask = options.pop("custom_mask", None)
    if mask is not None and getattr(mask, "ndim", 1) == 2:
        if tuple(mask.shape) != (query.shape[0], kv_len):
            raise ArgumentError(f"custom_mask: got shape {tuple(mask.shape)}, expected ({query.shape[0]}, {kv_len})")
        mask = mask.reshape(-1)
    q_type, kv_type = _check_types(query, keys, values, q_data_type, kv_data_type, (*HALF_TYPES, FP8_QUERY_TYPE))
    with _in_own_words(_SET_BY_CALL, options, "single_prefill_with_kv_cache"):
        request = ragged_prefill_request(
            [0, query.shape[0]],
            [0, kv_len],
            query.shape[1],
            num_kv_heads,
            query.shape[2],
            kv_layout=kv_layout,
            q_data_type=q_type,
            kv_data_type=kv_type,
            o_data_type=o_data_type,
            head_dim_vo=values.shape[2],
            custom_mask=mask,
            **options,
        )
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return _run_once(request, q, query, keys, values, return_lse, scales)


def _ragged(k: Any, v: Any) -> tuple[ArrayView, ArrayView]:
    views = as_view(k, "k"), as_view(v, "v")
    for view, name in zip(views, ("k", "v"), strict=True):
        if len(view.shape) != 3:
            raise ArgumentError(f"{name}: got shape {view.shape}, expected three dimensions")
    if views[0].shape[:2] != views[1].shape[:2]:
        raise ArgumentError(f"v: got shape {views[1].shape}, k has {views[0].shape}; they may differ in the last dimension only")
    return views


def _run_once(
    request: AttentionRequest, q: Any, query: ArrayView, k: ArrayView, v: ArrayView, return_lse: Any, scales: dict[str, Any]
) -> Any:
    return_lse = check_flag(return_lse, "return_lse")
    device = query.device
    if device.kind == "cpu":
        return _planned_and_run(request, q, query, k, v, return_lse, scales, HOST_PROFILE, device)
    with use_device(device.index):
        return _planned_and_run(request, q, query, k, v, return_lse, scales, read_profile(device.index), device)


def _planned_and_run(
    request: AttentionRequest,
    q: Any,
    query: ArrayView,
    k: ArrayView,
    v: ArrayView,
    return_lse: bool,
    scales: dict[str, Any],
    profile: DeviceProfile,
    device: Device,
) -> Any:
    size = request.draft(profile).size
    buffers = [empty_output((num_bytes,), "uint8", device) for num_bytes in size]
    plan = plan_attention(request, Workspaces(*buffers), profile)
    if not request.options.decode:
        return plan.run(q, k, v, return_lse=return_lse, **scales)
    # One token in, one token out: the token dimension exists only on the way.
    one_token = query._replace(shape=(1, *query.shape), strides=(0, *query.strides))
    out = empty_output((query.shape[0], request.options.head_dim_vo), request.options.o_dtype, device)
    lse = empty_output((query.shape[0],), "float32", device) if return_lse else None
    return plan.run_single(q, one_token, k, v, out, lse, scales)
