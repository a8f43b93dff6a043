# SPDX-License-Identifier: Apache-2.0
"""Where everything lies in the two workspaces: the one layout that sizing and planning share."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from cupyinfer.errors import StateError
from cupyinfer.schedule.counting import tuple_new
from cupyinfer.schedule.partition import CTA_INTS, GROUP_INTS
from cupyinfer.schedule.tiling import TILE_INTS
from cupyinfer.workspace import WORKSPACE_ALIGNMENT, AlignedAllocator, WorkspaceSize

_TILE_BYTES, _CTA_BYTES, _GROUP_BYTES = 4 * TILE_INTS, 4 * CTA_INTS, 4 * GROUP_INTS


class RegionCounts(NamedTuple):
    """How many records each region must hold: of one batch, or of the largest one a capacity allows.

    Attributes:
        num_tiles: tile records.
        num_ctas: CTA records.
        num_merge_groups: merge groups.
        num_partial_rows: rows of partial results.
        head_dim_vo: width of a row of partial results, in float32 elements.
        num_page_indices: page-table entries kept in the int workspace, or None when the caller's device array is read.
        value_bytes: bytes of per-head values and masks given on the host, or None.
    """

    num_tiles: int
    num_ctas: int
    num_merge_groups: int
    num_partial_rows: int
    head_dim_vo: int
    num_page_indices: int | None = None
    value_bytes: int | None = None


class Offsets(NamedTuple):
    """First byte of every region; -1 for one that the plan does not have. Fields as in PlanInfo."""

    tiles: int
    cta_work: int
    merge_groups: int
    page_indices: int
    values: int
    partial_o: int
    partial_lse: int


_INT_REGIONS, _FLOAT_REGIONS = Offsets._fields[:5], Offsets._fields[5:]


def _layout(counts: RegionCounts) -> tuple[Offsets, tuple[int | None, ...], int, int]:
    """The one description of both workspaces: where regions begin, their bytes (None for an absent one), and where int and float end."""
    num_tiles, num_ctas, num_merge_groups, num_partial_rows, head_dim_vo, num_page_indices, value_bytes = counts
    # Records are multiples of the alignment, and so are rows of partial results.
    tiles, merge_groups = _TILE_BYTES * num_tiles, _GROUP_BYTES * num_merge_groups
    # Records of the CTAs, and one more for the queue of units that they share.
    cta_work = _CTA_BYTES * (num_ctas + 1) if num_ctas else 0
    cta_work_at = tiles
    merge_groups_at = cta_work_at + cta_work
    int_bytes = merge_groups_at + merge_groups
    page_indices, page_indices_at, values_at = None, -1, -1
    if num_page_indices is not None:
        page_indices, page_indices_at = 4 * num_page_indices, int_bytes
        int_bytes += page_indices
    if value_bytes is not None:
        values_at = -(-int_bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        int_bytes = values_at + value_bytes
    partial_o, partial_lse = 4 * head_dim_vo * num_partial_rows, 4 * num_partial_rows
    offsets = tuple_new(Offsets, (0, cta_work_at, merge_groups_at, page_indices_at, values_at, 0, partial_o))
    sizes = tiles, cta_work, merge_groups, page_indices, value_bytes, partial_o, partial_lse
    return offsets, sizes, int_bytes, partial_o + partial_lse


class Region(NamedTuple):
    """One region for a memory map."""

    workspace: str
    name: str
    offset: int
    num_bytes: int


def lay_out(counts: RegionCounts, float_allocator: AlignedAllocator, int_allocator: AlignedAllocator) -> Offsets:
    """Reserve every region, in order, from the beginning of both workspaces. Counting and placing allocators give the same offsets.

    Raises:
        WorkspaceError: a placing allocator's buffer is too small; the error names the region.
        StateError: an allocator holds regions already.
    """
    offsets, sizes, int_bytes, float_bytes = _layout(counts)
    if int_allocator.reserve(int_bytes) != 0:
        _name_what_does_not_fit(sizes, _INT_REGIONS, int_allocator)
    if float_allocator.reserve(float_bytes) != 0:
        _name_what_does_not_fit(sizes, _FLOAT_REGIONS, float_allocator)
    return offsets


def _name_what_does_not_fit(sizes: tuple[int | None, ...], regions: tuple[str, ...], allocator: AlignedAllocator) -> NoReturn:
    for name, num_bytes in zip(Offsets._fields, sizes, strict=True):
        if num_bytes is not None and name in regions:
            allocator.aligned_alloc_offset(num_bytes, WORKSPACE_ALIGNMENT, name)
    raise StateError(f"{allocator.name}: holds regions already, a plan begins where the workspace does")


def measure(counts: RegionCounts) -> WorkspaceSize:
    """Bytes of both workspaces."""
    float_allocator, int_allocator = AlignedAllocator(), AlignedAllocator()
    lay_out(counts, float_allocator, int_allocator)
    return tuple_new(WorkspaceSize, (float_allocator.num_allocated_bytes, int_allocator.num_allocated_bytes))


def memory_map(counts: RegionCounts) -> list[Region]:
    """Every region with its workspace, offset and bytes, in layout order."""
    offsets, sizes, _, _ = _layout(counts)
    return [
        Region("float" if name in _FLOAT_REGIONS else "int", name, offset, num_bytes)
        for name, offset, num_bytes in zip(Offsets._fields, offsets, sizes, strict=True)
        if num_bytes is not None
    ]
