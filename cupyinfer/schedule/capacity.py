# SPDX-License-Identifier: Apache-2.0
"""What suffices for every batch within limits: region counts for CUDA graphs and for workspace bounds."""

from __future__ import annotations

from dataclasses import dataclass

from cupyinfer.errors import ArgumentError
from cupyinfer.schedule.geometry import store_ints
from cupyinfer.schedule.layout import RegionCounts
from cupyinfer.schedule.schedule import SplitPolicy, partial_row_budget, shares_of_a_head
from cupyinfer.schedule.tiles import TileConfig
from cupyinfer.schedule.tiling import most_tiles


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch.

    Attributes:
        max_batch_size: requests.
        max_num_qo_tokens: query tokens of all requests together (decode: max_batch_size).
        max_kv_len: keys of the longest request; needed only with a fixed split size.
    """

    max_batch_size: int
    max_num_qo_tokens: int
    max_kv_len: int | None = None

    def __post_init__(self) -> None:
        store_ints(self, {"max_batch_size": 0, "max_num_qo_tokens": 0, "max_kv_len": 0}, ("max_kv_len",))


def capacity_counts(
    limits: BatchLimits,
    *,
    decode: bool,
    config: TileConfig,
    num_sms: int,
    group_size: int,
    num_kv_heads: int,
    head_dim_vo: int,
    policy: SplitPolicy,
    num_page_indices: int | None = None,
    value_bytes: int | None = None,
) -> RegionCounts:
    """Region counts that suffice for every batch within `limits` planned with this kernel and policy.

    A cut lies inside at most one unit and makes at most two parts of it, so `s` shares have at most `s - 1` merge groups and
    `2 * (s - 1)` parts, and `partial_row_budget` holds besides; so have the shares of every head where each is a line of its own.
    Equal pieces of 16-row tiles are at most one per CTA, with two or more in a merge group. Whole units need neither. With a fixed split
    size every tile may have as many parts as the longest request has.

    Raises:
        ArgumentError: a fixed split size without max_kv_len.
    """
    tile_q = config.cta_tile_q
    if decode:
        num_tiles = limits.max_batch_size * -(-group_size // tile_q)
        rows_per_tile = min(tile_q, group_size)
    else:
        num_tiles = most_tiles(limits.max_num_qo_tokens, group_size, limits.max_batch_size, tile_q)
        rows_per_tile = min(tile_q, limits.max_num_qo_tokens * group_size)
    grid = num_sms * config.ctas_per_sm
    num_groups = num_rows = 0
    if policy.fixed_kv is not None:
        if limits.max_kv_len is None:
            raise ArgumentError("limits: a bound with fixed_split_size needs max_kv_len, since parts follow from the longest request")
        parts = max(1, -(-limits.max_kv_len // policy.fixed_kv))
        num_groups = num_tiles * num_kv_heads if parts > 1 else 0
        num_rows = num_groups * parts * rows_per_tile
        num_tiles *= parts
    elif policy.allowed and num_tiles:
        per_head = shares_of_a_head(config, num_sms, num_kv_heads)
        max_groups = (per_head - 1) * num_kv_heads if per_head else grid - 1
        num_groups = min(max_groups, num_tiles * num_kv_heads)
        num_rows = min(partial_row_budget(num_sms, config) // tile_q, 2 * max_groups) * rows_per_tile
        if tile_q == 16:
            # Equal pieces are tiles of their own.
            num_tiles = max(num_tiles, grid // num_kv_heads)
    return RegionCounts(num_tiles, grid, num_groups, num_rows, head_dim_vo, num_page_indices, value_bytes)
