# SPDX-License-Identifier: Apache-2.0
"""Merging attention over disjoint sets of keys, such as a shared prefix and each request's own suffix.

A state is the pair (v, s) of a normalised attention output and its log-sum-exp in base 2, as `return_lse=True` gives it.
The state of no keys is (0, -inf). States are merged as ``v = sum_i 2^(s_i - s) v_i`` with ``s = log2(sum_i 2^s_i)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyinfer.attention.call_errors import checked_call
from cupyinfer.attention.operands import check_dimensions, check_rows, check_shape, common_device, index_device, index_view, typed_view
from cupyinfer.backends.helper_kernel import on_device
from cupyinfer.backends.merge import VALUE_TYPES, MergeProblem, merge_cuda, merge_host
from cupyinfer.errors import ArgumentError
from cupyinfer.interop import (
    ArrayView,
    Device,
    as_view,
    empty_output,
    hand_back,
    numpy_array,
    overlaps_itself,
    release_after_work,
    require_writable,
    use_device,
)


@checked_call
def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """Merge two states of every row.

    Args:
        v_a: float16, bfloat16 or float32 [num_rows, num_heads, head_dim].
        s_a: float32 [num_rows, num_heads], base 2.
        v_b: as `v_a`.
        s_b: as `s_a`.

    Returns:
        ``(v, s)`` with the shapes and types of `v_a` and `s_a`, in the array type of `v_a`. Merging two empty states gives (0, -inf).

    Raises:
        ArgumentTypeError: an array has the wrong element type, or is none.
        ArgumentError: a wrong shape, stride or device.
    """
    first = _row_state(v_a, s_a, "v_a", "s_a")
    second = _row_state(v_b, s_b, "v_b", "s_b", like=first)
    device = common_device({"v_a": first[0], "s_a": first[1], "v_b": second[0], "s_b": second[1]})
    return _merge_to_new(MergeProblem(*first, *first, *second), first[0].shape, device, v_a)


@checked_call
def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    """Merge another state into (v, s) of every row, in place.

    Args:
        v: float16, bfloat16 or float32 [num_rows, num_heads, head_dim], overwritten.
        s: float32 [num_rows, num_heads], base 2, overwritten.
        v_other: as `v`.
        s_other: as `s`.
        mask: bool or uint8 [num_rows]; rows where it is 0 keep their state. Its values may change between replays of a CUDA graph.

    Raises:
        ArgumentTypeError: an array has the wrong element type, or is none.
        ArgumentError: a wrong shape, stride or device, or `v` or `s` is read-only.
    """
    own = _row_state(v, s, "v", "s")
    other = _row_state(v_other, s_other, "v_other", "s_other", like=own)
    for view, name in ((own[0], "v"), (own[1], "s")):
        require_writable(view, name)
        if overlaps_itself(view.shape, view.strides):
            raise ArgumentError(f"{name}: strides {view.strides} make its rows overlap for shape {view.shape}")
    views = {"v": own[0], "s": own[1], "v_other": other[0], "s_other": other[1]}
    mask_view = None
    if mask is not None:
        mask_view = views["mask"] = typed_view(mask, "mask", ("bool", "uint8"))
        check_shape(mask_view, "mask", own[0].shape[:1], "[num_rows]")
    _merge(MergeProblem(*own, *own, *other, mask=mask_view), common_device(views))


@checked_call
def merge_states(v: Any, s: Any, indptr: Any = None) -> tuple[Any, Any]:
    """Merge any number of states of every row.

    Args:
        v: float16, bfloat16 or float32 [num_rows, num_states, num_heads, head_dim]; with `indptr` the states of all rows one after
            another, [num_states, num_heads, head_dim].
        s: float32 [num_rows, num_states, num_heads], base 2; with `indptr` [num_states, num_heads].
        indptr: int32 or int64 [num_rows + 1] on the device of `v` or on the host: row ``r`` has the states ``indptr[r]`` to
            ``indptr[r + 1] - 1``, any number of them. A host array is checked, and copied into CuPy's memory pool when `v` is on a GPU.

    Returns:
        ``(v, s)`` as [num_rows, num_heads, head_dim] and [num_rows, num_heads], in the array type of `v`. A row without states is
        (0, -inf).

    Raises:
        ArgumentTypeError: an array has the wrong element type, or is none.
        ArgumentError: a wrong shape, stride or device, or offsets on the host that decrease or do not end at the number of states.
        StateError: a host `indptr` while the stream is being captured.
    """
    axes = "[num_rows, num_states, num_heads, head_dim]" if indptr is None else "[num_states, num_heads, head_dim] with indptr"
    values = typed_view(v, "v", VALUE_TYPES)
    check_dimensions(values, "v", axes)
    lse = _lse_of(s, "s", values)
    device = common_device({"v": values, "s": lse})
    problem = MergeProblem(values, lse, values, lse)
    num_rows = values.shape[0]
    if indptr is not None:
        offsets = index_view(indptr, "indptr")
        index_device(device, {"indptr": offsets})
        num_rows = offsets.shape[0] - 1
        if offsets.device.kind == "cpu":
            _check_offsets(offsets, values.shape[0])
        elif num_rows < 0:
            raise ArgumentError("indptr: is empty, n rows have n + 1 offsets")
        problem = problem._replace(indptr=offsets)
    return _merge_to_new(problem, (num_rows, *values.shape[-2:]), device, v)


def _row_state(v: Any, s: Any, v_name: str, s_name: str, like: tuple[ArrayView, ArrayView] | None = None) -> tuple[ArrayView, ArrayView]:
    """View a state with one entry per row; `like` is the state it must fit."""
    values = typed_view(v, v_name, VALUE_TYPES if like is None else (like[0].dtype,))
    check_dimensions(values, v_name, "[num_rows, num_heads, head_dim]")
    if like is not None:
        check_shape(values, v_name, like[0].shape, "[num_rows, num_heads, head_dim] like the other state")
    return values, _lse_of(s, s_name, values)


def _lse_of(s: Any, argument: str, values: ArrayView) -> ArrayView:
    check_rows(values, "v" + argument[1:])
    lse = typed_view(s, argument, ("float32",))
    check_shape(lse, argument, values.shape[:-1], "the shape of the values without head_dim")
    return lse


def _check_offsets(offsets: ArrayView, num_states: int) -> None:
    indptr = numpy_array(offsets)
    if not indptr.size:
        raise ArgumentError("indptr: is empty, n rows have n + 1 offsets")
    if indptr[0] != 0 or indptr[-1] != num_states:
        raise ArgumentError(f"indptr: goes from {indptr[0]} to {indptr[-1]}, expected 0 to the number of states, {num_states}")
    lengths = np.diff(indptr)
    if lengths.min(initial=0) < 0:
        at = int(np.argmin(lengths))
        raise ArgumentError(f"indptr: decreases from {indptr[at]} to {indptr[at + 1]} at entry {at + 1}")


def _merge_to_new(problem: MergeProblem, shape: tuple[int, ...], device: Device, like: Any) -> tuple[Any, Any]:
    """Merge into new arrays of the type of `like`."""
    if device.kind == "cpu":
        v_out, s_out = empty_output(shape, problem.v.dtype, device), empty_output(shape[:-1], "float32", device)
        _merge(problem._replace(v_out=as_view(v_out, "output"), s_out=as_view(s_out, "output")), device)
    else:
        with use_device(device.index):
            v_out, s_out = empty_output(shape, problem.v.dtype, device), empty_output(shape[:-1], "float32", device)
            _merge(problem._replace(v_out=as_view(v_out, "output"), s_out=as_view(s_out, "output")), device)
    return hand_back(v_out, like), hand_back(s_out, like)


def _merge(problem: MergeProblem, device: Device) -> None:
    if device.kind == "cpu":
        merge_host(problem)
        return
    with use_device(device.index):
        if problem.indptr is not None:
            problem = problem._replace(indptr=on_device(problem.indptr, device.index, "indptr"))
        merge_cuda(problem, device.index)
        release_after_work(view for view in problem if view is not None)
