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
    cta_work = np.empty((num_ctas, CTA_INTS), np.int32)
    cta_work[:] = (num_units, 0, 0, 0, -1, -1, -1, -1)
    return cta_work


def cut_line(
    iterations: npt.NDArray[np.int32],
    tile_begin: Ints,
    num_rows: npt.NDArray[np.int32],
    num_kv_heads: int,
    num_ctas: int,
    num_whole_units: int,
    shares: int,
) -> Partition:
    """Cut what follows the whole units into `shares` consecutive ranges of equal length, one per CTA from the first on.

    A unit with ``c`` cuts inside it becomes a merge group of ``c + 1`` parts in order along the keys. Each cut lies in at most one
    unit, so there are at most ``2 * (shares - 1)`` parts whatever the batch: stream-K, as in arXiv 2301.03598, and
    arXiv 2405.10480 for decode.

    Args:
        iterations: [num_tiles] iterations of each tile's units.
        tile_begin: [num_tiles + 1] iterations of all units before each tile, and of all units at the end.
        num_rows: [num_tiles] valid query rows of each tile.
        num_kv_heads: units per tile.
        num_ctas: records to return.
        num_whole_units: leading units that are not part of the line.
        shares: CTAs that get a range; no more than the line has iterations.
    """
    whole_tile, whole_head = divmod(num_whole_units, num_kv_heads)
    line_begin = int(tile_begin[whole_tile]) + whole_head * int(iterations[whole_tile])
    line_length = int(tile_begin[-1]) - line_begin
    cuts = np.arange(shares + 1) * line_length // shares + line_begin
    # Position of every cut as (unit, iteration inside it); the last cut is the end of the line, iteration 0 of no unit.
    tile = tile_begin.searchsorted(cuts, side="right") - 1
    head, inside = np.divmod(cuts - tile_begin[tile], iterations.take(tile, mode="clip"))
    unit = tile * num_kv_heads + head

    cta_work = whole_units_only(num_ctas, num_whole_units)
    cta_work[:shares, 1] = unit[:-1]
    cta_work[:shares, 2] = inside[:-1]
    cta_work[:shares, 3] = cuts[1:] - cuts[:-1]

    cut = inside.nonzero()[0]
    if not cut.size:
        return Partition(cta_work, no_groups(), 0)
    # Part n of a unit ends at its cut n, counted from 0, and part n + 1 begins there.
    unit_begin = cuts[cut] - inside[cut]
    part = cut - cuts.searchsorted(unit_begin, side="right")
    first_cut = cut[part == 0]
    group = first_cut.searchsorted(cut, side="right") - 1
    cta_work[cut, 4] = group
    cta_work[cut, 5] = part + 1
    # The share before a cut ends in the cut's unit: with its first segment if it began there, else with its last.
    share = cut - 1
    field = share * CTA_INTS + np.where(cuts[share] < unit_begin, 6, 4)
    fields = cta_work.reshape(-1)
    fields[field] = group
    fields[field + 1] = part

    num_parts = np.bincount(group) + 1
    rows = num_parts * num_rows[tile[first_cut]]
    end_row = rows.cumsum()
    merge_groups = np.zeros((len(rows), GROUP_INTS), np.int32)
    merge_groups[:, 0] = end_row - rows
    merge_groups[:, 1] = num_parts
    return Partition(cta_work, merge_groups, int(end_row[-1]))
