# SPDX-License-Identifier: Apache-2.0
"""Results: allocated on the device of the queries, handed back as the array type the queries came in as, without a copy."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from cupyinfer.interop.array_view import Device
from cupyinfer.interop.dlpack_producer import DLPackProducer
from cupyinfer.interop.native import element_type
from cupyinfer.interop.stream import is_capturing, use_device

#: JAX takes host memory in without a copy only from this alignment on.
_HOST_ALIGNMENT = 64


def empty_output(shape: tuple[int, ...], dtype: str, device: Device) -> Any:
    """Allocate a result where the queries lie.

    Args:
        shape: sizes, in elements.
        dtype: canonical name. float8 on a GPU is allocated as uint8, since CuPy has no float8.
        device: a GPU, which must be current (`use_device`), or the CPU.

    Returns:
        A CuPy array from the current memory pool and stream of the GPU, or a NumPy array aligned to 64 bytes.
    """
    if device.kind == "cuda":
        import cupy

        return cupy.empty(shape, element_type("uint8" if dtype.startswith("float8") else dtype))
    element = element_type(dtype)
    num_bytes = prod(shape) * element.itemsize
    raw = np.empty(num_bytes + _HOST_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _HOST_ALIGNMENT
    return raw[start : start + num_bytes].view(element).reshape(shape)


def hand_back(result: Any, like: Any) -> Any:
    """Turn a result into the array type of `like`, without a copy.

    Call it after the work that writes `result` has been put on CuPy's current stream: the consumer's stream is then made to
    wait for that work, so the returned array may be used at once.

    Args:
        result: what `empty_output` returned.
        like: the queries as the caller gave them.

    Returns:
        For CuPy and NumPy queries `result` itself; for others an array of their library over the same memory. A library
        without `from_dlpack` in its array namespace gets `result` itself.
    """
    kind = type(like)
    if kind is type(result) or isinstance(like, np.ndarray):
        return result
    take_in = _importer(like, kind.__module__.partition(".")[0])
    if take_in is None:
        return result
    if isinstance(result, np.ndarray):
        return take_in(_exportable(result))
    index = result.data.device_id
    with use_device(index):
        return take_in(DLPackProducer(result, None, ordered=False) if is_capturing(index) else result)


def _importer(like: Any, root: str) -> Any:
    """The `from_dlpack` of the library that `like` belongs to, or None."""
    if root == "cupy":
        return None
    if root == "torch":
        return sys.modules["torch"].from_dlpack
    if root in ("jax", "jaxlib"):
        import jax.dlpack

        return jax.dlpack.from_dlpack
    namespace = getattr(like, "__array_namespace__", None)
    return getattr(namespace(), "from_dlpack", None) if namespace is not None else None


def _exportable(result: np.ndarray[Any, Any]) -> Any:
    """The NumPy array itself, or a producer for the element types that NumPy does not export."""
    name = result.dtype.name
    if name != "bfloat16" and not name.startswith("float8"):
        return result
    return DLPackProducer(result.view(f"u{result.dtype.itemsize}"), name)
