# SPDX-License-Identifier: Apache-2.0
"""The caller's two workspace buffers: what array type and device they are, and allocators over them."""

from __future__ import annotations

from typing import Any

from cupyinfer.attention.run_arrays import PlanMemories
from cupyinfer.backends.device import current_device, has_gpu
from cupyinfer.errors import ArgumentError, WorkspaceError
from cupyinfer.interop import CPU_DEVICE, Device, as_view, cuda_device, cupy_array, numpy_array, require_writable
from cupyinfer.schedule.plan_info import PlanInfo
from cupyinfer.schedule.planner import PlanDraft
from cupyinfer.workspace import AlignedAllocator, WorkspaceSize, check_alignment
from cupyinfer.workspace.allocator import buffer_address

BACKENDS = ("auto", "fa2", "fa3", "host")
_FLOAT_NAME, _INT_NAME = "float_workspace_buffer", "int_workspace_buffer"


def check_backend(backend: Any) -> str:
    """Return `backend`; raise ArgumentError unless it is one of BACKENDS."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ArgumentError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    return str(backend)


class Workspaces:
    """Two buffers of one device, seen as bytes.

    Attributes:
        float_bytes, int_bytes: the buffers as uint8, or None.
        float_address, int_address: of their first bytes, 0 without one.
        device: where both lie, or would have to.

    Args:
        float_buffer: any contiguous writable array, or None when no bytes are needed.
        int_buffer: the same.
        backend: "auto" takes what suits the buffers, "fa2" and "fa3" insist on a GPU, "host" on NumPy.

    Raises:
        WorkspaceError: a buffer is strided, unaligned or read-only, or lies where the backend cannot use it.
        ArgumentError: the buffers lie on different devices.
    """

    def __init__(self, float_buffer: Any, int_buffer: Any, backend: str = "auto") -> None:
        self.float_bytes, float_device = _bytes_of(float_buffer, _FLOAT_NAME)
        self.int_bytes, int_device = _bytes_of(int_buffer, _INT_NAME)
        self.float_address, self.int_address = _address(self.float_bytes), _address(self.int_bytes)
        self._allocators = AlignedAllocator(self.float_bytes, _FLOAT_NAME), AlignedAllocator(self.int_bytes, _INT_NAME)
        if float_device is not None and int_device is not None and float_device != int_device:
            raise ArgumentError(f"int_workspace_buffer: lies on {int_device}, float_workspace_buffer on {float_device}")
        if int_device is not None and float_device is not None and _overlap(self.float_bytes, self.int_bytes):
            raise WorkspaceError(f"{_INT_NAME}: shares memory with {_FLOAT_NAME}; partial results would overwrite the plan")
        self.device: Device = int_device or float_device or _default_device(backend)
        kind = {"fa2": "cuda", "fa3": "cuda", "host": "cpu"}.get(backend, self.device.kind)
        if self.device.kind != kind:
            raise WorkspaceError(f"workspace buffers: lie on {self.device}, backend {backend!r} needs them on {kind}")

    def allocators(self, draft: PlanDraft) -> tuple[AlignedAllocator, AlignedAllocator]:
        """Allocators that place into the buffers, with nothing allocated: the same ones every time.

        Raises:
            WorkspaceError: bytes are needed of a buffer that was not given.
        """
        if self.float_bytes is None or self.int_bytes is None:
            self._check_given(draft.size)
        floats, ints = allocators = self._allocators
        floats.clear()
        ints.clear()
        return allocators

    def memory(self, info: PlanInfo) -> PlanMemories:
        """The parts of the buffers that a plan uses."""
        floats, ints = self.float_address, self.int_address
        return (floats, floats + info.float_bytes, _FLOAT_NAME), (ints, ints + info.int_bytes, _INT_NAME)

    def _check_given(self, size: WorkspaceSize) -> None:
        for name, buffer, needed in ((_FLOAT_NAME, self.float_bytes, size.float_bytes), (_INT_NAME, self.int_bytes, size.int_bytes)):
            if needed and buffer is None:
                raise WorkspaceError(f"{name}: was not given, this plan needs {needed} bytes (workspace_size tells beforehand)")


def _address(buffer: Any) -> int:
    """Address of the first byte, 0 without a buffer."""
    return 0 if buffer is None else buffer_address(buffer)


def _overlap(first: Any, second: Any) -> bool:
    begins = buffer_address(first), buffer_address(second)
    return bool(first.nbytes and second.nbytes and begins[0] < begins[1] + second.nbytes and begins[1] < begins[0] + first.nbytes)


def _default_device(backend: str) -> Device:
    if backend in ("fa2", "fa3") or (backend == "auto" and has_gpu()):
        # Without a GPU a wrapper can still size for a named one; planning says what is missing.
        return cuda_device(current_device() if has_gpu() else 0)
    return CPU_DEVICE


def _bytes_of(buffer: Any, name: str) -> tuple[Any, Device | None]:
    if buffer is None:
        return None, None
    view = as_view(buffer, name)
    require_writable(view, name)
    array = numpy_array(view) if view.device.kind == "cpu" else cupy_array(view)
    if not array.flags.c_contiguous:
        raise WorkspaceError(f"{name}: got strides {view.strides} for shape {view.shape}, a workspace is contiguous")
    check_alignment(array, name)
    return array.reshape(-1).view("uint8"), view.device
