# SPDX-License-Identifier: Apache-2.0
"""In which order a batch's unequal prefill tiles are worked on, and how long the busiest CTA then takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.counting import counting, ends, scalar

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
    longest = ends(iterations)[1]
    shortness = scalar(longest) - iterations
    longest_first = _stable_order(shortness, longest)
    time = busiest_time(iterations.take(longest_first), num_kv_heads, grid)
    section = _sections(tiles, keys_in_l2)
    last = section.item(-1)
    if last == 0:
        return longest_first, time
    key = np.where((scalar(last) - section) & scalar(1), iterations, shortness)
    key += section * scalar(longest + 1)
    by_section = _stable_order(key, (last + 1) * (longest + 1))
    section_time = busiest_time(iterations.take(by_section), num_kv_heads, grid)
    return (by_section, section_time) if section_time <= _UNEVEN_SECTIONS * time else (longest_first, time)


def _stable_order(key: npt.NDArray[np.int64], largest: int) -> npt.NDArray[np.int64]:
    """The order of keys from 0 to at most `largest`, equal ones as they come. NumPy sorts 16 bits several times as fast as 64."""
    return (key.astype(np.uint16) if largest < 1 << 16 else key).argsort(kind="stable")


def _sections(tiles: npt.NDArray[np.int32], keys_in_l2: int) -> npt.NDArray[np.int64]:
    """Section of each tile, counted from 0 without gaps."""
    request = tiles[:, 0]
    last = (request[1:] != request[:-1]).nonzero()[0]  # the last tile of every request but the last one
    begin = np.empty(len(last) + 2, np.int64)
    begin[0], begin[-1] = 0, len(tiles)
    np.add(last, scalar(1), out=begin[1:-1])
    kv_len = tiles[:, 6].take(begin[:-1])
    share = np.add.accumulate(kv_len, dtype=np.int64)
    share -= kv_len
    share //= scalar(max(1, keys_in_l2))
    section = np.zeros(len(kv_len), np.int64)
    np.add.accumulate(share[1:] != share[:-1], dtype=np.int64, out=section[1:])
    of_tile: npt.NDArray[np.int64] = section.repeat(begin[1:] - begin[:-1])
    return of_tile


def busiest_time(iterations: npt.NDArray[np.int64], num_kv_heads: int, grid: int) -> float:
    """Time of the busiest CTA, in iterations, when units are dealt out in that order in waves that turn round."""
    num_units = len(iterations) * num_kv_heads
    num_waves = -(-num_units // grid)
    waves = np.zeros((num_waves, grid), np.int64)
    waves.reshape(-1)[:num_units].reshape(-1, num_kv_heads)[:] = iterations[:, None]
    work = np.add.reduce(waves[::2])
    if num_waves > 1:
        work += np.add.reduce(waves[1::2])[::-1]
    # Not all CTAs have a unit in the last wave.
    in_last = num_units - (num_waves - 1) * grid
    busy, idle = (work[:in_last], work[in_last:]) if num_waves % 2 else (work[grid - in_last :], work[: grid - in_last])
    time = ends(busy)[1] + UNIT_COST * num_waves
    return max(time, ends(idle)[1] + UNIT_COST * (num_waves - 1)) if len(idle) else time


def line_time(iterations: npt.NDArray[np.int64], tile_begin: npt.NDArray[np.int64], num_kv_heads: int, shares: int) -> float:
    """Time of the busiest CTA, in iterations, when the line of all units is cut into shares of as many iterations each.

    Args:
        iterations: [num_tiles] iterations of each tile's units, in order.
        tile_begin: [num_tiles + 1] iterations of all units before each tile, and of all units at the end.
        num_kv_heads: units per tile.
        shares: CTAs.
    """
    total = int(tile_begin[-1])
    cuts = counting(shares + 1) * np.array(total)
    cuts //= scalar(shares)
    tile = tile_begin[1:].searchsorted(cuts, side="right")
    unit = (cuts - tile_begin.take(tile)) // iterations.take(tile, mode="clip")
    unit += tile * scalar(num_kv_heads)
    return total / shares + UNIT_COST * (ends(unit[1:] - unit[:-1])[1] + 1)
