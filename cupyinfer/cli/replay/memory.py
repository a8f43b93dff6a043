# SPDX-License-Identifier: Apache-2.0
"""The little that differs between a replay on NumPy and one on a GPU: allocation, copies and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from cupyinfer.backends.device import current_device, read_profile
from cupyinfer.schedule.profile import HOST_PROFILE, DeviceProfile

Array = Any  # a NumPy or CuPy array
_ALIGNMENT = 256
#: Larger than any L2 cache. Filling it takes a GPU about 0.1 ms, time enough for the host to launch what is measured behind it.
_FLUSH_BYTES = 2**28


class Memory(Protocol):
    """Where arrays of a replay lie."""

    backend: str

    @property
    def profile(self) -> DeviceProfile:
        """What plans are made for."""

    def filled(self, num_bytes: int, value: int) -> Array:
        """A uint8 array at a multiple of 256 bytes, every byte `value`."""

    def fill(self, array: Array, value: int) -> None:
        """Set every byte of a contiguous uint8 array."""

    def upload(self, array: np.ndarray[Any, Any]) -> Array:
        """A copy of a host array there; the array itself on the host."""

    def fetch(self, array: Array) -> np.ndarray[Any, Any]:
        """A copy on the host; waits for the work that writes the array."""

    def seconds(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """What `work` returns, and how long it took there."""


class HostMemory:
    """NumPy arrays and the host's clock."""

    backend = "host"
    profile = HOST_PROFILE

    def filled(self, num_bytes: int, value: int) -> Array:
        """See Memory."""
        raw = np.full(num_bytes + _ALIGNMENT, value, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + num_bytes]

    def fill(self, array: Array, value: int) -> None:
        """See Memory."""
        array.fill(value)

    def upload(self, array: np.ndarray[Any, Any]) -> Array:
        """See Memory."""
        return array

    def fetch(self, array: Array) -> np.ndarray[Any, Any]:
        """See Memory."""
        return np.array(array)

    def seconds(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """See Memory."""
        start = time.perf_counter()
        return work(), time.perf_counter() - start


class GpuMemory:
    """CuPy arrays and CUDA events. Only copies, fills and views are used, so CuPy compiles nothing for them."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.profile = read_profile(current_device())
        import cupy

        self._cupy = cupy
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self._flush = cupy.empty(_FLUSH_BYTES, np.uint8)

    def filled(self, num_bytes: int, value: int) -> Array:
        """See Memory."""
        array = self._cupy.empty(num_bytes, np.uint8)
        self.fill(array, value)
        return array

    def fill(self, array: Array, value: int) -> None:
        """See Memory."""
        if array.size:
            array.data.memset_async(value, array.size)

    def upload(self, array: np.ndarray[Any, Any]) -> Array:
        """See Memory."""
        # As integers, since CuPy knows bfloat16 only as a view.
        bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
        return self._cupy.asarray(bits).view(array.dtype)

    def fetch(self, array: Array) -> np.ndarray[Any, Any]:
        """See Memory."""
        host: np.ndarray[Any, Any] = array.get()
        return host

    def seconds(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """See Memory. It starts with a cold L2 cache, as it does between the layers of a model."""
        self.fill(self._flush, 0)
        self._begin.record()
        result = work()
        self._end.record()
        self._end.synchronize()
        return result, self._cupy.cuda.get_elapsed_time(self._begin, self._end) / 1e3
