# SPDX-License-Identifier: Apache-2.0
"""How the kernels around attention get their index arrays and are launched."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cupyinfer.errors import StateError
from cupyinfer.interop import ArrayView, as_view, is_capturing, numpy_array
from cupyinfer.jit.module import LoadedKernel, load_kernel, params_pointer
from cupyinfer.jit.variant import HelperVariant
from cupyinfer.schedule.profile import arch_for_capability, profile_for_arch

_WARPS_PER_CTA = 8
# Every helper kernel walks its work with the stride of the grid: this bounds idle CTAs, not the work.
_MAX_CTAS = 65536

#: NumPy record with the layout of ``struct IndexArray`` in kernels_cu/helper/index_array.cuh.
INDEX_ARRAY = np.dtype([("data", np.uint64), ("stride", np.int64), ("length", np.int64), ("is_int64", np.int64)], align=True)


def index_fields(view: ArrayView) -> tuple[int, int, int, int]:
    """The fields of ``struct IndexArray`` for a one-dimensional int32 or int64 array on the GPU."""
    return view.ptr, view.strides[0], view.shape[0], int(view.dtype == "int64")


def on_device(view: ArrayView, device_index: int, argument: str) -> ArrayView:
    """The array itself when it lies on a GPU; otherwise a copy in CuPy's memory pool of the current device, on its current stream.

    Raises:
        StateError: the stream is being captured, where host arrays cannot be copied.
    """
    if view.device.kind == "cuda":
        return view
    if is_capturing(device_index):
        raise StateError(f"{argument}: is a host array, and the stream is being captured into a graph; give it on the GPU")
    import cupy

    return as_view(cupy.asarray(np.ascontiguousarray(numpy_array(view))), argument)


def launch_helper(name: str, params: np.ndarray[Any, Any], num_warps: int, device_index: int) -> None:
    """Launch a helper kernel on CuPy's current stream of the current device.

    Args:
        name: one of `cupyinfer.jit.variant.HELPER_KERNELS`.
        params: the kernel's parameter record, one element.
        num_warps: warps that have something to do; nothing is launched for 0.
        device_index: the current device.
    """
    if num_warps > 0:
        num_ctas = min(-(-num_warps // _WARPS_PER_CTA), _MAX_CTAS)
        _loaded(name, device_index).launch((num_ctas, 1, 1), (_WARPS_PER_CTA * 32, 1, 1), 0, params_pointer(params))


@lru_cache(maxsize=64)
def _loaded(name: str, device_index: int) -> LoadedKernel:
    import cupy

    # Only the arch matters: no helper kernel has a tile that depends on shared memory.
    capability = cupy.cuda.Device(device_index).compute_capability
    return load_kernel(HelperVariant(name), profile_for_arch(arch_for_capability(int(capability[:-1]), int(capability[-1]))), device_index)
