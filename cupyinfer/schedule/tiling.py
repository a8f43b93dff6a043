# SPDX-License-Identifier: Apache-2.0
"""From a batch to tiles: which query rows go together, and which keys they may see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.counting import counting, ends, least, room_for, scalar, tuple_new
from cupyinfer.schedule.geometry import BatchGeometry
from cupyinfer.schedule.tiles import max_tile_q

#: Fields of a tile record, in order; docs/ARCHITECTURE.md gives their meaning.
TILE_FIELDS = (
    "request", "q_begin", "row_begin", "num_rows", "kv_begin", "kv_end",
    "kv_len", "kv_base", "qo_len", "split_group", "split_part", "mask_begin",
)  # fmt: skip
TILE_INTS = len(TILE_FIELDS)


class Tiles(NamedTuple):
    """Tiles of a batch, and how long they are.

    Attributes:
        records: int32 [num_tiles, 12], fields as TILE_FIELDS.
        keys: [num_tiles] keys each tile spans.
        per_request: [batch_size] tiles of each request, whose tiles follow each other, or None where each has one.
        request_keys: [batch_size] keys of each request that has tiles, 0 for those without.
        longest_request: no request has more keys.
        shortest, longest: keys of the shortest and the longest tile, 0 without tiles.
        uniform_rows: valid rows of every tile when all have as many by construction, else None.
    """

    records: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int64]
    per_request: npt.NDArray[np.int64] | None
    request_keys: npt.NDArray[np.int64]
    longest_request: int
    shortest: int
    longest: int
    uniform_rows: int | None = None


@dataclass(frozen=True)
class KeySpan:
    """Which keys a query may see.

    Attributes:
        causal: only keys up to the query's own position, counted from the end of the keys.
        window_left: keys to the left of the query's position that it sees, or -1 for all.
    """

    causal: bool = False
    window_left: int = -1


def choose_tile_q(geometry: BatchGeometry, group_size: int, head_dim_vo: int, invariant: bool) -> int:
    """Rows per tile of a batch.

    Decode follows from the group alone. Prefill takes the smallest tile that most requests fill: 16 rows put every
    warp on the keys, 64 waste less on short requests, 128 read each key for twice the rows of 64. An `invariant` plan must
    not look at the batch, and always takes the largest.
    """
    if geometry.uniform_qo_len is not None:
        return 16 if geometry.uniform_qo_len * group_size <= 16 else 64
    if invariant:
        return max_tile_q(head_dim_vo)
    return tile_q_for_rows(geometry.longest_qo * group_size, geometry.num_qo_tokens * group_size, geometry.batch_size, head_dim_vo)


def tile_q_for_rows(longest: int, total: int, batch_size: int, head_dim_vo: int) -> int:
    """Rows per tile for prefill requests of at most `longest` and `total` packed rows in all."""
    if longest <= 16:
        return 16
    return 64 if total <= 64 * max(1, batch_size) else max_tile_q(head_dim_vo)


def count_tiles(geometry: BatchGeometry, group_size: int, cta_tile_q: int) -> int:
    """Tiles of a batch."""
    tiles = geometry.qo_len * scalar(group_size)
    tiles += scalar(cta_tile_q - 1)
    tiles //= scalar(cta_tile_q)
    return int(np.add.reduce(tiles))


def most_tiles(num_qo_tokens: int, group_size: int, batch_size: int, cta_tile_q: int) -> int:
    """Most tiles of as many requests of as many query tokens in all.

    Requests of ``n_i`` packed rows have ``sum(ceil(n_i / tile))`` tiles, at most ``floor(sum(n_i) / tile)`` and one for every request
    with queries.
    """
    return num_qo_tokens * group_size // cta_tile_q + min(batch_size, num_qo_tokens)


def make_tiles(
    geometry: BatchGeometry,
    group_size: int,
    cta_tile_q: int,
    kv_tile: int,
    span: KeySpan,
    mask_begin: npt.NDArray[np.int64] | None = None,
) -> Tiles:
    """Tiles of a batch, request by request, not split along the keys.

    Args:
        geometry: the batch.
        group_size: query heads per KV head.
        cta_tile_q: rows per tile.
        kv_tile: keys per iteration; every tile's first key is a multiple of it.
        span: which keys a query may see.
        mask_begin: [batch_size] first byte of each request's packed mask, or None.
    """
    each = geometry.uniform_qo_len
    if each is not None and each * group_size <= cta_tile_q:
        return _one_tile_each(geometry, each, group_size, kv_tile, span, mask_begin)
    num_tokens, kv_len, group, tile_q = geometry.qo_len, geometry.kv_len, scalar(group_size), scalar(cta_tile_q)
    batch = len(kv_len)
    rows = num_tokens * group
    per_request = rows + scalar(cta_tile_q - 1)
    per_request //= tile_q
    # Per request, what tile 0 of the batch would have if it were the request's: every tile after it is as many rows further.
    limited = span.causal or span.window_left >= 0
    of_request = np.empty((3, batch), np.int64)
    row_begin = np.subtract(per_request, np.add.accumulate(per_request), out=of_request[0])
    row_begin *= tile_q
    left = np.subtract(rows, row_begin, out=of_request[1])
    if limited:  # the position of its first row, counted in rows
        np.subtract(kv_len * group, left, out=of_request[2])
    # What all tiles of a request have in common.
    common = _tile_template(room_for(batch), 0, 0)[:batch].copy()
    common[:, 1] = geometry.q_begin
    if not span.causal:
        common[:, 5] = kv_len
    common[:, 6] = kv_len
    common[:, 7] = geometry.kv_base
    common[:, 8] = num_tokens
    if mask_begin is not None:
        common[:, 11] = mask_begin
    records = common.repeat(per_request, axis=0)
    num_tiles = len(records)
    of_tile = of_request.repeat(per_request, axis=1)
    of_tile += _rows_before(room_for(num_tiles), cta_tile_q)[:, :num_tiles]
    row_begin, num_rows, position = of_tile
    records[:, 2] = row_begin
    records[:, 3] = np.minimum(num_rows, tile_q, out=num_rows)
    if span.causal:
        # One past the position of the tile's last row; a query before all keys sees none.
        keys = position + num_rows
        if cta_tile_q % group_size:
            keys += scalar(group_size - 1)
        keys //= group
        if geometry.longest_qo > geometry.shortest_kv:
            np.maximum(keys, scalar(0), out=keys)
        records[:, 5] = keys
    else:
        keys = kv_len.repeat(per_request)
    if span.window_left >= 0:
        kv_begin = _first_key(position // group, keys, kv_tile, span.window_left)
        records[:, 4] = kv_begin
        keys = keys - kv_begin
    request_keys = kv_len if geometry.shortest_qo else kv_len * np.minimum(per_request, scalar(1))
    if geometry.shortest_qo and span.window_left < 0:  # the last tile of every request, at least, sees all of its keys
        shortest, longest = least(keys) if span.causal else geometry.shortest_kv, geometry.longest_kv
    else:
        shortest, longest = ends(keys) if len(keys) else (0, 0)
    return tuple_new(Tiles, (records, keys, per_request, request_keys, geometry.longest_kv, shortest, longest, None))


def _one_tile_each(
    geometry: BatchGeometry, qo_len: int, group_size: int, kv_tile: int, span: KeySpan, mask_begin: npt.NDArray[np.int64] | None
) -> Tiles:
    """Tiles of requests that have one each, and as many queries: decode. Causal or not, the last query sees every key."""
    kv_len = geometry.kv_len
    batch = len(kv_len)
    records = _tile_template(room_for(batch), qo_len, group_size)[:batch].copy()
    records[:, 5] = kv_len
    records[:, 6] = kv_len
    records[:, 7] = geometry.kv_base
    if mask_begin is not None:
        records[:, 11] = mask_begin
    rows = qo_len * group_size
    keys, shortest, longest = kv_len, geometry.shortest_kv, geometry.longest_kv
    if span.window_left >= 0:
        kv_begin = _first_key(kv_len - qo_len, kv_len, kv_tile, span.window_left)
        records[:, 4] = kv_begin
        keys = kv_len - kv_begin
        shortest, longest = ends(keys) if len(keys) else (0, 0)
    return tuple_new(Tiles, (records, keys, None, kv_len, geometry.longest_kv, shortest, longest, rows))


@lru_cache(maxsize=16)
def _tile_template(batch: int, qo_len: int, group_size: int) -> npt.NDArray[np.int32]:
    """The fields that follow from the place in the batch alone, to copy from; 48 bytes per request are kept."""
    tiles = np.zeros((batch, TILE_INTS), np.int32)
    tiles[:, 0] = counting(batch)
    tiles[:, 1] = counting(batch) * qo_len
    tiles[:, 3] = qo_len * group_size
    tiles[:, 8] = qo_len
    tiles[:, 9] = -1
    tiles.flags.writeable = False
    return tiles


@lru_cache(maxsize=16)
def _rows_before(num_tiles: int, cta_tile_q: int) -> npt.NDArray[np.int64]:
    """Rows of all tiles before each, to add to its first row, to take from the rows that are left, and to add to its position."""
    before = counting(num_tiles) * cta_tile_q
    rows = np.stack((before, -before, before))
    rows.flags.writeable = False
    return rows


def _first_key(position: npt.NDArray[np.int64], kv_end: npt.NDArray[np.int64], kv_tile: int, window_left: int) -> npt.NDArray[np.int64]:
    """First key of tiles whose first query has that position, rounded down to an iteration."""
    begin: npt.NDArray[np.int64] = np.minimum(np.maximum(position - window_left, 0), kv_end) // kv_tile * kv_tile
    return begin


def key_iterations(keys: npt.NDArray[np.int64], kv_tile: int, shortest: int) -> npt.NDArray[np.int64]:
    """Iterations of tiles of so many keys: at least one, so that a tile without keys still gets its zeros written.

    Args:
        keys: keys of each tile.
        kv_tile: keys per iteration.
        shortest: least of `keys`.
    """
    iterations: npt.NDArray[np.int64] = keys + scalar(kv_tile - 1)
    iterations //= scalar(kv_tile)
    if shortest < 1:
        np.maximum(iterations, scalar(1), out=iterations)
    return iterations
