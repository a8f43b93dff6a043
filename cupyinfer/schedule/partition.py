# SPDX-License-Identifier: Apache-2.0
"""Cutting a line of iterations evenly over CTAs, and naming the parts that the cuts make."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.counting import counting, room_for, scalar

Ints = npt.NDArray[np.int64]

#: Fields of a CTA's record and of a merge group's, in order; docs/ARCHITECTURE.md gives their meaning.
CTA_FIELDS = ("num_whole_units", "unit", "iter_begin", "num_iters", "head_group", "head_part", "tail_group", "tail_part")
GROUP_FIELDS = ("first_row", "num_parts", *(f"arrived_{warp}" for warp in range(8)), "unused_0", "unused_1")
CTA_INTS = len(CTA_FIELDS)
GROUP_INTS = len(GROUP_FIELDS)

_NONE, _ONE = scalar(-1), scalar(1)
_NO_GROUP = np.array(-1, np.int32)
_NO_GROUPS = np.empty((0, GROUP_INTS), np.int32)


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
    return _NO_GROUPS


@lru_cache(maxsize=16)
def whole_units_only(num_ctas: int, num_units: int) -> npt.NDArray[np.int32]:
    """CTA records of a schedule in which every unit is done by one CTA; read-only, since they are kept between plans."""
    cta_work = _with_whole_units(num_ctas, num_units, -1)
    cta_work.flags.writeable = False
    return cta_work


def _with_whole_units(num_ctas: int, num_units: int, part: int) -> npt.NDArray[np.int32]:
    cta_work = _idle_ctas(room_for(num_ctas), part)[:num_ctas].copy()
    if num_units:
        cta_work[:, 0] = num_units
    return cta_work


@lru_cache(maxsize=16)
def _idle_ctas(num_ctas: int, part: int) -> npt.NDArray[np.int32]:
    """Records of CTAs without work, to copy from."""
    cta_work = np.empty((num_ctas, CTA_INTS), np.int32)
    cta_work[:] = (0, 0, 0, 0, -1, part, -1, part)
    cta_work.flags.writeable = False
    return cta_work


class _Cuts(NamedTuple):
    """An evenly cut line.

    Attributes:
        fields: int64 [6, shares + 1], what a share's record says from `unit` to `tail_group`; the last column is the end of the line.
        num_groups: units that more than one share works on.
        num_parts: [num_groups] parts of each, or None where all have two.
        num_rows: [num_groups] valid query rows of each, or those of every one.
    """

    fields: Ints
    num_groups: int
    num_parts: Ints | None
    num_rows: npt.NDArray[Any] | int

    def merge_groups(self, heads: int) -> tuple[npt.NDArray[np.int32], int]:
        """As merge_groups_of, every group as often as there are heads that are cut alike, all heads of one after the other."""
        num_groups, num_parts, num_rows = self.num_groups * heads, self.num_parts, self.num_rows
        if num_parts is None and isinstance(num_rows, int):
            return merge_groups_alike(num_groups, 2, num_rows)
        parts = scalar(2) if num_parts is None else num_parts if heads == 1 else num_parts.repeat(heads)
        return merge_groups_of(parts, parts * (num_rows if isinstance(num_rows, int) or heads == 1 else num_rows.repeat(heads)))


def cut_line(
    iterations: Ints,
    tile_begin: Ints | None,
    longest: int,
    num_rows: npt.NDArray[np.int32] | int,
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
        tile_begin: [num_tiles + 1] iterations of all units before each tile, and of all units at the end; None where all are as long.
        longest: most iterations of a unit.
        num_rows: [num_tiles] valid query rows of each tile, or those of every tile.
        num_kv_heads: units per tile.
        num_ctas: records to return.
        num_whole_units: leading units that are not part of the line.
        shares: CTAs that get a range; no more than the line has iterations.
    """
    line_begin = num_whole_units * longest
    if num_whole_units and tile_begin is not None:
        whole_tile, whole_head = divmod(num_whole_units, num_kv_heads)
        line_begin = tile_begin.item(whole_tile) + whole_head * iterations.item(whole_tile)
    cuts = _cut(iterations, tile_begin, longest, num_rows, num_kv_heads, line_begin, shares)
    cta_work = _with_whole_units(num_ctas, num_whole_units, 0)
    cta_work[:shares, 1:-1] = cuts.fields[:, :-1].T
    return Partition(cta_work, *cuts.merge_groups(1))


def cut_line_of_each_head(
    iterations: Ints,
    tile_begin: Ints | None,
    longest: int,
    num_rows: npt.NDArray[np.int32] | int,
    num_kv_heads: int,
    num_ctas: int,
    shares: int,
) -> Partition:
    """Cut the line of every KV head alike into `shares` ranges; CTA ``share * num_kv_heads + head`` gets that share of that head.

    Merge group ``g * num_kv_heads + head`` is the unit of that head in the ``g``-th tile that is cut. There are at most
    ``2 * (shares - 1)`` parts per head. Arguments as for `cut_line`, but for:

    Args:
        tile_begin: [num_tiles + 1] iterations of one head before each tile, and of all tiles at the end; None as above.
        shares: CTAs per head.
    """
    cuts = _cut(iterations, tile_begin, longest, num_rows, 1, 0, shares)
    of_share = np.zeros((shares, CTA_INTS), np.int32)
    of_share[:, 1:-1] = cuts.fields[:, :-1].T
    share, factors, added = _by_head(shares, num_kv_heads)
    of_share *= factors
    cta_work = of_share.take(share, axis=0)
    cta_work += added
    # Nothing but the group of a segment without one is less than that.
    np.maximum(cta_work, _NO_GROUP, out=cta_work)
    if num_ctas > len(cta_work):
        busy, cta_work = cta_work, _with_whole_units(num_ctas, 0, 0)
        cta_work[: len(busy)] = busy
    return Partition(cta_work, *cuts.merge_groups(num_kv_heads))


@lru_cache(maxsize=16)
def _by_head(shares: int, num_kv_heads: int) -> tuple[Ints, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """What makes records of all heads out of those of one, whose units are tiles and whose groups are counted per tile.

    The share of every CTA, int32 [shares, 8] factors of that share's fields, and int32 [num_ctas, 8] what its head adds to them.
    """
    share, head = np.divmod(counting(shares * num_kv_heads), num_kv_heads)
    factors, added = np.ones((shares, CTA_INTS), np.int32), np.zeros((len(head), CTA_INTS), np.int32)
    for name in ("unit", "head_group", "tail_group"):
        factors[:, CTA_FIELDS.index(name)] = num_kv_heads
        added[:, CTA_FIELDS.index(name)] = head
    for kept in (share, factors, added):
        kept.flags.writeable = False
    return share, factors, added


def _cut(
    iterations: Ints,
    tile_begin: Ints | None,
    longest: int,
    num_rows: npt.NDArray[np.int32] | int,
    num_kv_heads: int,
    line_begin: int,
    shares: int,
) -> _Cuts:
    """The cuts of a line that begins so many iterations after the first unit; arguments as for cut_line."""
    line_end = len(iterations) * num_kv_heads * longest if tile_begin is None else tile_begin.item(-1)
    line_length = line_end - line_begin
    cuts = counting(shares + 1) * np.array(line_length)
    cuts //= scalar(shares)
    if line_begin:
        cuts += np.array(line_begin)
    # What becomes of every cut, a row per field and in order those of CTA_FIELDS from `unit` on. The last cut is the end of the line.
    fields = np.empty((CTA_INTS - 2, shares + 1), np.int64)
    unit, inside, group, part = fields[0], fields[1], fields[3], fields[4]
    if tile_begin is None:
        np.divmod(cuts, np.array(longest), unit, inside)
    else:
        tile = tile_begin[1:].searchsorted(cuts, side="right")
        np.subtract(cuts, tile_begin.take(tile), inside)
        if num_kv_heads == 1:
            unit[:] = tile
        else:
            np.divmod(inside, iterations.take(tile, mode="clip"), unit, inside)
            unit += tile * scalar(num_kv_heads)
    np.subtract(cuts[1:], cuts[:-1], fields[2, :-1])

    # Part n of a unit begins at the n-th cut inside it: that many parts of its unit lie before a cut.
    several = line_length < shares * longest
    if several:
        np.subtract(counting(shares + 2)[1:], cuts.searchsorted(cuts - inside, side="right"), part)
        divides = np.minimum(part, _ONE)
        np.add.accumulate(part == _ONE, dtype=np.int64, out=group)
    else:  # cuts are as far apart as the longest unit, so no two are inside the same one
        divides = np.minimum(inside, _ONE, out=part)
        np.add.accumulate(divides, out=group)
    num_groups = group.item(-1)
    num_parts = np.bincount(group.compress(divides))[1:] + _ONE if several else None
    rows = num_rows if isinstance(num_rows, int) else num_rows.take(unit.compress(part == _ONE) // scalar(num_kv_heads))

    # A segment has the group of a cut that it begins or ends at inside its unit. A share's first segment may do either, its last one,
    # when that is another, only the latter, and is then part 0.
    group *= divides
    group -= _ONE
    fields[5, :-1] = group[1:]
    if several:
        alone = unit[1:] == unit[:-1]
        np.copyto(group[:-1], group[1:], where=alone)
        np.copyto(fields[5, :-1], _NONE, where=alone)
    return _Cuts(fields, num_groups, num_parts, rows)


def merge_groups_of(num_parts: Ints, rows: Ints) -> tuple[npt.NDArray[np.int32], int]:
    """Records of merge groups of so many parts that own so many rows of partial results, and how many rows those are together."""
    if not len(rows):
        return no_groups(), 0
    end_row = np.add.accumulate(rows)
    groups = np.zeros((len(rows), GROUP_INTS), np.int32)
    groups[:, 0] = end_row - rows
    groups[:, 1] = num_parts
    return groups, end_row.item(-1)


def merge_groups_alike(num_groups: int, num_parts: int, num_rows: int) -> tuple[npt.NDArray[np.int32], int]:
    """As merge_groups_of, for groups that all have as many parts of as many rows; read-only, since the records are kept."""
    return _groups_alike(room_for(num_groups), num_parts, num_rows)[:num_groups], num_groups * num_parts * num_rows


@lru_cache(maxsize=16)
def _groups_alike(num_groups: int, num_parts: int, num_rows: int) -> npt.NDArray[np.int32]:
    groups, _ = merge_groups_of(scalar(num_parts), np.full(num_groups, num_parts * num_rows))
    groups.flags.writeable = False
    return groups
