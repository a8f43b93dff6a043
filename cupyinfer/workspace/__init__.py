# SPDX-License-Identifier: Apache-2.0
"""Workspaces the caller owns: the allocator that sizes and places them, and the sizes it reports."""

from cupyinfer.workspace.allocator import WORKSPACE_ALIGNMENT, AlignedAllocator, check_alignment
from cupyinfer.workspace.size import WorkspaceSize

__all__ = ["WORKSPACE_ALIGNMENT", "AlignedAllocator", "WorkspaceSize", "check_alignment"]
