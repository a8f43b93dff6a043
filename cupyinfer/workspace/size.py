# SPDX-License-Identifier: Apache-2.0
"""The answer to "how large must the workspaces be"."""

from __future__ import annotations

from typing import NamedTuple


class WorkspaceSize(NamedTuple):
    """Bytes of the two workspaces of one plan.

    Attributes:
        float_bytes: bytes for partial results; 0 when no work is shared between CTAs.
        int_bytes: bytes for the plan's records.
    """

    float_bytes: int
    int_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of both together."""
        return self.float_bytes + self.int_bytes
