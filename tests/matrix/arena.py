# SPDX-License-Identifier: Apache-2.0
"""Memory of one cell: a single block with guards between all arrays, or one allocation per array for a sanitizer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.memory import GUARD, POISON

Array = npt.NDArray[Any]
_GUARD_PATTERN = 0xA5
_CAPACITY = 192 * 2**20


@dataclass(frozen=True)
class Room:
    """Bytes the library may write.

    Attributes:
        name: for messages.
        bytes: the uint8 array to hand to the library.
        begin, end: where it lies in the block.
    """

    name: str
    bytes: Any
    begin: int = 0
    end: int = 0


class Arena:
    """One block on the backend's device and its image on the host.

    What is put is surrounded by guards, and everything that no `reserve` opened must stay as it is, inputs included. Copies are few:
    processes that share a GPU wait for each other at every one.

    Attributes:
        on_gpu: the block is CuPy's, otherwise NumPy's.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._image = np.empty(_CAPACITY, np.uint8)
        self._seen = np.empty(_CAPACITY, np.uint8)
        if on_gpu:
            import cupy

            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._block = cupy.empty(_CAPACITY, np.uint8)
            self._address = int(self._block.data.ptr)
        else:
            self._block = np.empty(_CAPACITY, np.uint8)
            self._address = self._block.ctypes.data
        self.reset()

    def reset(self) -> None:
        """Forget every array."""
        self._used = self._sent = 0
        self._rooms: list[Room] = []

    def queue(self) -> Any:
        """Context in which the library queues its work on this arena's stream."""
        return self._stream if self.on_gpu else contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait for everything queued."""
        if self.on_gpu:
            self._stream.synchronize()

    def put(self, array: Array) -> Any:
        """A copy of an array on the device once `send` is called; float8 becomes uint8 on a GPU, as CuPy has no float8."""
        array = np.ascontiguousarray(array)
        if self.on_gpu and array.dtype.name.startswith("float8"):
            array = array.view(np.uint8)
        begin = self._open(array.nbytes)
        self._image[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        return self._view(begin, array.dtype, array.shape)

    def reserve(self, name: str, num_bytes: int) -> Room:
        """Exactly `num_bytes` poisoned bytes."""
        begin = self._open(num_bytes)
        room = Room(name, self._view(begin, np.dtype(np.uint8), (num_bytes,)), begin, begin + num_bytes)
        self._rooms.append(room)
        return room

    def view(self, room: Room, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A room as an array."""
        return self._view(room.begin, np.dtype(dtype), shape)

    def send(self) -> None:
        """Bring what was put and reserved since the last call to the device."""
        guard_end = self._used + GUARD
        self._image[self._used : guard_end] = _GUARD_PATTERN
        for begin, end in self._closed(self._sent, guard_end):
            self._copy_in(begin, end)
        for room in self._rooms:
            if room.begin >= self._sent:
                self.fill(room, POISON)
        self._sent = self._used
        self.synchronize()

    def fill(self, room: Room, value: int) -> None:
        """Set every byte of a room."""
        if self.on_gpu:
            if room.end > room.begin:
                (self._block.data + room.begin).memset_async(value, room.end - room.begin, self._stream)
        else:
            self._block[room.begin : room.end] = value

    def get(self, room: Room, dtype: Any, shape: tuple[int, ...]) -> Array:
        """The contents of a room on the host, after all queued work."""
        self._copy_out(room.begin, room.end)
        self.synchronize()
        return self._seen[room.begin : room.end].view(dtype).reshape(shape).copy()

    def assert_rest_intact(self) -> None:
        """Fail if a byte outside of the rooms has changed, and say where."""
        closed = self._closed(0, self._used + GUARD)
        for begin, end in closed:
            self._copy_out(begin, end)
        self.synchronize()
        for begin, end in closed:
            touched = np.nonzero(self._seen[begin:end] != self._image[begin:end])[0]
            if touched.size:
                at = begin + int(touched[0])
                room = min(self._rooms, key=lambda room: max(room.begin - at, at - room.end))
                raise AssertionError(
                    f"{touched.size} bytes outside of outputs and workspaces were written, the first {at - room.begin} bytes "
                    f"from the start of the {room.name} of {room.end - room.begin} bytes"
                )

    def capture(self, run: Any) -> Any:
        """Capture what `run` queues in a CUDA graph; the result replays it. On the host, `run` itself."""
        if not self.on_gpu:
            return run
        self._stream.begin_capture()
        run()
        graph = self._stream.end_capture()
        return lambda: graph.launch(self._stream)

    def _open(self, num_bytes: int) -> int:
        begin = self._used + GUARD + -(self._address + self._used) % GUARD
        if begin + num_bytes + GUARD > _CAPACITY:
            raise MemoryError(f"a cell needs more than the {_CAPACITY} bytes of its arena")
        self._image[self._used : begin] = _GUARD_PATTERN
        self._used = begin + num_bytes
        return begin

    def _closed(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What lies outside of the rooms between two offsets."""
        ranges = []
        for room in self._rooms:
            if room.begin > begin:
                ranges.append((begin, room.begin))
            begin = max(begin, room.end)
        return [*ranges, (begin, end)]

    def _view(self, begin: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        if self.on_gpu:
            import cupy

            return cupy.ndarray(shape, dtype, self._block.data + begin)
        return self._block[begin : begin + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)

    def _copy_in(self, begin: int, end: int) -> None:
        if self.on_gpu:
            (self._block.data + begin).copy_from_host_async(self._image.ctypes.data + begin, end - begin, self._stream)
        else:
            self._block[begin:end] = self._image[begin:end]

    def _copy_out(self, begin: int, end: int) -> None:
        if self.on_gpu:
            if end > begin:
                (self._block.data + begin).copy_to_host_async(self._seen.ctypes.data + begin, end - begin, self._stream)
        else:
            self._seen[begin:end] = self._block[begin:end]


class Apart(Arena):
    """Every array in a CUDA allocation of its own, and rooms that nobody has written: what a sanitizer can judge byte by byte.

    Args:
        filled: names of rooms that are written before each run all the same, since a sanitizer does not see how the kernels do it.
    """

    def __init__(self, filled: Sequence[str] = ()) -> None:
        import cupy

        cupy.cuda.set_allocator(None)
        self._filled = frozenset(filled)
        self.on_gpu = True
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.reset()

    def put(self, array: Array) -> Any:
        import cupy

        if array.dtype.name.startswith("float8"):
            array = array.view(np.uint8)
        with self._stream:
            copy = cupy.ndarray(array.shape, array.dtype)
            copy.set(np.ascontiguousarray(array))
        return copy

    def reserve(self, name: str, num_bytes: int) -> Room:
        import cupy

        return Room(name, cupy.ndarray((num_bytes,), np.uint8), 0, num_bytes)

    def view(self, room: Room, dtype: Any, shape: tuple[int, ...]) -> Any:
        import cupy

        return cupy.ndarray(shape, dtype, room.bytes.data)

    def send(self) -> None:
        self.synchronize()

    def fill(self, room: Room, value: int) -> None:
        """Nothing, but for the rooms that are to be filled: what a run reads it must have written itself."""
        if room.name in self._filled and room.end > room.begin:
            room.bytes.data.memset_async(value, room.end - room.begin, self._stream)

    def get(self, room: Room, dtype: Any, shape: tuple[int, ...]) -> Array:
        self.synchronize()
        return np.asarray(room.bytes.get()).view(dtype).reshape(shape)

    def assert_rest_intact(self) -> None:
        """Nothing: the sanitizer sees every write."""
