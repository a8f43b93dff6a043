# SPDX-License-Identifier: Apache-2.0
"""In which order a batch's unequal prefill tiles are worked on, and how long the busiest CTA then takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: What a unit costs besides its iterations, in iterations: queries that arrive, the first softmax, the output. Before fa3
#: joined its segments, both prefill kernels lost about 2.5 us per unit on an H200, and an iteration of 128 keys takes 1.7 us.
UNIT_COST = 1.5
#: Sections may make the busiest CTA this much busier than the longest-first order would.
_UNEVEN_SECTIONS = 1.02


def order_tiles(
    tiles: npt.NDArray[np.int32], iterations: npt.NDArray[np.int64], num_kv_heads: int, grid: int, keys_in_l2: int
) -> tuple[npt.NDArray[np.int64], float]:
    """The order for unequal tiles, and the time of its busiest CTA when whole units are dealt out to `grid` CTAs.

    Longest first leaves short units for the end, where they even out the rest, but every wave then touches the keys of every request.
    So a batch is worked on in sections of consecutive requests whose keys stay in L2 together. Sections alternate between longest and
    shortest first, the last one longest first: neighbouring waves stay alike, as the turning deal of units needs, and the end is short.

    Args:
        tiles: int32 [num_tiles, 12] of `make_tiles`, request by request.
        iterations: [num_tiles] iterations of each tile's units.
        num_kv_heads: units per tile.
        grid: CTAs.
        keys_in_l2: keys of a section, of all heads.
    """
    longest_first = (-iterations).argsort(kind="stable")
    time = busiest_time(iterations[longest_first], num_kv_heads, grid)
    section = _sections(tiles, keys_in_l2)
    last = int(section[-1])
    if last == 0:
        return longest_first, time
    direction = 2 * ((last - section) & 1) - 1  # -1 for longest first
    key = section.astype(np.int64) << 32
    key += direction * iterations
    by_section = key.argsort(kind="stable")
    section_time = busiest_time(iterations[by_section], num_kv_heads, grid)
    return (by_section, section_time) if section_time <= _UNEVEN_SECTIONS * time else (longest_first, time)


def _sections(tiles: npt.NDArray[np.int32], keys_in_l2: int) -> npt.NDArray[np.int64]:
    """Section of each tile, counted from 0 without gaps."""
    begins = np.ones(len(tiles), bool)
    np.not_equal(tiles[1:, 0], tiles[:-1, 0], out=begins[1:])
    kv_len = tiles[begins, 6].astype(np.int64)
    share = (kv_len.cumsum() - kv_len) // max(1, keys_in_l2)
    section = np.zeros(len(kv_len), np.int64)
    np.cumsum(share[1:] != share[:-1], out=section[1:])
    of_tile: npt.NDArray[np.int64] = section[begins.cumsum() - 1]
    return of_tile


def busiest_time(iterations: npt.NDArray[np.int64], num_kv_heads: int, grid: int) -> float:
    """Time of the busiest CTA, in iterations, when units are dealt out in that order in waves that turn round."""
    units = np.repeat(iterations, num_kv_heads)
    num_waves = -(-len(units) // grid)
    waves = np.zeros((num_waves, grid))
    times = waves.reshape(-1)[: len(units)]
    times[:] = units
    times += UNIT_COST
    waves[1::2] = waves[1::2, ::-1]
    return float(waves.sum(axis=0).max())


def line_time(iterations: npt.NDArray[np.int64], tile_begin: npt.NDArray[np.int64], num_kv_heads: int, shares: int) -> float:
    """Time of the busiest CTA, in iterations, when the line of all units is cut into shares of as many iterations each.

    Args:
        iterations: [num_tiles] iterations of each tile's units, in order.
        tile_begin: [num_tiles + 1] iterations of all units before each tile, and of all units at the end.
        num_kv_heads: units per tile.
        shares: CTAs.
    """
    total = int(tile_begin[-1])
    cuts = np.arange(shares + 1) * total // shares
    tile = tile_begin.searchsorted(cuts, side="right") - 1
    unit = tile * num_kv_heads + (cuts - tile_begin[tile]) // iterations.take(tile, mode="clip")
    return total / shares + UNIT_COST * (int(np.diff(unit).max()) + 1)
