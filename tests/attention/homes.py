# SPDX-License-Identifier: Apache-2.0
"""Where test arrays live, so that one test body covers NumPy on the host and CuPy on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


class HostHome:
    """NumPy arrays as they are."""

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        return array

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        assert isinstance(array, np.ndarray)
        return array

    def __repr__(self) -> str:
        return "host"


class GpuHome:
    """CuPy arrays that keep the strides of what they were made from; float8 becomes uint8, as CuPy has no float8."""

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        import cupy

        if array.dtype.name.startswith("float8"):
            array = array.view(np.uint8)
        base = array
        while isinstance(base.base, np.ndarray) and base.base.dtype == array.dtype:
            base = base.base
        if not base.flags.c_contiguous:
            return cupy.asarray(array)
        on_gpu = cupy.asarray(base)
        offset = array.ctypes.data - base.ctypes.data
        return cupy.ndarray(array.shape, array.dtype, on_gpu.data + offset, array.strides)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        import cupy

        assert isinstance(array, cupy.ndarray)
        if array.size == 0:
            return np.empty(array.shape, array.dtype)
        # The bytes from the first element to the last, gaps included: a plain copy, whatever the strides and the type.
        extent = sum((size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)) + array.itemsize
        raw = cupy.asnumpy(cupy.ndarray((extent,), np.uint8, array.data))
        return np.ndarray(array.shape, array.dtype, raw, strides=array.strides)

    def __repr__(self) -> str:
        return "gpu"


Home = HostHome | GpuHome
HOMES = pytest.mark.parametrize("home", [pytest.param(HostHome(), id="host"), pytest.param(GpuHome(), id="gpu", marks=pytest.mark.gpu)])
