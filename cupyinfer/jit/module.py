# SPDX-License-Identifier: Apache-2.0
"""Cubin to a kernel loaded on one device, and its launch through CuPy's driver calls."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import numpy as np

from cupyinfer.errors import ArgumentError, BackendUnavailable
from cupyinfer.jit.cache import CubinCache, default_cache
from cupyinfer.jit.compiler import CompiledKernel, CompileReport
from cupyinfer.jit.source import KernelSource, kernel_source
from cupyinfer.jit.variant import KernelVariant
from cupyinfer.schedule.profile import DeviceProfile

#: The driver's status for a thread without a current context.
_INVALID_CONTEXT = 201


class LoadedKernel:
    """A kernel on one device, ready to launch there.

    Attributes:
        name: readable name of the kernel.
        device_id: the device it is loaded on.
        smem_bytes: dynamic shared memory a launch may ask for, bytes.
        report: what ptxas said when it was compiled.
    """

    __slots__ = ("_function", "device_id", "name", "report", "smem_bytes")

    def __init__(self, name: str, function: Any, device_id: int, smem_bytes: int, report: CompileReport) -> None:
        self.name = name
        self.device_id = device_id
        self.smem_bytes = smem_bytes
        self.report = report
        self._function = function

    def launch(self, grid: tuple[int, ...], block: tuple[int, ...], smem_bytes: int, params: Any, stream: Any = None) -> None:
        """Queue the kernel on a stream of its device, which must be the current one.

        Nothing is checked here: the driver copies the record behind `params` and returns.

        Args:
            grid: CTAs in x, y, z.
            block: threads in x, y, z.
            smem_bytes: dynamic shared memory, at most `self.smem_bytes`.
            params: what `params_pointer` made of the kernel's parameter record.
            stream: a CuPy stream; None is the current one.
        """
        self._function(grid, block, (params,), smem_bytes, stream)

    def prepared(self, num_threads: int, smem_bytes: int, record: int) -> PreparedLaunch:
        """Launches of one-dimensional grids whose parameter record lies at that address of host memory."""
        return PreparedLaunch(self._function.ptr, num_threads, smem_bytes, record, self.device_id)

    def ctas_per_sm(self, threads: int, smem_bytes: int) -> int:
        """CTAs of that many threads and bytes of dynamic shared memory that one SM holds, as the driver computes it."""
        from cupy_backends.cuda.api import driver

        return int(driver.occupancyMaxActiveBlocksPerMultiprocessor(self._function.ptr, threads, smem_bytes))


_Arguments = ctypes.c_void_p * 1


@cache
def _launch_calls() -> tuple[Any, Any]:
    """The driver's launch as CuPy calls it, and the error it raises."""
    from cupy_backends.cuda.api import driver

    return driver.launchKernel, driver.CUDADriverError


class PreparedLaunch:
    """A launch whose every argument but grid and stream is known; the record is read anew at each call. The caller keeps it in place.

    It goes straight to the driver. CuPy's launch packs its arguments anew each time: 4.4 us against 4.0, measured beside an H200.
    """

    __slots__ = ("_address", "_arguments", "_device_id", "_error", "_function", "_launch", "_num_threads", "_smem_bytes")

    def __init__(self, function: int, num_threads: int, smem_bytes: int, record: int, device_id: int) -> None:
        self._launch, self._error = _launch_calls()
        self._function, self._num_threads, self._smem_bytes = function, num_threads, smem_bytes
        self._arguments = _Arguments(record)
        self._address = ctypes.addressof(self._arguments)
        self._device_id = device_id

    def __call__(self, num_ctas: int, stream: int) -> None:
        """Queue the kernel on the stream of that handle. Its device must be the current one."""
        try:
            self._launch(self._function, num_ctas, 1, 1, self._num_threads, 1, 1, self._smem_bytes, stream, self._address, 0)
        except self._error as error:
            if error.status != _INVALID_CONTEXT:
                raise
            # The driver knows no current device in a thread that has not used CUDA before, where the runtime takes device 0.
            from cupy.cuda import runtime

            runtime.setDevice(self._device_id)
            self._launch(self._function, num_ctas, 1, 1, self._num_threads, 1, 1, self._smem_bytes, stream, self._address, 0)


def params_pointer(record: np.ndarray[Any, Any]) -> Any:
    """The launch argument for a parameter record, made once and reused while the record's fields are rewritten in place.

    Args:
        record: one element of the kernel's parameter dtype, shape () or (1,). The caller keeps it alive and in place.

    Raises:
        ArgumentError: not exactly one element.
    """
    if record.size != 1:
        raise ArgumentError(f"record: got shape {record.shape}, a kernel takes exactly one parameter record")
    from cupy.cuda.function import CPointer

    return CPointer(record.ctypes.data)


_loaded: dict[tuple[KernelVariant, DeviceProfile, int], LoadedKernel] = {}
_loading = threading.Lock()


def load_kernel(variant: KernelVariant, profile: DeviceProfile, device_id: int, cache: CubinCache | None = None) -> LoadedKernel:
    """The kernel of a variant on a device: loaded before, or compiled if need be and loaded now.

    Args:
        variant: which kernel.
        profile: the device's profile; gives the arch and the shared memory the tile shape is chosen for.
        device_id: CUDA device ordinal.
        cache: where cubins are kept, by default `default_cache()`.

    Raises:
        UnsupportedError: the kernel does not fit the device's shared memory.
        CompileError: it had to be compiled, and that failed.
        BackendUnavailable: no CuPy or no such device, or the device cannot run the cubin.
    """
    key = (variant, profile, device_id)
    kernel = _loaded.get(key)
    if kernel is None:
        require_device(device_id)
        source = kernel_source(variant, profile)
        compiled = (cache or default_cache()).get(source, profile.arch)
        with _loading:
            kernel = _loaded.get(key)
            if kernel is None:
                kernel = _loaded[key] = load_cubin(source, compiled, device_id)
    return kernel


def load_cubin(source: KernelSource, compiled: CompiledKernel, device_id: int) -> LoadedKernel:
    """Load a cubin on a device and allow it the dynamic shared memory its source asks for.

    Raises:
        BackendUnavailable: no CuPy, no such device, or the device refuses the cubin.
    """
    require_device(device_id)
    from cupy.cuda import Device
    from cupy.cuda.function import Module
    from cupy_backends.cuda.api import driver

    with Device(device_id):
        module = Module()
        try:
            module.load(compiled.cubin)
            function = module.get_function(source.entry)
            if source.smem_bytes:
                driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, source.smem_bytes)
        except driver.CUDADriverError as error:
            raise BackendUnavailable(
                f"device {device_id} refuses {source.name} with {source.smem_bytes} bytes of shared memory: {error}"
            ) from error
    return LoadedKernel(source.name, function, device_id, source.smem_bytes, compiled.report)


def require_device(device_id: int) -> None:
    """Raise BackendUnavailable unless CuPy is installed and sees that device."""
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailable(f"CuPy cannot be imported ({error}); pip install 'cupyinfer[cuda12]' or 'cupyinfer[cuda13]'") from error
    count = cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0
    if not 0 <= device_id < count:
        raise BackendUnavailable(f"device {device_id} is not there: CuPy sees {count} CUDA devices")
