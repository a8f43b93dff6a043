# SPDX-License-Identifier: Apache-2.0
"""In which order a batch's unequal prefill tiles are worked on, and how long the busiest CTA then takes."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.counting import counting, most, scalar
from cupyinfer.schedule.tiling import Tiles

#: What a unit costs besides its iterations, in iterations: queries that arrive, the first softmax, the output. Before fa3
#: joined its segments, both prefill kernels lost about 2.5 us per unit on an H200, and an iteration of 128 keys takes 1.7 us.
UNIT_COST = 1.5
_UNIT_COST = np.array(UNIT_COST)
#: Sections may make the busiest CTA this much busier than the longest-first order would.
_UNEVEN_SECTIONS = 1.02


def order_tiles(
    tiles: Tiles, iterations: npt.NDArray[np.int64], longest: int, total: int, num_kv_heads: int, grid: int, keys_in_l2: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], float]:
    """The order for unequal tiles, their iterations in it, and the time of its busiest CTA when `grid` CTAs are dealt whole units.

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
    by_section = None
    section = _sections(tiles, keys_in_l2)
    last = 0 if section is None else section.item(-1)
    if section is not None and last:
        bits = longest.bit_length()
        key, largest = _section_keys(last, bits).take(section), ((last + 1) << bits) - 1
        key ^= iterations
        by_section = _timed(_stable_order(key, largest), iterations, num_kv_heads, grid)
        # Where sections are nearly as even as anything can be, the other order cannot beat them.
        if by_section[2] <= _UNEVEN_SECTIONS * least_time(total, len(iterations), num_kv_heads, grid):
            return by_section
    longest_first = _timed(_stable_order(scalar(longest) - iterations, longest), iterations, num_kv_heads, grid)
    return longest_first if by_section is None or by_section[2] > _UNEVEN_SECTIONS * longest_first[2] else by_section


def _timed(
    order: npt.NDArray[np.int64], iterations: npt.NDArray[np.int64], num_kv_heads: int, grid: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], float]:
    ordered = iterations.take(order)
    return order, ordered, busiest_time(ordered, num_kv_heads, grid)


def _stable_order(key: npt.NDArray[np.int64], largest: int) -> npt.NDArray[np.int64]:
    """The order of keys from 0 to at most `largest`, equal ones as they come. NumPy sorts 16 bits several times as fast as 64."""
    return (key.astype(np.uint16) if largest < 1 << 16 else key).argsort(kind="stable")


def _sections(tiles: Tiles, keys_in_l2: int) -> npt.NDArray[np.int64] | None:
    """Section of each tile, counted from 0 without gaps; None where there is but one. Requests without tiles have no keys in it."""
    keys, longest, keys_in_l2 = tiles.request_keys, tiles.longest_request, max(1, keys_in_l2)
    if (len(keys) - 1) * longest < keys_in_l2:  # the last request begins in the first section
        return None
    section = np.add.accumulate(keys)
    section -= keys
    if section.item(-1) < keys_in_l2:
        return None
    section //= scalar(keys_in_l2)
    if longest > keys_in_l2:  # shorter requests leave no gaps
        np.add.accumulate(section[1:] != section[:-1], dtype=np.int64, out=section[1:])
    return section if tiles.per_request is None else section.repeat(tiles.per_request)


@lru_cache(maxsize=64)
def _section_keys(last: int, bits: int) -> npt.NDArray[np.int64]:
    """What sorts tiles by section when combined with their iterations, of so many bits, by exclusive or: one number for every section.

    The bits above count sections. Where those of the iterations are set, it sorts longest first.
    """
    key = np.arange(last + 1) << bits
    key[last % 2 :: 2] |= (1 << bits) - 1
    key.flags.writeable = False
    return key


def busiest_time(iterations: npt.NDArray[np.int64], num_kv_heads: int, grid: int) -> float:
    """Time of the busiest CTA, in iterations, when units are dealt out in that order in waves that turn round."""
    # Neighbouring CTAs have the heads of the same tiles, in every wave: one stands for as many as two waves and a tile's heads divide by.
    alike = gcd(2 * grid, num_kv_heads)
    width, heads = 2 * grid // alike, num_kv_heads // alike
    count = len(iterations) * heads
    waves = np.zeros((-(-count // width), width))
    np.add(iterations[:, None], _UNIT_COST, out=waves.reshape(-1)[:count].reshape(-1, heads))
    of_both = np.add.reduce(waves)  # even waves, and odd ones, which turn round
    of_both = of_both + of_both[::-1]
    time: float = of_both.item(of_both.argmax())
    return time


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
    total = tile_begin.item(-1)
    cuts = counting(shares + 1) * tile_begin[-1:]
    cuts //= scalar(shares)
    tile = tile_begin[1:].searchsorted(cuts, side="right")
    unit = (cuts - tile_begin.take(tile)) // iterations.take(tile, mode="clip")
    unit += tile * scalar(num_kv_heads)
    return _line_time(total, most(unit[1:] - unit[:-1]), shares)


def least_line_time(total: int, num_units: int, shares: int) -> float:
    """What `line_time` is at least, for units of `total` iterations in all: some share has no fewer of them than the average."""
    return _line_time(total, -(-num_units // shares), shares)


def _line_time(total: int, most_units: int, shares: int) -> float:
    return total / shares + UNIT_COST * (most_units + 1)
