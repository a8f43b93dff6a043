# SPDX-License-Identifier: Apache-2.0
"""One allocator for sizing and for placing: the same calls give the same offsets, with or without a buffer."""

from __future__ import annotations

import numbers
import sys
from typing import Any

import numpy as np

from cupyinfer.errors import ArgumentError, ArgumentTypeError, StateError, WorkspaceError

#: Workspace buffers begin at a multiple of this many bytes, so that offsets alone decide every alignment up to it.
WORKSPACE_ALIGNMENT = 16


def buffer_address(buffer: Any) -> int:
    """Address of the first byte of a NumPy or CuPy array."""
    if isinstance(buffer, np.ndarray):
        return int(buffer.__array_interface__["data"][0])
    return int(buffer.data.ptr)


def check_alignment(buffer: Any, name: str) -> None:
    """Raise WorkspaceError unless `buffer`, a NumPy or CuPy array, begins at a multiple of WORKSPACE_ALIGNMENT."""
    misaligned = buffer_address(buffer) % WORKSPACE_ALIGNMENT if buffer.nbytes else 0
    if misaligned:
        raise WorkspaceError(
            f"{name}: begins {misaligned} bytes past a multiple of {WORKSPACE_ALIGNMENT}, it needs {WORKSPACE_ALIGNMENT}-byte alignment"
        )


def _whole(value: Any, what: str, region: str) -> int:
    """A Python int of any integer; raise ArgumentTypeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{region}: got {value!r} as {what}, expected an int")
    return int(value)


class AlignedAllocator:
    """Hands out aligned regions of one buffer, or only counts them.

    *Counting*, ``AlignedAllocator()``: no memory, offsets start at 0, nothing can overflow.
    *Placing*, ``AlignedAllocator(buffer)``: the same calls give the same offsets, and views of `buffer` on request.
    So the bytes a counting allocator ends with are the bytes a placing one needs, and one byte less overflows.

    Args:
        buffer: a contiguous NumPy or CuPy array, 16-byte aligned, or None to count.
        name: what errors call the buffer.

    Raises:
        ArgumentTypeError: `buffer` is no such array.
        WorkspaceError: the buffer is not aligned, or not contiguous.
    """

    __slots__ = ("_allocated", "_buffer", "_capacity", "name")

    def __init__(self, buffer: Any = None, name: str = "workspace") -> None:
        self.name = name
        self._buffer = buffer
        self._capacity = sys.maxsize
        self._allocated = 0
        if buffer is not None:
            if not isinstance(buffer, np.ndarray) and not hasattr(getattr(buffer, "data", None), "ptr"):
                raise ArgumentTypeError(f"{name}: got {type(buffer).__name__}, expected a NumPy or CuPy array or None")
            if not buffer.flags.c_contiguous:
                raise WorkspaceError(f"{name}: the buffer is strided, a workspace is contiguous")
            check_alignment(buffer, name)
            self._capacity = int(buffer.nbytes)

    def clear(self) -> None:
        """Give all regions back."""
        self._allocated = 0

    @property
    def num_allocated_bytes(self) -> int:
        """Bytes from the start of the buffer to the end of the last region."""
        return self._allocated

    def aligned_alloc_offset(self, size: int, alignment: int, name: str) -> int:
        """Reserve `size` bytes and return their offset from the start of the buffer.

        Args:
            size: bytes, zero allowed.
            alignment: a power of two; the offset is a multiple of it.
            name: what errors call the region.

        Raises:
            ArgumentTypeError: a size or an alignment that is no integer.
            ArgumentError: a negative size, or an alignment that is no power of two.
            WorkspaceError: the region does not fit; the allocator is unchanged.
        """
        if type(size) is not int or type(alignment) is not int:
            size, alignment = _whole(size, "size", name), _whole(alignment, "alignment", name)
        if size < 0:
            raise ArgumentError(f"{name}: cannot allocate {size} bytes")
        if alignment != WORKSPACE_ALIGNMENT:
            self._check_alignment(alignment, name)
        offset = (self._allocated + alignment - 1) & -alignment
        end = offset + size
        if end > self._capacity:
            raise WorkspaceError(
                f"{self.name} is too small for region {name}: {size} bytes aligned to {alignment} at offset {offset} "
                f"need {end} bytes, the buffer has {self._capacity} ({max(0, self._capacity - offset)} left)"
            )
        self._allocated = end
        return offset

    def reserve(self, size: int) -> int:
        """Reserve so many bytes at the workspaces' alignment and return their offset; -1 where they do not fit, and nothing changes.

        For sizes that are known to be Python ints and not negative: a third of the time of `aligned_alloc_offset`.
        """
        offset = (self._allocated + WORKSPACE_ALIGNMENT - 1) & -WORKSPACE_ALIGNMENT
        end = offset + size
        if end > self._capacity:
            return -1
        self._allocated = end
        return offset

    def _check_alignment(self, alignment: int, name: str) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ArgumentError(f"{name}: alignment {alignment} is not a power of two")
        if alignment > WORKSPACE_ALIGNMENT and self._buffer is not None and self._capacity and buffer_address(self._buffer) % alignment:
            raise WorkspaceError(f"{self.name}: region {name} needs {alignment}-byte alignment, which the buffer's start does not have")

    def aligned_alloc(self, size: int, alignment: int, name: str) -> Any:
        """Reserve `size` bytes and return them as a uint8 view of the buffer.

        Raises:
            StateError: this allocator only counts.
            WorkspaceError: as for `aligned_alloc_offset`.
        """
        if self._buffer is None:
            raise StateError(f"{self.name}: a counting allocator has no memory to return for region {name}")
        offset = self.aligned_alloc_offset(size, alignment, name)
        return self._buffer.reshape(-1).view("uint8")[offset : offset + size]
