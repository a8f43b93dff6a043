# SPDX-License-Identifier: Apache-2.0
"""What is commonly reserved without knowing the need, to compare exact sizes with."""

from __future__ import annotations

from cupyinfer.workspace import WorkspaceSize

#: The float buffer FlashInfer's documentation has users allocate, and the int buffer its wrappers allocate themselves.
RESERVE = WorkspaceSize(128 * 2**20, 8 * 2**20)
