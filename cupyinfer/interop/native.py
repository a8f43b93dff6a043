# SPDX-License-Identifier: Apache-2.0
"""NumPy and CuPy arrays over the memory of a view, without a copy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from cupyinfer.interop.array_view import ArrayView

#: Candidate solutions that an exact test of two strided arrays may look at: milliseconds.
_MAX_OVERLAP_WORK = 100_000


def element_type(name: str) -> np.dtype[Any]:
    """The NumPy dtype of any canonical name a view may have."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


class _HostMemory:
    """The memory of a CPU view as NumPy takes it in; the NumPy array keeps it, and so the view's owner, alive."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, view: ArrayView, itemsize: int) -> None:
        # Unsigned integers stand in for element types the interface cannot name.
        self.__array_interface__ = {
            "version": 3,
            "data": (view.ptr, not view.writable),
            "shape": view.shape,
            "strides": tuple(step * itemsize for step in view.strides),
            "typestr": f"<u{itemsize}",
        }
        self._owner = view.owner


def numpy_array(view: ArrayView) -> np.ndarray[Any, Any]:
    """The NumPy array over the memory of a CPU view; bfloat16 and float8 as in ml_dtypes."""
    owner, dtype = view.owner, element_type(view.dtype)
    if isinstance(owner, np.ndarray):
        # The owner of a view with other shape or strides than its own is more than the view shows.
        shown = (view.ptr, view.shape, tuple(step * dtype.itemsize for step in view.strides), dtype)
        if (owner.ctypes.data, owner.shape, owner.strides, owner.dtype) == shown:
            return owner
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    if dtype.kind == "c":
        return np.asarray(_ComplexMemory(view, dtype))
    return np.asarray(_HostMemory(view, dtype.itemsize)).view(dtype)


class _ComplexMemory(_HostMemory):
    """As _HostMemory, for complex elements, whose width no unsigned integer has."""

    __slots__ = ()

    def __init__(self, view: ArrayView, dtype: np.dtype[Any]) -> None:
        super().__init__(view, dtype.itemsize)
        self.__array_interface__["typestr"] = dtype.str


def memory_is_shared(first: ArrayView, second: ArrayView) -> bool:
    """Whether two arrays of one device have a byte in common; rows of one may lie between those of the other.

    Nothing is read: only addresses count. True where it would take too long to find out.
    """
    # NumPy decides about any addresses, mapped or not.
    one, other = (np.asarray(_HostMemory(view, element_type(view.dtype).itemsize)) for view in (first, second))
    try:
        return np.shares_memory(one, other, max_work=_MAX_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


@lru_cache(maxsize=1024)
def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides alone do not tell that every element of an array has a place of its own: each axis must step over all of the
    narrower ones. Layouts that interleave axes without an overlap count as overlapping; no library makes such arrays by itself."""
    reach = 1
    if 0 in shape:
        return False
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def cupy_array(view: ArrayView) -> Any:
    """The CuPy array over the memory of a CUDA view; float8 comes as uint8, since CuPy has no float8."""
    import cupy

    if view.producer == "cupy":
        return view.owner
    dtype = element_type("uint8" if view.dtype.startswith("float8") else view.dtype)
    extent = 1 + sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True))
    num_bytes = 0 if 0 in view.shape else extent * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(view.ptr, num_bytes, view.owner, view.device.index)
    strides = tuple(step * dtype.itemsize for step in view.strides)
    return cupy.ndarray(view.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
