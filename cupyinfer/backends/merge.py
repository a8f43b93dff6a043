# SPDX-License-Identifier: Apache-2.0
"""Merging attention states, in NumPy and as a kernel launch with its parameter record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.backends.helper_kernel import INDEX_ARRAY, index_fields, launch_helper
from cupyinfer.interop import ArrayView, numpy_array

#: Element types of values, in the order of `value_type` in the kernel.
VALUE_TYPES = ("float16", "bfloat16", "float32")

_STATE_STRIDES = tuple(f"{array}_stride_{axis}" for array in "vs" for axis in ("row", "state", "head"))
_STATE_ARRAY = np.dtype([("v", np.uint64), ("s", np.uint64)] + [(name, np.int64) for name in (*_STATE_STRIDES, "num_states")], align=True)

#: NumPy record with the layout of ``struct MergeStatesParams``.
MERGE_STATES_PARAMS = np.dtype(
    [("first", _STATE_ARRAY), ("second", _STATE_ARRAY), ("v_out", np.uint64), ("s_out", np.uint64)]
    + [(name, np.int64) for name in ("v_out_stride_row", "v_out_stride_head", "s_out_stride_row", "s_out_stride_head")]
    + [("indptr", INDEX_ARRAY), ("mask", np.uint64), ("mask_stride", np.int64), ("num_rows", np.int64)]
    + [(name, np.int32) for name in ("num_heads", "head_dim", "value_type", "vectorized", "lanes_per_unit", "unused")],
    align=True,
)

# States of some rows: which rows, their values [rows, num_heads, head_dim] and log-sum-exps [rows, num_heads].
_Round = tuple[Any, npt.NDArray[Any], npt.NDArray[Any]]


class MergeProblem(NamedTuple):
    """One merge, whatever the form its states come in.

    Attributes:
        v, s: states as [num_rows, num_states, num_heads, head_dim] and [num_rows, num_states, num_heads]; with `indptr`
            [num_states, num_heads, head_dim] and [num_states, num_heads]; with `v_other` there is no states axis.
        v_out: [num_rows, num_heads, head_dim], may be `v`.
        s_out: float32 [num_rows, num_heads], may be `s`.
        v_other, s_other: one more state of every row, as `v_out` and `s_out`.
        indptr: [num_rows + 1], the states of every row.
        mask: bool or uint8 [num_rows]; rows with 0 are not written.
    """

    v: ArrayView
    s: ArrayView
    v_out: ArrayView
    s_out: ArrayView
    v_other: ArrayView | None = None
    s_other: ArrayView | None = None
    indptr: ArrayView | None = None
    mask: ArrayView | None = None


def merge_cuda(problem: MergeProblem, device_index: int) -> None:
    """Launch the merge kernel; all arrays lie on the current device `device_index`."""
    num_rows, num_heads, head_dim = problem.v_out.shape
    itemsize = 4 if problem.v.dtype == "float32" else 2
    first = _state_fields(problem.v, problem.s, problem)
    second = (0,) * len(first)
    if problem.v_other is not None and problem.s_other is not None:
        second = _state_fields(problem.v_other, problem.s_other, problem)
    out, lse = problem.v_out, problem.s_out
    values = [view for view in (problem.v, problem.v_other, out) if view is not None]
    steps = [step * itemsize for view in values for step in view.strides[:-1]]
    vectorized = gcd(16, head_dim * itemsize, *(view.ptr for view in values), *steps) == 16
    vectors = head_dim * itemsize // 16 if vectorized else head_dim
    lanes = min(32, 1 << max(vectors - 1, 0).bit_length())
    mask = problem.mask
    params = np.zeros(1, MERGE_STATES_PARAMS)
    params[0] = (
        *(first, second, out.ptr, lse.ptr, *out.strides[:2], *lse.strides),
        index_fields(problem.indptr) if problem.indptr is not None else (0, 0, 0, 0),
        *((mask.ptr, mask.strides[0]) if mask is not None else (0, 0)),
        *(num_rows, num_heads, head_dim, VALUE_TYPES.index(problem.v.dtype), vectorized, lanes, 0),
    )
    launch_helper("merge_states", params, -(-num_rows * num_heads * lanes // 32), device_index)


def _state_fields(v: ArrayView, s: ArrayView, problem: MergeProblem) -> tuple[int, ...]:
    """The fields of ``struct StateArray``."""
    if problem.indptr is not None:
        return (v.ptr, s.ptr, 0, *v.strides[:2], 0, *s.strides, v.shape[0])
    if problem.v_other is not None:
        return (v.ptr, s.ptr, v.strides[0], 0, v.strides[1], s.strides[0], 0, s.strides[1], 1)
    return (v.ptr, s.ptr, *v.strides[:3], *s.strides, v.shape[1])


def merge_host(problem: MergeProblem) -> None:
    """What the merge kernel does, in NumPy with float32 arithmetic."""
    rounds = _rounds(problem)
    v_out, s_out = numpy_array(problem.v_out), numpy_array(problem.s_out)
    # Infinities and NaN are values here, as they are on the GPU.
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        joint_max = np.full(s_out.shape, -np.inf, np.float32)
        for rows, _, s in rounds():
            joint_max[rows] = np.fmax(joint_max[rows], s)
        weighted = np.zeros(v_out.shape, np.float32)
        weight_sum = np.zeros(s_out.shape, np.float32)
        for rows, v, s in rounds():
            # An empty state has no share whatever its values are, and -inf - -inf is not a number.
            has_keys = s != -np.inf
            weight = np.where(has_keys, np.exp2(s - joint_max[rows]), np.float32(0))
            weighted[rows] += weight[..., None] * np.where(has_keys[..., None], v.astype(np.float32), np.float32(0))
            weight_sum[rows] += weight
        merged = (weighted / np.where(weight_sum == 0, np.float32(1), weight_sum)[..., None]).astype(v_out.dtype)
        lse = np.where(weight_sum == 0, np.float32(-np.inf), joint_max + np.log2(weight_sum))
    written = slice(None) if problem.mask is None else numpy_array(problem.mask).astype(bool)
    v_out[written] = merged[written]
    s_out[written] = lse[written]


def _rounds(problem: MergeProblem) -> Callable[[], Iterator[_Round]]:
    """The states in order, one of every row that still has one per round; each call starts again."""
    v, s = numpy_array(problem.v), numpy_array(problem.s)
    if problem.v_other is not None and problem.s_other is not None:
        v_other, s_other = numpy_array(problem.v_other), numpy_array(problem.s_other)
        return lambda: iter(((slice(None), v, s), (slice(None), v_other, s_other)))
    if problem.indptr is None:
        return lambda: ((slice(None), v[:, state], s[:, state]) for state in range(v.shape[1]))
    indptr = numpy_array(problem.indptr).astype(np.int64)
    lengths = np.diff(indptr)

    def ragged() -> Iterator[_Round]:
        for state in range(int(lengths.max(initial=0))):
            rows = np.nonzero(lengths > state)[0]
            yield rows, v[indptr[rows] + state], s[indptr[rows] + state]

    return ragged
