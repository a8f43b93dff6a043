# SPDX-License-Identifier: Apache-2.0
"""Tiles cut along their keys into equal pieces, each a tile of its own, and their merge groups."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.counting import counting, scalar
from cupyinfer.schedule.partition import merge_groups_alike, merge_groups_of, no_groups
from cupyinfer.schedule.tiling import TILE_INTS, Tiles, key_iterations


def split_tiles(whole: Tiles, kv_tile: int, num_kv_heads: int, fixed_kv: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """Tiles cut along the keys into pieces of `fixed_kv`, each a tile of its own, their merge groups, and the rows of partial results."""
    tiles, keys = whole.records, whole.keys
    if whole.longest <= fixed_kv:
        if whole.shortest == whole.longest:
            return tiles, no_groups(), 0
        return tiles[(-keys).argsort(kind="stable")], no_groups(), 0
    if whole.shortest == whole.longest:
        return _split_alike(whole, kv_tile, num_kv_heads, fixed_kv)
    chunks = np.maximum(-(-keys // fixed_kv), 1)
    first_chunk = np.cumsum(chunks) - chunks
    of_tile = np.repeat(np.arange(len(tiles)), chunks)
    part = np.arange(len(of_tile)) - first_chunk[of_tile]
    split = chunks > 1
    # One merge group per KV head of every divided tile.
    group_begin = (np.cumsum(split) - split) * num_kv_heads
    pieces = tiles[of_tile]
    kv_begin = pieces[:, 4] + part * fixed_kv
    pieces[:, 4] = kv_begin
    pieces[:, 5] = np.minimum(pieces[:, 5], kv_begin + fixed_kv)
    pieces[:, 9] = np.where(split, group_begin, -1)[of_tile]
    pieces[:, 10] = part
    num_parts = np.repeat(chunks[split], num_kv_heads)
    groups, num_partial_rows = merge_groups_of(num_parts, num_parts * np.repeat(tiles[split, 3], num_kv_heads))
    order = (-key_iterations(pieces[:, 5] - pieces[:, 4], kv_tile, 0)).argsort(kind="stable")
    return pieces[order], groups, num_partial_rows


def _split_alike(whole: Tiles, kv_tile: int, num_kv_heads: int, fixed_kv: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """As split_tiles, for tiles that all span as many keys, more than `fixed_kv`: in fewer steps."""
    num_tiles, num_parts = len(whole.records), -(-whole.longest // fixed_kv)
    pieces = whole.records.repeat(num_parts, axis=0).reshape(num_tiles, num_parts, TILE_INTS)
    part = counting(num_parts)
    pieces[:, :, 4] += part * scalar(fixed_kv)
    pieces[:, :-1, 5] = pieces[:, 1:, 4]
    pieces[:, :, 9] = (counting(num_tiles) * scalar(num_kv_heads))[:, None]
    pieces[:, :, 10] = part
    if whole.uniform_rows is not None:
        groups, num_partial_rows = merge_groups_alike(num_tiles * num_kv_heads, num_parts, whole.uniform_rows)
    else:
        rows = (whole.records[:, 3] * scalar(num_parts)).repeat(num_kv_heads)
        groups, num_partial_rows = merge_groups_of(scalar(num_parts), rows)
    last_keys = whole.longest - (num_parts - 1) * fixed_kv
    if -(-last_keys // kv_tile) < -(-fixed_kv // kv_tile):  # longest first
        return np.concatenate((pieces[:, :-1].reshape(-1, TILE_INTS), pieces[:, -1])), groups, num_partial_rows
    return pieces.reshape(-1, TILE_INTS), groups, num_partial_rows
