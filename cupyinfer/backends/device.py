# SPDX-License-Identifier: Apache-2.0
"""The GPU as the schedule sees it: a DeviceProfile read from the driver."""

from __future__ import annotations

from functools import lru_cache

from cupyinfer.errors import BackendUnavailable
from cupyinfer.schedule.profile import DeviceProfile, arch_for_capability


def has_gpu() -> bool:
    """Whether CuPy is installed and sees a CUDA GPU."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


_NO_GPU = "no CUDA GPU is visible through CuPy; name one to size for with profile=, such as 'h200'"


@lru_cache(maxsize=64)
def read_profile(device_id: int) -> DeviceProfile:
    """The profile of a GPU of this machine.

    Raises:
        BackendUnavailable: no CuPy, or no such device.
    """
    if not has_gpu():
        raise BackendUnavailable(_NO_GPU)
    from cupy.cuda import runtime

    if not 0 <= device_id < runtime.getDeviceCount():
        raise BackendUnavailable(f"device {device_id} is not there: CuPy sees {runtime.getDeviceCount()} CUDA devices")
    properties = runtime.getDeviceProperties(device_id)
    return DeviceProfile(
        name=properties["name"].decode(),
        arch=arch_for_capability(properties["major"], properties["minor"]),
        num_sms=properties["multiProcessorCount"],
        smem_per_sm=properties["sharedMemPerMultiprocessor"],
        smem_per_cta=properties["sharedMemPerBlockOptin"],
    )


def current_device() -> int:
    """Index of CuPy's current device.

    Raises:
        BackendUnavailable: no CuPy, or no GPU.
    """
    if not has_gpu():
        raise BackendUnavailable(_NO_GPU)
    from cupy.cuda import runtime

    return int(runtime.getDevice())
