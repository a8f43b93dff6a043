# SPDX-License-Identifier: Apache-2.0
"""Order of prefill tiles and times of whole units and of a line, against their definitions, a unit at a time."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyinfer.schedule.geometry import ragged_prefill_geometry
from cupyinfer.schedule.order import UNIT_COST, busiest_time, least_line_time, least_time, line_time, order_tiles
from cupyinfer.schedule.partition import cut_line, cut_line_of_each_head
from cupyinfer.schedule.tiling import KeySpan, make_tiles
from tests.schedule.batches import offsets

iteration_lists = st.lists(st.integers(1, 30), min_size=1, max_size=60)


def as_ints(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def dealt(iterations: list[int], num_kv_heads: int, grid: int) -> float:
    """Time of the busiest CTA, from every unit's CTA."""
    time = [0.0] * grid
    for unit in range(len(iterations) * num_kv_heads):
        wave, cta = divmod(unit, grid)
        time[cta if wave % 2 == 0 else grid - 1 - cta] += iterations[unit // num_kv_heads] + UNIT_COST
    return max(time)


@given(iterations=iteration_lists, num_kv_heads=st.integers(1, 16), grid=st.integers(1, 140))
def test_the_busiest_cta(iterations: list[int], num_kv_heads: int, grid: int) -> None:
    time = busiest_time(as_ints(iterations), num_kv_heads, grid)
    assert time == dealt(iterations, num_kv_heads, grid)
    assert time >= least_time(sum(iterations), len(iterations), num_kv_heads, grid)


@given(iterations=iteration_lists, num_kv_heads=st.integers(1, 4), shares=st.integers(1, 40))
def test_a_line_takes_no_less_than_it_may(iterations: list[int], num_kv_heads: int, shares: int) -> None:
    tile_begin = as_ints(offsets(iterations).tolist()) * num_kv_heads
    total = sum(iterations) * num_kv_heads
    shares = min(shares, total)
    time = line_time(as_ints(iterations), tile_begin, num_kv_heads, shares)
    assert least_line_time(total, len(iterations) * num_kv_heads, shares) <= time
    # Of every iteration of the line its unit: a share has those from one cut to the next.
    unit = np.arange(len(iterations) * num_kv_heads).repeat(np.repeat(iterations, num_kv_heads))
    begins = np.append(unit, len(iterations) * num_kv_heads)[np.arange(shares + 1) * total // shares]
    assert time == total / shares + UNIT_COST * (int(np.diff(begins).max()) + 1)


@pytest.mark.parametrize("causal", [False, True])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 600)), min_size=1, max_size=12),
    keys_in_l2=st.integers(1, 2000),
    num_kv_heads=st.integers(1, 3),
    grid=st.integers(1, 9),
)
def test_sections_by_turns(causal: bool, lengths: list[tuple[int, int]], keys_in_l2: int, num_kv_heads: int, grid: int) -> None:
    queries, keys = ([each[at] for each in lengths] for at in (0, 1))
    tiles = make_tiles(ragged_prefill_geometry(offsets(queries), offsets(keys)), 2, 16, 64, KeySpan(causal))
    if not len(tiles.records):
        return
    iterations = np.maximum(-(-tiles.keys // 64), 1)
    longest, total = int(iterations.max()), int(iterations.sum())
    order, ordered, time = order_tiles(tiles, iterations, longest, total, num_kv_heads, grid, keys_in_l2)
    assert ordered.tolist() == iterations[order].tolist()
    assert time == dealt(ordered.tolist(), num_kv_heads, grid)

    held = [length if query_len else 0 for query_len, length in lengths]
    share = [begin // keys_in_l2 for begin in accumulate(held[:-1], initial=0)]
    section = {each: at for at, each in enumerate(sorted(set(share)))}
    of_tile = [section[share[request]] for request in tiles.records[:, 0].tolist()]
    last = of_tile[-1]
    turn = [(of_tile[at], -each if (last - of_tile[at]) % 2 == 0 else each) for at, each in enumerate(iterations.tolist())]
    by_section = sorted(range(len(turn)), key=lambda at: turn[at])
    longest_first = sorted(range(len(turn)), key=lambda at: -int(iterations[at]))
    assert order.tolist() in (by_section, longest_first)
    section_time, other_time = (dealt(iterations[each].tolist(), num_kv_heads, grid) for each in (by_section, longest_first))
    if section_time <= other_time:
        assert order.tolist() == by_section


@given(
    num_tiles=st.integers(1, 12),
    longest=st.integers(1, 40),
    num_kv_heads=st.integers(1, 4),
    shares=st.integers(1, 30),
    whole=st.integers(0, 20),
    rows=st.none() | st.integers(1, 128),
)
def test_units_of_one_length_are_cut_alike_by_arithmetic(
    num_tiles: int, longest: int, num_kv_heads: int, shares: int, whole: int, rows: int | None
) -> None:
    iterations = np.full(num_tiles, longest)
    num_rows = np.arange(1, num_tiles + 1, dtype=np.int32) if rows is None else rows
    whole = min(whole, num_tiles * num_kv_heads - 1)
    shares = min(shares, (num_tiles * num_kv_heads - whole) * longest)
    begin = np.arange(num_tiles + 1) * longest
    found, expected = (
        cut_line(iterations, tile_begin, longest, num_rows, num_kv_heads, shares + 2, whole, shares)
        for tile_begin in (None, begin * num_kv_heads)
    )
    of_head = min(shares, num_tiles * longest)
    found_by_head, expected_by_head = (
        cut_line_of_each_head(iterations, tile_begin, longest, num_rows, num_kv_heads, of_head * num_kv_heads, of_head)
        for tile_begin in (None, begin)
    )
    for one, other in ((found, expected), (found_by_head, expected_by_head)):
        assert one.cta_work.tolist() == other.cta_work.tolist()
        assert one.merge_groups.tolist() == other.merge_groups.tolist()
        assert one.num_partial_rows == other.num_partial_rows
