# SPDX-License-Identifier: Apache-2.0
"""Arrays of a backend, NumPy or CuPy, and buffers whose inside is poisoned and whose surroundings are watched."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Bytes watched on each side of a buffer; a multiple of every alignment asked for.
GUARD = 256
_GUARD_PATTERN = 0xA5
#: NaN in every float type, and far out of range as an index.
POISON = 0xFF


class Memory:
    """Where the arrays of a backend live: "host" is NumPy, "fa2" and "fa3" are CuPy on the current device."""

    def __init__(self, backend: str) -> None:
        self.on_gpu = backend != "host"

    def put(self, array: Array) -> Any:
        """A copy with the same strides; float8 becomes uint8, as CuPy has no float8."""
        if not self.on_gpu:
            return array.copy(order="K")
        import cupy

        array = array.view(np.uint8) if array.dtype.name.startswith("float8") else array
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        return cupy.asarray(np.ascontiguousarray(array.transpose(order))).transpose(*np.argsort(order).tolist())

    def get(self, array: Any) -> Array:
        """The values on the host, after all work queued on the device."""
        if not self.on_gpu:
            return np.array(array)
        import cupy

        cupy.cuda.Device().synchronize()
        return np.asarray(cupy.asnumpy(array))

    def write(self, destination: Any, values: Array) -> None:
        """Replace the contents of a contiguous array, before anything queued later on any stream."""
        if self.on_gpu:
            import cupy

            destination.set(values)
            cupy.cuda.Device().synchronize()
        else:
            destination[...] = values


class Buffer:
    """Exactly as many bytes as asked for, 256-byte aligned, poisoned, between two guards.

    Attributes:
        bytes: the uint8 array to hand to the library, of NumPy or CuPy.
    """

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self._memory = memory
        whole = np.full(num_bytes + 3 * GUARD, _GUARD_PATTERN, np.uint8)
        self._whole = memory.put(whole)
        address = self._whole.data.ptr if memory.on_gpu else self._whole.ctypes.data
        self._begin = GUARD + -address % GUARD
        self._end = self._begin + num_bytes
        self.bytes = self._whole[self._begin : self._end]
        self.fill(POISON)

    def fill(self, value: int) -> None:
        """Set every byte between the guards."""
        if self.bytes.size:
            self._memory.write(self.bytes, np.full(self.bytes.shape, value, np.uint8))

    def view(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """The bytes as an array."""
        if not self._memory.on_gpu:
            return self.bytes.view(dtype).reshape(shape)
        import cupy

        return cupy.ndarray(shape, dtype, self.bytes.data)

    def contents(self) -> Array:
        """The bytes between the guards, on the host."""
        return self._memory.get(self.bytes)

    def assert_guards_intact(self, name: str) -> None:
        """Fail if a byte outside the buffer has changed, and say which."""
        whole = self._memory.get(self._whole)
        whole[self._begin : self._end] = _GUARD_PATTERN
        touched = np.nonzero(whole != _GUARD_PATTERN)[0] - self._begin
        assert not touched.size, f"{name}: bytes {touched[:8].tolist()} relative to a buffer of {self._end - self._begin} were written"


def poisoned_array(memory: Memory, dtype: Any, shape: tuple[int, ...]) -> tuple[Any, Buffer]:
    """An array of NaN to write a result to, and its buffer."""
    buffer = Buffer(memory, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return buffer.view(dtype, shape), buffer
