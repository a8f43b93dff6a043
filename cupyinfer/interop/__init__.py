# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out: anything that speaks DLPack, seen as memory without a copy, and results in the caller's array type."""

from cupyinfer.interop.array_view import CPU_DEVICE, ArrayView, Device, as_view, cuda_device, require_writable
from cupyinfer.interop.lifetime import release_after_work
from cupyinfer.interop.native import cupy_array, element_type, memory_is_shared, numpy_array, overlaps_itself
from cupyinfer.interop.outputs import empty_output, hand_back
from cupyinfer.interop.stream import current_stream_ptr, current_stream_state, is_capturing, use_device

__all__ = [
    "CPU_DEVICE",
    "ArrayView",
    "Device",
    "as_view",
    "cuda_device",
    "cupy_array",
    "current_stream_ptr",
    "current_stream_state",
    "element_type",
    "empty_output",
    "hand_back",
    "is_capturing",
    "memory_is_shared",
    "numpy_array",
    "overlaps_itself",
    "release_after_work",
    "require_writable",
    "use_device",
]
