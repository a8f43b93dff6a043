# SPDX-License-Identifier: Apache-2.0
"""Workspaces of exactly the size that was asked for, between guard bytes that show every write beside them."""

from __future__ import annotations

from cupyinfer.cli.replay.memory import Array, Memory
from cupyinfer.workspace import WorkspaceSize

_GUARD_BYTES = 256
_GUARD_VALUE = 0xA5
#: What a workspace holds at first: NaN as a float, -1 as an integer. No result may depend on it.
_DIRT = 0xFF


class GuardedWorkspaces:
    """The two workspaces of one plan.

    Args:
        memory: where they lie.
        size: their bytes.

    Attributes:
        float_buffer: uint8 array, or None for 0 bytes.
        int_buffer: uint8 array, or None for 0 bytes.
    """

    def __init__(self, memory: Memory, size: WorkspaceSize) -> None:
        self._memory = memory
        self._whole = [memory.filled(num_bytes + 2 * _GUARD_BYTES, _GUARD_VALUE) for num_bytes in size]
        self.float_buffer, self.int_buffer = (self._payload(array) for array in self._whole)

    def _payload(self, whole: Array) -> Array | None:
        payload = whole[_GUARD_BYTES : len(whole) - _GUARD_BYTES]
        self._memory.fill(payload, _DIRT)
        return payload if len(payload) else None

    def damaged(self) -> list[str]:
        """Which guards were written to, after the work on the workspaces is done."""
        found = []
        for whole, name in zip(self._whole, ("float", "int"), strict=True):
            for guard, side in ((whole[:_GUARD_BYTES], "before"), (whole[len(whole) - _GUARD_BYTES :], "behind")):
                if (self._memory.fetch(guard) != _GUARD_VALUE).any():
                    found.append(f"bytes {side} the {name} workspace were written")
        return found
