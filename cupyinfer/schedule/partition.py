# SPDX-License-Identifier: Apache-2.0
"""Cutting a line of iterations evenly over CTAs, and naming the parts that the cuts make."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.counting import counting

Ints = npt.NDArray[np.int64]

#: Fields of a CTA's record and of a merge group's, in order; docs/ARCHITECTURE.md gives their meaning.
CTA_FIELDS = ("num_whole_units", "unit", "iter_begin", "num_iters", "head_group", "head_part", "tail_group", "tail_part")
GROUP_FIELDS = ("first_row", "num_parts", *(f"arrived_{warp}" for warp in range(8)), "unused_0", "unused_1")
CTA_INTS = len(CTA_FIELDS)
GROUP_INTS = len(GROUP_FIELDS)


# An array of one number spares NumPy the conversion of a Python int, which takes as long as 200 additions.
_ONE = np.array(1)


class Partition(NamedTuple):
    """Who computes what.

    Attributes:
        cta_work: int32 [num_ctas, 8], fields as CTA_FIELDS.
        merge_groups: int32 [num_groups, 12], fields as GROUP_FIELDS.
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
    cta_work = _idle_ctas(num_ctas).copy()
    if num_units:
        cta_work[:, 0] = num_units
    return cta_work


@lru_cache(maxsize=16)
def _idle_ctas(num_ctas: int) -> npt.NDArray[np.int32]:
    """Records of CTAs without work, to copy from: the number of CTAs of a GPU hardly ever changes."""
    cta_work = np.empty((num_ctas, CTA_INTS), np.int32)
    cta_work[:] = (0, 0, 0, 0, -1, -1, -1, -1)
    cta_work.flags.writeable = False
    return cta_work


def _ones_unless(condition: npt.NDArray[np.bool_]) -> Ints:
    """0 where it holds, else -1: with ``|``, what turns fields that do not apply into -1."""
    bits = condition.astype(np.int64)
    bits -= _ONE
    return bits


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
    line_begin = int(tile_begin[whole_tile]) + whole_head * int(iterations[whole_tile]) if num_whole_units else 0
    line_length = int(tile_begin[-1]) - line_begin
    number = counting(shares + 2)
    following, number = number[1:], number[:-1]
    cuts = number * line_length
    cuts //= shares
    if line_begin:
        cuts += line_begin
    # Position of every cut as (unit, iteration inside it); the last cut is the end of the line, iteration 0 of no unit.
    tile = tile_begin.searchsorted(cuts, side="right")
    tile -= _ONE
    inside = cuts - tile_begin[tile]
    of_unit = iterations.take(tile, mode="clip").astype(np.int64)
    # Exact up to 2^52, and several times faster than dividing integers.
    head = (inside / of_unit).astype(np.int64)
    inside -= head * of_unit
    unit = tile * num_kv_heads
    unit += head

    cta_work = whole_units_only(num_ctas, num_whole_units)
    share = cta_work[:shares]
    share[:, 1] = unit[:-1]
    share[:, 2] = inside[:-1]
    share[:, 3] = cuts[1:] - cuts[:-1]

    # The first cut inside the unit that a cut lies in, or begins: the next cut or a later one when this one only begins it.
    first = cuts.searchsorted(cuts - inside, side="right")
    opens = first == number
    group = np.add.accumulate(opens, dtype=np.int64)
    group -= _ONE
    num_groups = int(group[-1]) + 1
    if not num_groups:
        return Partition(cta_work, no_groups(), 0)
    # Part n of a unit ends at its cut n, counted from 0, and part n + 1 begins there. So a share's first segment is as many parts in
    # as cuts of its unit lie before it, and belongs to no group when its unit has no cut.
    first_of_share = first[:-1]
    own = unit[:-1]
    outside = _ones_unless(unit[first_of_share] == own)
    share[:, 4] = group[first_of_share] | outside
    share[:, 5] = (following[:-1] - first_of_share) | outside
    # A share's last segment, when that is another one and the next cut lies inside its unit, is that unit's part 0.
    inner = first <= number
    outside = _ones_unless(inner[1:] & (unit[1:] != own))
    share[:, 6] = group[1:] | outside
    share[:, 7] = outside

    opening = opens.nonzero()[0]
    num_parts = np.bincount(group[inner])
    num_parts += _ONE
    rows = num_rows[tile[opening]].astype(np.int64)
    rows *= num_parts
    end_row = np.add.accumulate(rows)
    merge_groups = np.zeros((num_groups, GROUP_INTS), np.int32)
    merge_groups[:, 0] = end_row - rows
    merge_groups[:, 1] = num_parts
    return Partition(cta_work, merge_groups, int(end_row[-1]))
