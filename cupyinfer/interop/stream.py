# SPDX-License-Identifier: Apache-2.0
"""The device and the stream that work goes to: CuPy's current stream of the device that holds the arrays."""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import Any

_LEGACY_STREAMS = (0, 1)


@cache
def _cuda() -> Any:
    """CuPy's module of devices, streams and the runtime, imported at the first use."""
    import cupy

    return cupy.cuda


def current_stream_ptr(device_index: int) -> int:
    """Handle of CuPy's current stream of a device; 0 is the legacy default stream."""
    return int(_cuda().get_current_stream(device_index).ptr)


class _DeviceScope:
    """Makes a device current while the scope lasts."""

    __slots__ = ("_index", "_previous", "_runtime")

    def __init__(self, runtime: Any, index: int, previous: int) -> None:
        self._runtime = runtime
        self._index = index
        self._previous = previous

    def __enter__(self) -> None:
        self._runtime.setDevice(self._index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._runtime.setDevice(self._previous)


class _NoScope:
    """The scope of a device that is current already."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


_NO_SCOPE = _NoScope()


def use_device(device_index: int) -> _DeviceScope | _NoScope:
    """A context in which the device is current; the one current at this call is current again afterwards.

    Enter the context right away: the device to go back to is read here, so that the usual case costs one query and no more.
    """
    runtime = _cuda().runtime
    previous = runtime.getDevice()
    return _NO_SCOPE if previous == device_index else _DeviceScope(runtime, device_index, previous)


def is_capturing(device_index: int) -> bool:
    """Whether CuPy's current stream of the device is being captured into a graph."""
    return current_stream_state(device_index)[1]


def current_stream_state(device_index: int) -> tuple[int, bool]:
    """Handle of CuPy's current stream of a device, and whether it is being captured into a graph."""
    stream = _cuda().get_current_stream(device_index)
    handle = stream.ptr
    # The legacy stream cannot be captured, and asking it while another stream is would spoil that capture.
    return handle, handle not in _LEGACY_STREAMS and bool(stream.is_capturing())


class ExternalStream:
    """A stream of another library, by its handle, in the form CuPy takes in."""

    __slots__ = ("_handle",)

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """Protocol version and handle."""
        return 0, self._handle


def cupy_stream(handle: int) -> Any:
    """CuPy's view of a stream of another library. Call it while the stream's device is current."""
    return _cuda().Stream.from_external(ExternalStream(handle))
