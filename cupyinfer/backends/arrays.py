# SPDX-License-Identifier: Apache-2.0
"""The arrays of one run in the form kernels take them: addresses, and strides by what they step over."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.interop import ArrayView, numpy_array

#: Libraries whose arrays need no care after the launch.
OWN_PRODUCERS = ("cupy", "numpy")
#: Kernels move 16 bytes at a time, so every row of a head begins at a multiple of that.
ROW_ALIGNMENT = 16
#: They count steps between rows in units of 16 bytes, in 32 bits.
_STRIDE_LIMIT = ROW_ALIGNMENT << 32


class KvStrides(NamedTuple):
    """Steps through one cache, in elements."""

    page: int
    token: int
    head: int


class RunArrays(NamedTuple):
    """The arrays of one run.

    Attributes:
        q: [num_tokens, num_qo_heads, head_dim_qk].
        k: the cache as it came, of any layout.
        v: the same.
        o: [num_tokens, num_qo_heads, head_dim_vo].
        lse: float32 [num_tokens, num_qo_heads], or None.
        strides: all steps in the order of the kernel's parameters, the same object as long as they stay the same.
        foreign: some array belongs to another library than CuPy or NumPy.
    """

    q: ArrayView
    k: ArrayView
    v: ArrayView
    o: ArrayView
    lse: ArrayView | None
    strides: tuple[int, ...]
    foreign: bool


class RunScales(NamedTuple):
    """Factors of one run: floats for the whole tensor, float32 arrays of one value per KV head; of q one per query head, or None
    where its factor is in sm_scale."""

    sm_scale: float
    k_scale: float | ArrayView
    v_scale: float | ArrayView
    q_scale: ArrayView | None = None


def row_strides(view: ArrayView, argument: str, itemsize: int) -> tuple[int, ...]:
    """Strides of all dimensions but the last, 0 where there is nothing to step over.

    Raises:
        ArgumentError: elements of a row are not neighbours, a stride is negative, or rows are not 16-byte aligned.
    """
    if 0 in view.shape:
        return (0,) * (len(view.shape) - 1)  # producers give arrays without elements any strides
    if view.strides[-1] != 1 and view.shape[-1] > 1:
        raise ArgumentError(f"{argument}: head dimension has stride {view.strides[-1]}, its elements must be neighbours (stride 1)")
    strides = tuple(stride if size > 1 else 0 for stride, size in zip(view.strides[:-1], view.shape[:-1], strict=True))
    for stride in strides:
        if stride < 0 or stride * itemsize % ROW_ALIGNMENT or stride * itemsize >= _STRIDE_LIMIT:
            raise ArgumentError(
                f"{argument}: strides {view.strides} (in elements of {itemsize} bytes), every step between rows must be a "
                f"non-negative multiple of {ROW_ALIGNMENT} bytes below 64 GiB"
            )
    return strides


def check_row_alignment(view: ArrayView, argument: str) -> None:
    """Raise ArgumentError unless the first element lies at a multiple of 16 bytes."""
    if view.ptr % ROW_ALIGNMENT:
        raise ArgumentError(
            f"{argument}: begins {view.ptr % ROW_ALIGNMENT} bytes past a multiple of {ROW_ALIGNMENT}, rows must be 16-byte aligned"
        )


def per_head_scale(values: ArrayView, argument: str, num_heads: int) -> ArrayView:
    """Check one float32 factor per head.

    Raises:
        ArgumentTypeError: not float32.
        ArgumentError: another shape, or strided; on the host also a value that a float would be refused for. Those on a GPU cannot be
            seen without waiting for it.
    """
    if values.dtype != "float32":
        raise ArgumentTypeError(f"{argument}: got {values.dtype}, expected a float or a float32 array")
    if values.shape != (num_heads,) or (num_heads > 1 and values.strides[0] != 1):
        kind = "query" if argument == "q_scale" else "KV"
        raise ArgumentError(f"{argument}: got shape {values.shape}, expected contiguous ({num_heads},), one per {kind} head")
    if values.device.kind == "cpu":
        factors, positive = numpy_array(values), argument != "v_scale"
        wrong = ~np.isfinite(factors) | (factors <= 0 if positive else False)
        if wrong.any():
            at = int(wrong.argmax())
            raise ArgumentError(f"{argument}: head {at} has {factors[at]}, must be {'positive and ' if positive else ''}finite")
    return values
