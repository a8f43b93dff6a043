# SPDX-License-Identifier: Apache-2.0
"""Exporting arrays through DLPack where their own library cannot: element types it cannot name, and streams under capture."""

from __future__ import annotations

from typing import Any

from cupyinfer.interop.dlpack import relabel


class DLPackProducer:
    """Exports the memory of an array under another element type of the same width, without a copy.

    NumPy refuses to export bfloat16 and float8, and CuPy float8. So the array goes out as unsigned integers, and the element
    type in the capsule is then corrected; the capsule, its memory and its deleter stay those of the array's own library.

    Args:
        array: a NumPy or CuPy array of unsigned integers, or of `dtype` where its library can export that.
        dtype: canonical name of the element type that consumers shall see, or None to leave it.
        ordered: False to ignore the consumer's stream, which a stream under capture must not touch.
    """

    __slots__ = ("_array", "_dtype", "_ordered")

    def __init__(self, array: Any, dtype: str | None, ordered: bool = True) -> None:
        self._array = array
        self._dtype = dtype
        self._ordered = ordered

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        """The capsule of the array, with the element type corrected; the arguments are those of the DLPack protocol."""
        capsule = self._array.__dlpack__(stream=stream if self._ordered else -1, **options)
        if self._dtype is not None:
            relabel(capsule, self._dtype)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack device type and index of the array."""
        device_type, index = self._array.__dlpack_device__()
        return int(device_type), int(index)
