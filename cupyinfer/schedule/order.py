# SPDX-License-Identifier: Apache-2.0
"""In which order a batch's unequal prefill tiles are worked on, and how long the busiest CTA then takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.counting import counting, most, scalar
from cupyinfer.schedule.tiling import Tiles

#: What a unit costs besides its iterations, in iterations: queries that arrive, the first softmax, the output. Before fa3
#: joined its segments, both prefill kernels lost about 2.5 us per unit on an H200, and an iteration of 128 keys takes 1.7 us.
UNIT_COST = 1.5
#: Sections may make the busiest CTA this much busier than the longest-first order would.
_UNEVEN_SECTIONS = 1.02


def order_tiles(
    tiles: Tiles, iterations: npt.NDArray[np.int64], longest: int, total: int, num_kv_heads: int, grid: int, keys_in_l2: int
) -> tuple[npt.NDArray[np.int64], float]:
    """The order for unequal tiles, and the time of its busiest CTA when whole units are dealt out to `grid` CTAs.

    Longest first leaves short units for the end, where they even out the rest, but every wave then touches the keys of every request.
    So a batch is worked on in sections of consecutive requests whose keys stay in L2 together. Sections alternate between longest and
    shortest first, the last one longest first: neighbouring waves stay alike, as the turning deal of units needs, and the end is short.

    Args:
        tiles: what `make_tiles` returned.
        iterations: [num_tiles] iterations of each tile's units.
        longest: most of them.
        total: all of them together.
        num_kv_heads: units per tile.
        grid: CTAs.
        keys_in_l2: keys of a section, of all heads.
    """
    shortness = scalar(longest) - iterations
    section = _sections(tiles, keys_in_l2)
    last = section.item(-1)
    by_section, section_time = None, 0.0
    if last:
        key = np.where((scalar(last) - section) & scalar(1), iterations, shortness)
        key += section * scalar(longest + 1)
        by_section = _stable_order(key, (last + 1) * (longest + 1))
        section_time = busiest_time(iterations.take(by_section), num_kv_heads, grid)
        # Where sections are nearly as even as anything can be, the other order cannot beat them.
        if section_time <= _UNEVEN_SECTIONS * least_time(total, len(iterations), num_kv_heads, grid):
            return by_section, section_time
    longest_first = _stable_order(shortness, longest)
    time = busiest_time(iterations.take(longest_first), num_kv_heads, grid)
    return (longest_first, time) if by_section is None or section_time > _UNEVEN_SECTIONS * time else (by_section, section_time)


def _stable_order(key: npt.NDArray[np.int64], largest: int) -> npt.NDArray[np.int64]:
    """The order of keys from 0 to at most `largest`, equal ones as they come. NumPy sorts 16 bits several times as fast as 64."""
    return (key.astype(np.uint16) if largest < 1 << 16 else key).argsort(kind="stable")


def _sections(tiles: Tiles, keys_in_l2: int) -> npt.NDArray[np.int64]:
    """Section of each tile, counted from 0 without gaps. Requests without tiles have no keys in it."""
    share = np.add.accumulate(tiles.request_keys)
    share -= tiles.request_keys
    share //= scalar(max(1, keys_in_l2))
    section = np.zeros(len(share), np.int64)
    np.add.accumulate(share[1:] != share[:-1], dtype=np.int64, out=section[1:])
    of_tile: npt.NDArray[np.int64] = section.take(tiles.request)
    return of_tile


def busiest_time(iterations: npt.NDArray[np.int64], num_kv_heads: int, grid: int) -> float:
    """Time of the busiest CTA, in iterations, when units are dealt out in that order in waves that turn round."""
    num_units = len(iterations) * num_kv_heads
    num_waves = -(-num_units // grid)
    waves = np.empty(-(-num_waves // 2) * 2 * grid, np.int64)
    waves[num_units:] = 0
    waves[:num_units].reshape(-1, num_kv_heads)[:] = iterations[:, None]
    of_both = np.add.reduce(waves.reshape(-1, 2 * grid))  # even waves, and odd ones
    work = of_both[:grid] + of_both[: grid - 1 : -1]
    # Not all CTAs have a unit in the last wave.
    in_last = num_units - (num_waves - 1) * grid
    busy, idle = (work[:in_last], work[in_last:]) if num_waves % 2 else (work[grid - in_last :], work[: grid - in_last])
    time = most(busy) + UNIT_COST * num_waves
    return max(time, most(idle) + UNIT_COST * (num_waves - 1)) if len(idle) else time


def least_time(total: int, num_tiles: int, num_kv_heads: int, grid: int) -> float:
    """What `busiest_time` is at least, in whatever order: the average of all CTAs."""
    return (total + UNIT_COST * num_tiles) * num_kv_heads / grid


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
    return total / shares + UNIT_COST * (most(unit[1:] - unit[:-1]) + 1)
