# SPDX-License-Identifier: Apache-2.0
"""Cutting a line of iterations evenly over CTAs, and naming the parts that the cuts make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

#: Fields of a CTA's record and of a merge group's, in order; docs/ARCHITECTURE.md gives their meaning.
CTA_FIELDS = ("num_whole_units", "unit", "iter_begin", "num_iters", "head_group", "head_part", "tail_group", "tail_part")
GROUP_FIELDS = ("first_row", "num_parts", "arrived", "unused")
CTA_INTS = len(CTA_FIELDS)
GROUP_INTS = len(GROUP_FIELDS)


@dataclass(frozen=True, eq=False)
class Partition:
    """Who computes what.

    Attributes:
        cta_work: int32 [num_ctas, 8], fields as CTA_FIELDS.
        merge_groups: int32 [num_groups, 4], fields as GROUP_FIELDS.
        num_partial_rows: rows of partial results that the groups own together.
    """

    cta_work: npt.NDArray[np.int32]
    merge_groups: npt.NDArray[np.int32]
    num_partial_rows: int


def no_groups() -> npt.NDArray[np.int32]:
    """Merge groups of a schedule that shares nothing."""
    return np.empty((0, GROUP_INTS), np.int32)


def whole_units_only(num_ctas: int, num_units: int) -> npt.NDArray[np.int32]:
    """CTA records of a schedule in which every unit is done by one CTA."""
    cta_work = np.full((num_ctas, CTA_INTS), -1, np.int32)
    cta_work[:, 0] = num_units
    cta_work[:, 1:4] = 0
    return cta_work


def cut_line(
    iterations: Ints, num_rows: npt.NDArray[np.int32], num_kv_heads: int, num_ctas: int, num_whole_units: int, shares: int
) -> Partition:
    """Cut what follows the whole units into `shares` consecutive ranges of equal length, one per CTA from the first on.

    A unit with a cut inside it becomes a merge group, its pieces the group's parts in order along the keys. Each cut lies in at
    most one unit, so there are at most ``2 * (shares - 1)`` parts whatever the batch: stream-K, as in arXiv 2301.03598, and
    arXiv 2405.10480 for decode.

    Args:
        iterations: [num_tiles] iterations of each tile's units.
        num_rows: [num_tiles] valid query rows of each tile.
        num_kv_heads: units per tile.
        num_ctas: records to return.
        num_whole_units: leading units that are not part of the line.
        shares: CTAs that get a range.
    """
    end = np.cumsum(iterations * num_kv_heads)
    whole_tile, whole_head = divmod(num_whole_units, num_kv_heads)
    line_begin = int(end[whole_tile] - (num_kv_heads - whole_head) * iterations[whole_tile])
    line_length = int(end[-1]) - line_begin
    cuts = line_begin + np.arange(shares + 1) * line_length // shares
    # Position of every cut as (unit, iteration inside it); the last cut is the end of the line, iteration 0 of no unit.
    tile = np.searchsorted(end, cuts[:-1], side="right")
    per_unit = iterations[tile]
    head, inside = np.divmod(cuts[:-1] - end[tile] + per_unit * num_kv_heads, per_unit)
    unit = np.append(tile * num_kv_heads + head, len(iterations) * num_kv_heads)
    inside = np.append(inside, 0)
    num_iters = cuts[1:] - cuts[:-1]

    cta_work = whole_units_only(num_ctas, num_whole_units)
    cta_work[:shares, 1] = unit[:-1]
    cta_work[:shares, 2] = inside[:-1]
    cta_work[:shares, 3] = num_iters

    ends_inside = (inside[1:] > 0) & (num_iters > 0)
    one_unit = unit[1:] == unit[:-1]
    shared = np.empty((shares, 2), bool)  # (first segment, last segment) of every share
    shared[:, 0] = ((inside[:-1] > 0) | (ends_inside & one_unit)) & (num_iters > 0)
    shared[:, 1] = ends_inside & ~one_unit
    part_of = np.flatnonzero(shared.reshape(-1))
    if not part_of.size:
        return Partition(cta_work, no_groups(), 0)
    # Along the line, the parts of one unit follow each other.
    part_unit = np.stack([unit[:-1], unit[1:]], axis=1).reshape(-1)[part_of]
    begins_group = np.empty(len(part_unit), bool)
    begins_group[0] = True
    np.not_equal(part_unit[1:], part_unit[:-1], out=begins_group[1:])
    first = np.flatnonzero(begins_group)
    group = np.cumsum(begins_group) - 1
    part = np.arange(len(part_unit)) - first[group]
    named = cta_work[:shares, 4:].reshape(shares, 2, 2)
    slots = np.full((2 * shares, 2), -1, np.int32)
    slots[part_of, 0] = group
    slots[part_of, 1] = part
    named[:] = slots.reshape(shares, 2, 2)
    cta_work[:shares, 4:] = named.reshape(shares, 4)

    merge_groups = np.zeros((len(first), GROUP_INTS), np.int32)
    num_parts = np.diff(np.append(first, len(part_unit)))
    rows = num_parts * num_rows[part_unit[first] // num_kv_heads]
    merge_groups[:, 0] = np.cumsum(rows) - rows
    merge_groups[:, 1] = num_parts
    return Partition(cta_work, merge_groups, int(rows.sum()))
