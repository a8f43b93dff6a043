# SPDX-License-Identifier: Apache-2.0
"""The fa2 backend: one mma.sync kernel per variant, launched with one packed parameter record."""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np

from cupyinfer.backends.arrays import RunArrays, RunScales
from cupyinfer.backends.params import ATTENTION_PARAMS
from cupyinfer.backends.staging import staging_pool
from cupyinfer.interop import ArrayView, current_stream_ptr, is_capturing, use_device
from cupyinfer.jit.module import load_kernel, params_pointer
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.profile import DeviceProfile

# What changes from run to run: five pointers at the start of the record, and the strides together.
_ARRAYS = struct.Struct("<5Q")
_STRIDES = struct.Struct("<10q")
_STRIDES_OFFSET = ATTENTION_PARAMS.fields["q_stride_token"][1]  # type: ignore[index]


class Fa2Launcher:
    """A planned kernel on one device.

    Args:
        variant: which kernel; it is compiled and loaded here.
        profile: the device's profile.
        device_id: CUDA device ordinal.
    """

    #: Layout of the kernel's parameter record; it is ATTENTION_PARAMS, or begins with one as its field `base`.
    PARAMS = ATTENTION_PARAMS

    def __init__(self, variant: AttentionVariant, profile: DeviceProfile, device_id: int) -> None:
        self.device_id = device_id
        self.config = variant.tile_config(profile.smem_per_sm, profile.smem_per_cta)
        self.kernel = load_kernel(variant, profile, device_id)
        whole = np.zeros(1, self.PARAMS)
        self._bytes = memoryview(whole.view(np.uint8))  # type: ignore[arg-type]
        self._params = params_pointer(whole)
        self._record = whole if self.PARAMS is ATTENTION_PARAMS else whole["base"]
        self._lock = threading.Lock()
        self._grid = (0, 1, 1)
        self._block = (32 * self.config.num_warps, 1, 1)
        self._uploaded: Any = None
        self._uploaded_on = 0
        self._held: object = None

    def prepare(self, fields: dict[str, Any], num_ctas: int, held: object) -> None:
        """Set what stays the same between runs.

        Args:
            fields: values of AttentionParams fields by name.
            num_ctas: CTAs of the launch.
            held: kept alive as long as this launcher: what the pointers among `fields` point to.
        """
        for name, value in fields.items():
            self._record[name] = value
        self._grid = (num_ctas, 1, 1)
        self._held = held

    def upload(self, fill: Any, num_bytes: int, destination: int) -> None:
        """Queue the copy of a plan's records to the int workspace, on CuPy's current stream of the device."""
        import cupy

        with use_device(self.device_id):
            stream = cupy.cuda.get_current_stream(self.device_id)
            self._uploaded_on = int(stream.ptr)
            self._uploaded = staging_pool(self.device_id).upload(fill, num_bytes, destination, self._uploaded_on, stream)

    def copy(self, source: int, num_bytes: int, destination: int) -> None:
        """Queue a copy within device memory behind the upload."""
        import cupy

        runtime = cupy.cuda.runtime
        with use_device(self.device_id):
            runtime.memcpyAsync(destination, source, num_bytes, runtime.memcpyDeviceToDevice, self._uploaded_on)
            self._uploaded = cupy.cuda.Event(disable_timing=True)
            self._uploaded.record(cupy.cuda.get_current_stream(self.device_id))

    def launch(self, arrays: RunArrays, scales: RunScales) -> None:
        """Queue the kernel on CuPy's current stream of the device, which must be current."""
        if not self._grid[0]:
            return
        stream = current_stream_ptr(self.device_id)
        if stream != self._uploaded_on and self._uploaded is not None and not is_capturing(self.device_id):
            import cupy

            cupy.cuda.get_current_stream(self.device_id).wait_event(self._uploaded)
        q, k, v, o, lse, k_strides, v_strides = arrays
        with self._lock:
            _ARRAYS.pack_into(self._bytes, 0, q.ptr, k.ptr, v.ptr, o.ptr, 0 if lse is None else lse.ptr)
            _STRIDES.pack_into(self._bytes, _STRIDES_OFFSET, *q.strides[:2], *k_strides, *v_strides, *o.strides[:2])
            self._set_scales(scales)
            self._set_maps(arrays)
            self.kernel.launch(self._grid, self._block, self.config.smem_bytes, self._params)

    def _set_maps(self, arrays: RunArrays) -> None:
        """Write what a kernel needs of the arrays besides addresses and strides; fa2 needs nothing."""

    def _set_scales(self, scales: RunScales) -> None:
        record = self._record
        sm_scale, k_scale, v_scale = scales
        if isinstance(k_scale, ArrayView):
            record["k_scale"] = k_scale.ptr
        else:
            record["k_scale"] = 0
            sm_scale *= k_scale
        record["sm_scale"] = sm_scale
        if isinstance(v_scale, ArrayView):
            record["v_scale"], record["v_scale_tensor"] = v_scale.ptr, 1.0
        else:
            record["v_scale"], record["v_scale_tensor"] = 0, v_scale
