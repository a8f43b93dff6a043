# SPDX-License-Identifier: Apache-2.0
"""Reading DLPack capsules with ctypes, so that every element type crosses without a copy, also those CuPy and NumPy refuse."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

#: Highest DLPack version whose structures are known here.
MAX_VERSION = (1, 1)
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13

_FLAG_READ_ONLY = 1
_FLAG_IS_COPIED = 2
# (type code, bits) of the DLPack data type, and our canonical name.
_NAMES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (8, 8): "float8_e4m3",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}
_CODES = {name: code for (code, _), name in _NAMES.items()}

_NAME = b"dltensor"
_NAME_USED = b"used_dltensor"
_NAME_VERSIONED = b"dltensor_versioned"
_NAME_VERSIONED_USED = b"used_dltensor_versioned"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Own prototypes: the function objects of ctypes.pythonapi are shared with every other library in the process.
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_capsule_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
# The lock stays held in the deleter: not every producer takes it itself before touching Python objects.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class ManagedTensor:
    """A consumed DLPack tensor: its memory lives as long as this object.

    Attributes:
        ptr: address of the first element; may be 0 when the array is empty.
        shape: sizes, in elements.
        strides: strides, in elements, also where the producer left them out.
        dtype: canonical name.
        device_type: DLPack device type.
        device_id: index of the device among those of its type.
        read_only: the producer forbids writing.
        is_copied: the producer made a copy, so writing does not reach its own array.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_deleter",
        "device_id",
        "device_type",
        "dtype",
        "is_copied",
        "ptr",
        "read_only",
        "shape",
        "strides",
    )

    def __init__(self, capsule: Any) -> None:
        """Consume `capsule`.

        Raises:
            BufferError: not an unused DLPack capsule, or one of an unknown version or element type; it is left unused.
        """
        self._deleter: int | None = None
        if _capsule_is_valid(capsule, _NAME_VERSIONED):
            address, used = _capsule_pointer(capsule, _NAME_VERSIONED), _NAME_VERSIONED_USED
            versioned = _ManagedVersioned.from_address(address)
            if versioned.major > MAX_VERSION[0]:
                raise BufferError(f"DLPack {versioned.major}.{versioned.minor} is newer than the known {MAX_VERSION[0]}.{MAX_VERSION[1]}")
            tensor, deleter, flags = versioned.tensor, versioned.deleter, versioned.flags
        elif _capsule_is_valid(capsule, _NAME):
            address, used = _capsule_pointer(capsule, _NAME), _NAME_USED
            managed = _Managed.from_address(address)
            tensor, deleter, flags = managed.tensor, managed.deleter, 0
        else:
            raise BufferError(f"{capsule!r} is not an unused DLPack capsule")
        self._read(tensor)
        self.read_only = bool(flags & _FLAG_READ_ONLY)
        self.is_copied = bool(flags & _FLAG_IS_COPIED)
        _capsule_set_name(capsule, used)
        self._address, self._deleter = address, deleter

    def _read(self, tensor: _Tensor) -> None:
        name = _NAMES.get((tensor.code, tensor.bits))
        if name is None or tensor.lanes != 1:
            raise BufferError(f"DLPack element type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) is not known here")
        ndim = tensor.ndim
        self.ptr: int = (tensor.data or 0) + tensor.byte_offset
        self.shape: tuple[int, ...] = tuple(tensor.shape[:ndim]) if ndim else ()
        if not ndim:
            self.strides: tuple[int, ...] = ()
        else:
            self.strides = tuple(tensor.strides[:ndim]) if tensor.strides else contiguous_strides(self.shape)
        self.dtype: str = name
        self.device_type: int = tensor.device_type
        self.device_id: int = tensor.device_id

    def __del__(self, _is_finalizing: Any = sys.is_finalizing) -> None:
        # While the interpreter shuts down the producer may be gone already; the process gives the memory back.
        if self._deleter is not None and not _is_finalizing():
            _Deleter(self._deleter)(self._address)
            self._deleter = None


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def relabel(capsule: Any, dtype: str) -> None:
    """Change the element type an unused capsule declares to another one of the same width."""
    if _capsule_is_valid(capsule, _NAME_VERSIONED):
        tensor = _ManagedVersioned.from_address(_capsule_pointer(capsule, _NAME_VERSIONED)).tensor
    elif _capsule_is_valid(capsule, _NAME):
        tensor = _Managed.from_address(_capsule_pointer(capsule, _NAME)).tensor
    else:
        raise BufferError(f"{capsule!r} is not an unused DLPack capsule")
    code = _CODES[dtype]
    if _NAMES.get((code, tensor.bits)) != dtype:
        raise BufferError(f"{dtype} is not {tensor.bits} bits wide")
    tensor.code = code
