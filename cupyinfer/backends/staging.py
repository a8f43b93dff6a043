# SPDX-License-Identifier: Apache-2.0
"""Pinned memory for plan uploads: a block is reused only after the copy that reads it has finished."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_MIN_BYTES = 1 << 14


class _Block:
    """Pinned bytes, and the event behind the last copy that reads them."""

    __slots__ = ("address", "event", "event_handle", "memory", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        import cupy
        import cupyx

        self.memory: npt.NDArray[np.uint8] = cupyx.empty_pinned(num_bytes, np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.num_bytes = num_bytes
        self.event = cupy.cuda.Event(disable_timing=True)
        self.event_handle = int(self.event.ptr)


class StagingPool:
    """Pinned blocks of one device. Asking never waits: when every block is still being read, there is one more."""

    def __init__(self) -> None:
        from cupy.cuda import runtime

        self._copy, self._record, self._to_device = runtime.memcpyAsync, runtime.eventRecord, runtime.memcpyHostToDevice
        # Taking from it and giving back are atomic.
        self._free: deque[_Block] = deque()

    def upload(self, fill: Callable[[npt.NDArray[np.uint8]], None], num_bytes: int, destination: int, stream: int) -> Any:
        """Fill a block and queue its copy to `destination` on a stream; returns an event behind the copy.

        Args:
            fill: called with a block of at least `num_bytes`, as uint8.
            num_bytes: bytes to copy.
            destination: device address.
            stream: handle of the stream.
        """
        block = self._take(num_bytes)
        try:
            fill(block.memory)
        except BaseException:
            self._free.append(block)
            raise
        self._copy(destination, block.address, num_bytes, self._to_device, stream)
        self._record(block.event_handle, stream)
        # A block whose copy failed is not used again: nothing says when it is free.
        self._free.append(block)
        return block.event

    def _take(self, num_bytes: int) -> _Block:
        free = self._free
        for _ in range(len(free)):
            try:
                block = free.pop()  # the last one used, which the processor's caches may still hold
            except IndexError:  # another thread was faster
                break
            if block.num_bytes >= num_bytes and block.event.done:
                return block
            free.appendleft(block)
        return _Block(max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length()))


_pools: dict[int, StagingPool] = {}
_pools_lock = threading.Lock()


def staging_pool(device_id: int) -> StagingPool:
    """The pool of a device."""
    with _pools_lock:
        return _pools.setdefault(device_id, StagingPool())
