# SPDX-License-Identifier: Apache-2.0
"""A DLPack producer under the full control of a test: strides, type code, flags, version, and a count of deleter calls."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))

UINT, FLOAT, BFLOAT, E4M3FN = 1, 2, 4, 10
READ_ONLY, IS_COPIED = 1, 2


class _Legacy(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("type", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", _DELETER),
        ("flags", ctypes.c_uint64),
        *_Legacy._fields_[:8],
    )


class FakeProducer:
    """Exports a NumPy array whichever way a test asks for.

    `num_deletes` counts deleter calls; `requests` holds the keyword arguments of every `__dlpack__` call.
    """

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        code: int,
        *,
        version: tuple[int, int] | None = (1, 1),
        flags: int = 0,
        byte_offset: int = 0,
        with_strides: bool = True,
        lanes: int = 1,
        device: tuple[int, int] = (1, 0),
    ) -> None:
        self.array, self.code, self.version, self.flags = array, code, version, flags
        self.byte_offset, self.with_strides, self.lanes, self.device = byte_offset, with_strides, lanes, device
        self.num_deletes = 0
        self.requests: list[dict[str, Any]] = []
        self.last_capsule: Any = None
        self._alive: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **request: Any) -> Any:
        self.requests.append(request)
        return self._capsule()

    def _capsule(self) -> Any:
        array = self.array
        managed: Any = _Legacy() if self.version is None else _Versioned()
        if self.version is not None:
            managed.version[:] = self.version
            managed.flags = self.flags
        shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
        strides = (ctypes.c_int64 * max(array.ndim, 1))(*(step // array.itemsize for step in array.strides))
        managed.data = array.ctypes.data - self.byte_offset
        managed.device[:] = self.device
        managed.ndim = array.ndim
        managed.type[:] = (self.code, array.itemsize * 8)
        managed.lanes = self.lanes
        managed.shape = ctypes.addressof(shape)
        managed.strides = ctypes.addressof(strides) if self.with_strides else None
        managed.byte_offset = self.byte_offset
        address = ctypes.addressof(managed)

        def deleter(pointer: int) -> None:
            assert pointer == address
            self.num_deletes += 1

        managed.deleter = _DELETER(deleter)
        self._alive.append((managed, shape, strides))
        self.last_capsule = _new_capsule(address, b"dltensor" if self.version is None else b"dltensor_versioned", None)
        return self.last_capsule

    @property
    def capsule_name(self) -> bytes:
        """Name of the last capsule given out."""
        return bytes(_capsule_name(self.last_capsule))


class OldProducer(FakeProducer):
    """A producer from before DLPack 1.0: no `max_version`, no `copy`, unversioned capsules."""

    def __init__(self, array: np.ndarray[Any, Any], code: int) -> None:
        super().__init__(array, code, version=None)

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self._capsule()
