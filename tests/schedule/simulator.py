# SPDX-License-Identifier: Apache-2.0
"""What kernels do with a plan's records, in plain Python from docs/ARCHITECTURE.md, and checks of every promise made there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.plan_info import PlanInfo
from cupyinfer.schedule.planner import PlanDraft
from cupyinfer.workspace import AlignedAllocator

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[Any]

TILE = (
    "request", "q_begin", "row_begin", "num_rows", "kv_begin", "kv_end",
    "kv_len", "kv_base", "qo_len", "split_group", "split_part", "mask_begin",
)  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """Consecutive iterations of one unit by one CTA, and the keys they stand for."""

    cta: int
    tile: int
    head: int
    iter_begin: int
    num_iters: int
    kv_begin: int
    kv_end: int
    group: int
    part: int


@dataclass(frozen=True, eq=False)
class Placed:
    """A plan in an int workspace of exactly its size that held 0xFF bytes before."""

    info: PlanInfo
    tiles: list[dict[str, int]]
    cta_work: list[list[int]]
    merge_groups: list[list[int]]


def place(draft: PlanDraft) -> Placed:
    """Place a draft in workspaces of exactly its size and read its records back from the bytes."""
    floats, ints = dirty_bytes(draft.size.float_bytes), dirty_bytes(draft.size.int_bytes)
    info = draft.place(AlignedAllocator(floats, "float"), AlignedAllocator(ints, "int"))
    draft.write_records(info, ints)
    assert not len(floats) or (floats == 0xFF).all()

    def records(offset: int, count: int, width: int) -> list[list[int]]:
        assert offset % 16 == 0
        assert offset + 4 * width * count <= info.int_bytes
        return ints[offset : offset + 4 * width * count].view(np.int32).reshape(count, width).tolist()

    rest = [offset for offset in (info.page_indices_offset, info.values_offset) if offset >= 0]
    assert info.tiles_offset + 48 * info.num_tiles <= info.cta_work_offset
    queue_offset = info.cta_work_offset + 32 * info.num_ctas
    assert queue_offset + 32 * (info.num_ctas > 0) <= info.merge_groups_offset
    assert not info.num_ctas or records(queue_offset, 1, 8) == [[0] * 8]
    assert info.merge_groups_offset + 48 * info.num_merge_groups <= min([*rest, info.int_bytes])
    tiles = [dict(zip(TILE, tile, strict=True)) for tile in records(info.tiles_offset, info.num_tiles, 12)]
    cta_work = records(info.cta_work_offset, info.num_ctas, 8)
    return Placed(info, tiles, cta_work, records(info.merge_groups_offset, info.num_merge_groups, 12))


def dirty_bytes(count: int) -> Bytes:
    """A 16-byte aligned buffer of `count` bytes, all 0xFF."""
    block = np.full(count + 16, 0xFF, np.uint8)
    begin = -block.ctypes.data % 16
    return block[begin : begin + count]


def num_iters(tile: dict[str, int], kv_tile: int) -> int:
    return max(1, -(-(tile["kv_end"] - tile["kv_begin"]) // kv_tile))


def walk(placed: Placed, num_kv_heads: int) -> list[Segment]:
    """Segments of all CTAs, in the order in which each CTA does them."""
    segments = []
    grid, kv_tile = placed.info.num_ctas, placed.info.kv_tile

    def segment(cta: int, unit: int, begin: int, count: int, group: int, part: int) -> Segment:
        tile = placed.tiles[unit // num_kv_heads]
        if tile["split_group"] >= 0:
            assert group == -1
            group, part = tile["split_group"] + unit % num_kv_heads, tile["split_part"]
        first_key = tile["kv_begin"] + begin * kv_tile
        last_key = min(tile["kv_end"], first_key + count * kv_tile)
        return Segment(cta, unit // num_kv_heads, unit % num_kv_heads, begin, count, first_key, last_key, group, part)

    for cta, (whole, unit, begin, left, head_group, head_part, tail_group, tail_part) in enumerate(placed.cta_work):
        wave = 0
        while (taken := wave * grid + (grid - 1 - cta if wave % 2 else cta)) < whole:
            segments.append(segment(cta, taken, 0, num_iters(placed.tiles[taken // num_kv_heads], kv_tile), -1, 0))
            wave += 1
        group, part = head_group, head_part
        while left > 0:
            count = min(left, num_iters(placed.tiles[unit // num_kv_heads], kv_tile) - begin)
            assert count > 0
            segments.append(segment(cta, unit, begin, count, group, part))
            left -= count
            unit, begin = unit + placed.info.unit_step, 0
            is_last = 0 < left <= num_iters(placed.tiles[unit // num_kv_heads], kv_tile)
            group, part = (tail_group, tail_part) if is_last else (-1, 0)
    return segments


def check_units(placed: Placed, segments: list[Segment], num_kv_heads: int) -> None:
    """Every unit's iterations are done exactly once; it is written directly by one segment, or all its parts exist in key order."""
    by_unit = defaultdict(list)
    for segment in segments:
        by_unit[segment.tile, segment.head].append(segment)
    assert set(by_unit) == {(tile, head) for tile in range(len(placed.tiles)) for head in range(num_kv_heads)}
    for (tile, _), parts in by_unit.items():
        parts.sort(key=lambda segment: segment.iter_begin)
        ends = [segment.iter_begin + segment.num_iters for segment in parts]
        assert [segment.iter_begin for segment in parts] == [0, *ends[:-1]]
        assert ends[-1] == num_iters(placed.tiles[tile], placed.info.kv_tile)
        assert len(parts) == 1 or all(segment.group >= 0 for segment in parts)
        assert len({segment.group for segment in parts}) == 1


def check_merge_groups(placed: Placed, segments: list[Segment]) -> None:
    """The parts of a group are numbered along the keys, and groups own disjoint rows that fill the partial rows."""
    by_group = defaultdict(list)
    for segment in segments:
        if segment.group >= 0:
            by_group[segment.group].append(segment)
    assert set(by_group) == set(range(placed.info.num_merge_groups))
    rows = []
    for group, parts in by_group.items():
        first_row, num_parts, *rest = placed.merge_groups[group]
        assert not any(rest)
        assert sorted(segment.part for segment in parts) == list(range(num_parts))
        assert num_parts >= 2
        parts.sort(key=lambda segment: segment.part)
        assert all(left.kv_end == right.kv_begin for left, right in pairwise(parts))
        owners = {
            (segment.head, *(placed.tiles[segment.tile][name] for name in ("request", "row_begin", "num_rows", "q_begin")))
            for segment in parts
        }
        assert len(owners) == 1
        rows.append((first_row, first_row + num_parts * owners.pop()[3]))
    rows.sort()
    assert [begin for begin, _ in rows] == [0, *(end for _, end in rows)][: len(rows)]
    assert (rows[-1][1] if rows else 0) == placed.info.num_partial_rows
    assert placed.info.partial_lse_offset + 4 * placed.info.num_partial_rows <= placed.info.float_bytes


def visible_keys(qo_len: int, kv_len: int, group_size: int, causal: bool, window_left: int) -> tuple[Ints, Ints]:
    """First visible key and the one after the last, of every packed row."""
    position = kv_len - qo_len + np.arange(qo_len * group_size) // group_size
    end = np.minimum(position, kv_len - 1) + 1 if causal else np.full(len(position), kv_len)
    begin = np.maximum(0, position - window_left) if window_left >= 0 else np.zeros(len(position), np.int64)
    return begin, end


def check_cover(
    placed: Placed,
    segments: list[Segment],
    qo_lens: list[int],
    kv_lens: list[int],
    num_kv_heads: int,
    group_size: int,
    causal: bool,
    window: int,
) -> None:
    """Every (request, KV head, packed row, visible key) belongs to exactly one segment, and no segment leaves its request."""
    by_pair = defaultdict(list)
    for segment in segments:
        by_pair[placed.tiles[segment.tile]["request"], segment.head].append(segment)
    for request, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        begin, end = visible_keys(qo_len, kv_len, group_size, causal, window)
        keys = np.arange(kv_len)
        visible = (keys >= begin[:, None]) & (keys < end[:, None])
        for head in range(num_kv_heads):
            times = np.zeros(visible.shape, np.int8)
            written = np.zeros(len(begin), np.int8)
            for segment in by_pair[request, head]:
                tile = placed.tiles[segment.tile]
                rows = slice(tile["row_begin"], tile["row_begin"] + tile["num_rows"])
                assert segment.kv_begin >= 0
                assert segment.kv_end <= kv_len
                assert rows.stop <= len(begin)
                times[rows, segment.kv_begin : segment.kv_end] += 1
                written[rows] += segment.group < 0 or segment.part == 0
            assert (written == 1).all()
            assert (times[visible] == 1).all()
            assert times.max(initial=0) <= 1


def check_tiles(
    placed: Placed,
    q_begin: list[int],
    kv_base: list[int],
    qo_lens: list[int],
    kv_lens: list[int],
    group_size: int,
    causal: bool,
    window: int,
) -> None:
    """Tile records repeat the batch, and start and end with the key blocks that some row sees."""
    kv_tile = placed.info.kv_tile
    chunks = defaultdict(list)
    for tile in placed.tiles:
        request = tile["request"]
        assert (tile["q_begin"], tile["kv_base"]) == (q_begin[request], kv_base[request])
        assert (tile["qo_len"], tile["kv_len"]) == (qo_lens[request], kv_lens[request])
        assert 1 <= tile["num_rows"] <= placed.info.cta_tile_q
        assert tile["row_begin"] % placed.info.cta_tile_q == 0
        assert tile["kv_begin"] % kv_tile == 0
        chunks[request, tile["row_begin"]].append(tile)
    for (request, row_begin), tiles in chunks.items():
        assert len({tile["num_rows"] for tile in tiles}) == 1
        assert len(tiles) == 1 or all(tile["split_group"] >= 0 for tile in tiles)
        rows = slice(row_begin, row_begin + tiles[0]["num_rows"])
        begin, end = (bound[rows] for bound in visible_keys(qo_lens[request], kv_lens[request], group_size, causal, window))
        seen = end > begin
        if seen.any():
            assert min(tile["kv_begin"] for tile in tiles) == begin[seen].min() // kv_tile * kv_tile
            assert max(tile["kv_end"] for tile in tiles) == end[seen].max()
        else:
            assert [num_iters(tile, kv_tile) for tile in tiles] == [1]


def busiest(placed: Placed, segments: list[Segment]) -> int:
    """Iterations of the CTA that does most."""
    return int(np.bincount([segment.cta for segment in segments], [segment.num_iters for segment in segments]).max()) if segments else 0
