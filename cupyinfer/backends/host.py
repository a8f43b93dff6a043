# SPDX-License-Identifier: Apache-2.0
"""The host backend: runs a plan in NumPy, CTA by CTA, from the same workspace records the GPU kernels read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cupyinfer.backends.host_segment import LOG2_E, NO_GROUP, FloatArray, HostProblem, Tile, attend, tile_rows


class Segment(NamedTuple):
    """Consecutive iterations of one unit done by one CTA; `group` is NO_GROUP when they are all of the unit's."""

    unit: int
    iter_begin: int
    num_iters: int
    group: int
    part: int


class _CtaWork(NamedTuple):
    """One record of the `cta_work` region."""

    num_whole_units: int
    unit: int
    iter_begin: int
    num_iters: int
    head_group: int
    head_part: int
    tail_group: int
    tail_part: int


def run_host(problem: HostProblem) -> None:
    """Do the work of every CTA of a plan, writing `o`, `lse` and the partial results in place.

    The `arrived` counters must be zero, as planning leaves them, and are zero again afterwards, also after an interruption.
    """
    try:
        for cta in range(len(problem.cta_work)):
            run_cta(problem, cta)
    except BaseException:
        problem.merge_groups[:, 2] = 0
        raise


def run_cta(problem: HostProblem, cta: int) -> None:
    """Do the work of one CTA. CTAs may run in any order: the last to arrive at a merge group merges it."""
    # Infinities are values here (no visible key, a float16 overflow), as they are on the GPU.
    with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
        for segment in cta_segments(problem, cta):
            _run_segment(problem, segment)


def cta_segments(problem: HostProblem, cta: int) -> Iterator[Segment]:
    """The segments of one CTA, in order: its whole units, then its range of the line of iterations."""
    work = _CtaWork._make(problem.cta_work[cta].tolist())
    grid = len(problem.cta_work)
    for wave in range(-(-work.num_whole_units // grid)):
        unit = wave * grid + (grid - 1 - cta if wave % 2 else cta)
        if unit < work.num_whole_units:
            yield _whole_segment(problem, unit, 0, _unit_iters(problem, unit))
    unit, iter_begin, remaining = work.unit, work.iter_begin, work.num_iters
    while remaining > 0:
        num_iters = min(remaining, _unit_iters(problem, unit) - iter_begin)
        if remaining == work.num_iters:
            group, part = work.head_group, work.head_part
        elif remaining == num_iters:
            group, part = work.tail_group, work.tail_part
        else:
            group, part = NO_GROUP, 0
        whole = _whole_segment(problem, unit, iter_begin, num_iters)
        yield whole if group == NO_GROUP else whole._replace(group=group, part=part)
        unit, iter_begin, remaining = unit + problem.unit_step, 0, remaining - num_iters


def _whole_segment(problem: HostProblem, unit: int, iter_begin: int, num_iters: int) -> Segment:
    """A segment that no CTA shares: it has a group only where the plan split the tile itself."""
    tile, kv_head = _tile_of(problem, unit)
    group = tile.split_group + kv_head if tile.split_group != NO_GROUP else NO_GROUP
    return Segment(unit, iter_begin, num_iters, group, tile.split_part)


def _tile_of(problem: HostProblem, unit: int) -> tuple[Tile, int]:
    tile_idx, kv_head = divmod(unit, problem.num_kv_heads)
    return Tile._make(problem.tiles[tile_idx].tolist()), kv_head


def _unit_iters(problem: HostProblem, unit: int) -> int:
    tile, _ = _tile_of(problem, unit)
    return max(1, -(-(tile.kv_end - tile.kv_begin) // problem.kv_tile))


def _run_segment(problem: HostProblem, segment: Segment) -> None:
    tile, kv_head = _tile_of(problem, segment.unit)
    key_begin = tile.kv_begin + segment.iter_begin * problem.kv_tile
    key_end = min(tile.kv_end, key_begin + segment.num_iters * problem.kv_tile)
    o, lse = attend(problem, tile, kv_head, key_begin, key_end)
    if segment.group == NO_GROUP:
        _write_output(problem, tile, kv_head, o, lse)
        return
    group = problem.merge_groups[segment.group]
    first_row, num_parts, arrived = group[:3].tolist()
    begin = first_row + segment.part * tile.num_rows
    problem.partial_o[begin : begin + tile.num_rows] = o
    problem.partial_lse[begin : begin + tile.num_rows] = lse
    group[2] = arrived + 1
    if arrived + 1 == num_parts:
        group[2] = 0
        _write_output(problem, tile, kv_head, *_merge_parts(problem, first_row, num_parts, tile.num_rows))


def _merge_parts(problem: HostProblem, first_row: int, num_parts: int, num_rows: int) -> tuple[FloatArray, FloatArray]:
    """Weighted mean of the parts of one unit, added in part order, and its base-2 log-sum-exp."""
    rows = slice(first_row, first_row + num_parts * num_rows)
    lse = problem.partial_lse[rows].reshape(num_parts, num_rows)
    o = problem.partial_o[rows].reshape(num_parts, num_rows, -1)
    largest = lse.max(axis=0)
    # A row no part has keys for would subtract -inf from -inf.
    weights = np.exp2(lse - np.where(largest == -np.inf, np.float32(0), largest))
    total = weights.sum(axis=0)
    merged = (weights[:, :, None] * o).sum(axis=0) / np.where(total > 0, total, np.float32(1))[:, None]
    return merged, largest + np.log2(total)


def _write_output(problem: HostProblem, tile: Tile, kv_head: int, o: FloatArray, lse: FloatArray) -> None:
    """Write a unit's final rows; the one place where sinks and the scale of V join, whatever the split."""
    tokens, heads = tile_rows(problem, tile, kv_head)
    if problem.sinks is not None:
        with_sink = np.logaddexp2(lse, problem.sinks[heads].astype(np.float32) * LOG2_E)
        # A row without keys has weight 0 even where the sink is -inf too.
        o = o * np.where(lse == -np.inf, np.float32(0), np.exp2(lse - with_sink))[:, None]
        lse = with_sink
    problem.o[tokens, heads] = (o * problem.scale_of(problem.v_scale, kv_head)).astype(problem.o.dtype)
    if problem.lse is not None:
        problem.lse[tokens, heads] = lse
