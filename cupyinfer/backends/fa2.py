# SPDX-License-Identifier: Apache-2.0
"""The fa2 backend: one mma.sync kernel per variant, launched with one packed parameter record."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.backends.arrays import RunArrays, RunScales
from cupyinfer.backends.params import ATTENTION_PARAMS
from cupyinfer.backends.staging import staging_pool
from cupyinfer.interop import ArrayView, current_stream_ptr, is_capturing, use_device
from cupyinfer.jit.module import load_kernel
from cupyinfer.jit.variant import AttentionVariant
from cupyinfer.schedule.profile import DeviceProfile

# What changes from run to run: five pointers at the start of the record, and the strides together.
_ARRAYS = struct.Struct("<5Q")
_STRIDES = struct.Struct("<10q")
#: What changes from plan to plan: where the plan's records, page table and partial results lie.
_PLANNED = struct.Struct("<6Q")
#: And how many tile records there are, how to get from unit to unit, and the entries of the page table: all, and per tile.
_STEPS = struct.Struct("<4i")
_CODES = {"u8": "Q", "i8": "q", "i4": "i", "f4": "f"}
#: How to write one field of the record, and where.
_FIELDS = {
    name: (struct.Struct("<" + _CODES[f"{dtype.kind}{dtype.itemsize}"]).pack_into, offset)
    for name, (dtype, offset, *_) in (ATTENTION_PARAMS.fields or {}).items()
}
#: Per-head values and masks that a plan may bring.
_VALUES = ("alibi_slopes", "sinks", "mask")
#: Tells launchers apart, from 1 on: addresses of objects are used again.
_numbers = itertools.count(1)
_STRIDES_OFFSET, _PLANNED_OFFSET, _STEPS_OFFSET = (_FIELDS[name][1] for name in ("q_stride_token", "tiles", "max_tiles"))


class PlanAddresses(NamedTuple):
    """Device addresses that a plan fixes, in the order of the kernel's parameters."""

    tiles: int
    cta_work: int
    merge_groups: int
    page_indices: int
    partial_o: int
    partial_lse: int


class Fa2Kernel:
    """A loaded kernel with the parameters that all plans of the same options have in common.

    Args:
        variant: which kernel; it is compiled and loaded here.
        profile: the device's profile.
        device_id: CUDA device ordinal.
        fields: values of AttentionParams fields by name.
        scales: factors of runs that do not bring any.
    """

    #: Layout of the kernel's parameters: ATTENTION_PARAMS, or what begins with one as its field `base`.
    PARAMS = ATTENTION_PARAMS

    def __init__(
        self, variant: AttentionVariant, profile: DeviceProfile, device_id: int, fields: dict[str, Any], scales: RunScales
    ) -> None:
        self.device_id = device_id
        self.config = variant.tile_config(profile.smem_per_sm, profile.smem_per_cta)
        self.kernel = load_kernel(variant, profile, device_id)
        self.staging = staging_pool(device_id)
        self.scales = scales
        record = np.zeros(1, self.PARAMS)
        base = record if self.PARAMS is ATTENTION_PARAMS else record["base"]
        for name, value in {**fields, "sm_scale": scales.sm_scale, "v_scale_tensor": 1.0}.items():
            base[name] = value
        user_bytes = 0 if variant.user is None else struct.calcsize(variant.user.struct_format)
        parameters = record.tobytes() + bytes(user_bytes)
        memory = (ctypes.c_char * len(parameters)).from_buffer_copy(parameters)
        #: The parameters of every launch of this kernel. The driver copies them, so the next launch may change them.
        self.record = memoryview(memory).cast("B")
        self.launch = self.kernel.prepared(32 * self.config.num_warps, self.config.smem_bytes, ctypes.addressof(memory))
        #: Held while the record is written and launched. What it holds besides the options: whose plan, and strides and scales of a run.
        self.lock = threading.Lock()
        self.planned_by = 0
        self.strides: tuple[int, ...] | None = None
        self.run_scales: RunScales | None = scales

    def set_field(self, name: str, value: Any) -> None:
        """Write one field of AttentionParams."""
        pack_into, offset = _FIELDS[name]
        pack_into(self.record, offset, value)

    def set_scales(self, scales: RunScales) -> None:
        """Write the factors of a run."""
        self.run_scales = None  # until all of them are written
        sm_scale, k_scale, v_scale, q_scale = scales
        self.set_field("q_scale", 0 if q_scale is None else q_scale.ptr)
        if isinstance(k_scale, ArrayView):
            self.set_field("k_scale", k_scale.ptr)
        else:
            self.set_field("k_scale", 0)
            sm_scale *= k_scale
        # float32 first: a number beyond its range becomes infinite, which packing refuses.
        self.set_field("sm_scale", np.float32(sm_scale))
        if isinstance(v_scale, ArrayView):
            self.set_field("v_scale", v_scale.ptr)
            self.set_field("v_scale_tensor", 1.0)
        else:
            self.set_field("v_scale", 0)
            self.set_field("v_scale_tensor", np.float32(v_scale))
        # Arrays of scales are the caller's, not to be kept alive from run to run.
        self.run_scales = None if any(isinstance(scale, ArrayView) for scale in scales[1:]) else scales


class Fa2Launcher:
    """A planned kernel on one device.

    Args:
        kernel: what to launch.
        addresses: where the plan lies.
        steps: tile records there is room for, what leads from one unit of a share to the next, entries of the page table, and how many
            of them a tile has where all have equally many.
        values: addresses of per-head values and masks, by the name of their AttentionParams field.
        num_ctas: CTAs of the launch.
        held: kept alive as long as this launcher: what the addresses point to.
    """

    def __init__(
        self,
        kernel: Fa2Kernel,
        addresses: PlanAddresses,
        steps: tuple[int, int, int, int],
        values: dict[str, int],
        num_ctas: int,
        held: object,
    ) -> None:
        self.device_id = kernel.device_id
        self._kernel = kernel
        self._planned = addresses, steps, values
        self._number = next(_numbers)
        self._num_ctas = num_ctas
        self._held = held
        self._uploaded: Any = None
        self._uploaded_on = 0

    def upload(self, fill: Callable[[npt.NDArray[np.uint8]], None], num_bytes: int, destination: int, stream: int) -> None:
        """Queue the copy of a plan's records to the int workspace, on the stream of that handle."""
        with use_device(self.device_id):
            self._uploaded = self._kernel.staging.upload(fill, num_bytes, destination, stream)
            self._uploaded_on = stream

    def copy(self, source: int, num_bytes: int, destination: int) -> None:
        """Queue a copy within device memory behind the upload."""
        import cupy

        runtime = cupy.cuda.runtime
        with use_device(self.device_id):
            runtime.memcpyAsync(destination, source, num_bytes, runtime.memcpyDeviceToDevice, self._uploaded_on)
            self._uploaded = cupy.cuda.Event(disable_timing=True)
            self._uploaded.record(cupy.cuda.get_current_stream(self.device_id))

    def launch(self, arrays: RunArrays, scales: RunScales, user_values: bytes | None = None) -> None:
        """Queue the kernel on CuPy's current stream of the device, which must be current.

        Args:
            arrays: the arrays of this run.
            scales: its factors.
            user_values: the parameters of a user variant as its `struct_format` lays them out.
        """
        q, k, v, o, lse, strides, _ = arrays
        addresses = q.ptr, k.ptr, v.ptr, o.ptr, 0 if lse is None else lse.ptr
        self.launch_at(addresses, (q.shape, k.shape, v.shape, o.shape), strides, scales, user_values)

    def launch_at(
        self,
        addresses: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...],
        strides: tuple[int, ...],
        scales: RunScales,
        user_values: bytes | None = None,
    ) -> None:
        """As `launch`, by the addresses of q, k, v, o and lse (0: none), the shapes of the first four, and strides as in RunArrays."""
        if not self._num_ctas:
            return
        stream = current_stream_ptr(self.device_id)
        if stream != self._uploaded_on and self._uploaded is not None and not is_capturing(self.device_id):
            import cupy

            cupy.cuda.get_current_stream(self.device_id).wait_event(self._uploaded)
        kernel = self._kernel
        record = kernel.record
        with kernel.lock:
            _ARRAYS.pack_into(record, 0, *addresses)
            if kernel.planned_by != self._number:
                self._set_plan()
            if strides is not kernel.strides:
                kernel.strides = None  # until all of them are written
                _STRIDES.pack_into(record, _STRIDES_OFFSET, *strides)
                kernel.strides = strides
            if scales is not kernel.run_scales:
                kernel.set_scales(scales)
            if user_values is not None:
                record[ATTENTION_PARAMS.itemsize :] = user_values
            self._set_maps(addresses, shapes, strides)
            kernel.launch(self._num_ctas, stream)

    def _set_plan(self) -> None:
        """Write what this plan's launches have in common over what another plan's had."""
        kernel, (addresses, steps, values) = self._kernel, self._planned
        kernel.planned_by = 0  # until all of it is written
        _PLANNED.pack_into(kernel.record, _PLANNED_OFFSET, *addresses)
        _STEPS.pack_into(kernel.record, _STEPS_OFFSET, *steps)
        for name in _VALUES:
            kernel.set_field(name, values.get(name, 0))
        kernel.planned_by = self._number

    def _set_maps(self, addresses: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], strides: tuple[int, ...]) -> None:
        """Write what a kernel needs of the arrays besides addresses and strides; fa2 needs nothing."""
