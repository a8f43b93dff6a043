# SPDX-License-Identifier: Apache-2.0
"""The schedule of one batch: tiles, every CTA's share, and merge groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.schedule.partition import Partition, cut_line, no_groups, whole_units_only
from cupyinfer.schedule.tiles import TileConfig
from cupyinfer.schedule.tiling import tile_iterations

#: An even cut must beat whole units by this factor before anything is shared: merging is not free.
_SHARING_GAIN = 1.02
#: Iterations a share has at least: in fewer than 128 keys the eight warps of a 16-row tile would not all find a block.
_MIN_SHARE = 2
#: One CTA alone on its SM takes this share of the time per iteration that it takes beside a second one.
_ALONE = 0.6


@dataclass(frozen=True)
class SplitPolicy:
    """Whether keys of one query tile may be divided between CTAs.

    Attributes:
        allowed: False keeps every unit in one CTA.
        fixed_kv: keys per part when every request is to be divided alike whatever its neighbours, or None.
    """

    allowed: bool = True
    fixed_kv: int | None = None

    @property
    def invariant(self) -> bool:
        """True when a request's result must not depend on the rest of the batch."""
        return not self.allowed or self.fixed_kv is not None


def make_split_policy(fixed_split_size: int | None, disable_split_kv: bool, page_size: int, kv_tile: int) -> SplitPolicy:
    """The policy of a plan's arguments.

    Args:
        fixed_split_size: pages (ragged: keys) per part, or None; rounded up to a multiple of `kv_tile` keys.
        disable_split_kv: keep every unit in one CTA.
        page_size: keys per page, 1 for ragged.
        kv_tile: keys per iteration.

    Raises:
        ArgumentError: both were given, or a size below 1.
    """
    if fixed_split_size is None:
        return SplitPolicy(allowed=not disable_split_kv)
    if isinstance(fixed_split_size, bool) or not isinstance(fixed_split_size, (int, np.integer)):
        raise ArgumentTypeError(f"fixed_split_size: got {type(fixed_split_size).__name__}, expected an int or None")
    if disable_split_kv:
        raise ArgumentError(f"fixed_split_size: got {fixed_split_size} together with disable_split_kv=True, which rule each other out")
    if fixed_split_size < 1:
        raise ArgumentError(f"fixed_split_size: got {fixed_split_size}, a part has at least one page (ragged: one key)")
    return SplitPolicy(fixed_kv=-(-int(fixed_split_size) * page_size // kv_tile) * kv_tile)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything a launch reads besides arrays, as host integers.

    Attributes:
        config: the kernel's tile shape.
        tiles: int32 [num_tiles, 12].
        partition: the CTAs' shares and the merge groups.
    """

    config: TileConfig
    tiles: npt.NDArray[np.int32]
    partition: Partition

    @property
    def num_ctas(self) -> int:
        """CTAs of the launch; 0 when there is nothing to do."""
        return len(self.partition.cta_work)


def partial_row_budget(num_sms: int, config: TileConfig) -> int:
    """Rows of partial results that no automatic schedule exceeds: two tiles per SM."""
    return 2 * num_sms * config.cta_tile_q


def make_schedule(
    tiles: npt.NDArray[np.int32], config: TileConfig, num_sms: int, num_kv_heads: int, policy: SplitPolicy, num_ctas: int | None = None
) -> Schedule:
    """Divide the work of `tiles` over a GPU.

    Args:
        tiles: int32 [num_tiles, 12] of `make_tiles`.
        config: the kernel's tile shape.
        num_sms: streaming multiprocessors.
        num_kv_heads: units per tile.
        policy: what may be divided.
        num_ctas: launch exactly that many CTAs (CUDA graphs), or None for as many as find work.
    """
    grid = num_sms * config.ctas_per_sm
    if policy.fixed_kv is not None:
        tiles, partition = _fixed_split(tiles, config.kv_tile, num_kv_heads, policy.fixed_kv, grid)
    elif not len(tiles):
        partition = Partition(whole_units_only(grid, 0), no_groups(), 0)
    else:
        tiles, partition = _automatic(tiles, config, num_sms, num_kv_heads, policy.allowed)
    busy = _busy_ctas(partition, len(tiles) * num_kv_heads)
    cta_work = partition.cta_work[: busy if num_ctas is None else num_ctas]
    return Schedule(config, tiles, Partition(cta_work, partition.merge_groups, partition.num_partial_rows))


def _busy_ctas(partition: Partition, num_units: int) -> int:
    # The whole-unit waves of the kernel turn round every second time, so they need the full grid once there are two.
    grid = len(partition.cta_work)
    if not num_units:
        return 0
    whole = int(partition.cta_work[0, 0])
    sharing = np.flatnonzero(partition.cta_work[:, 3])
    return max(min(whole, grid), int(sharing[-1]) + 1 if sharing.size else 0)


def _automatic(
    tiles: npt.NDArray[np.int32], config: TileConfig, num_sms: int, num_kv_heads: int, may_split: bool
) -> tuple[npt.NDArray[np.int32], Partition]:
    iterations = tile_iterations(tiles, config.kv_tile)
    shortest, longest = int(iterations.min()), int(iterations.max())
    grid = num_sms * config.ctas_per_sm
    num_units = len(tiles) * num_kv_heads
    whole = Partition(whole_units_only(grid, num_units), no_groups(), 0)
    if shortest != longest and (config.cta_tile_q > 16 or not may_split):
        # Longest first: the short ones at the end even out what the long ones left.
        order = np.argsort(-iterations, kind="stable")
        tiles, iterations = tiles[order], iterations[order]
    if not may_split:
        return tiles, whole
    total = int(iterations.sum()) * num_kv_heads
    num_whole_units, shares, shared_time = _sharing(config, num_sms, num_units, longest, shortest == longest, total)
    if config.cta_tile_q == 16 and shortest != longest:
        worth_it = True  # the parts of 16-row tiles are a few rows, and an even cut cannot lose
    else:
        whole_time = -(-num_units // grid) * longest if shortest == longest else _longest_share(iterations, num_kv_heads, grid)
        worth_it = whole_time * _crowding(num_units, num_sms, grid) > _SHARING_GAIN * shared_time
    if shares < 2 or not worth_it:
        return tiles, whole
    return tiles, cut_line(iterations, tiles[:, 3], num_kv_heads, grid, num_whole_units, shares)


def _crowding(num_ctas: int, num_sms: int, grid: int) -> float:
    """Time per iteration relative to full SMs: less while every CTA has one to itself."""
    return _ALONE if num_ctas <= num_sms < grid else 1.0


def _sharing(config: TileConfig, num_sms: int, num_units: int, longest: int, equal: bool, total: int) -> tuple[int, int, float]:
    """How to share: leading whole units, CTAs that share the rest, and the time that takes in iterations of a full SM."""
    grid = num_sms * config.ctas_per_sm
    max_parts = partial_row_budget(num_sms, config) // config.cta_tile_q
    rest = num_units % grid
    if config.cta_tile_q == 16 or not equal or num_units < grid:
        # Equal units cut into as many pieces each have no other parts than those. In general every share but the first
        # begins with a cut, and every cut makes at most two parts.
        aligned = min(max_parts, grid) // num_units * num_units if equal else 0
        shares = min(grid, max(max_parts // 2 + 1, aligned), total // _MIN_SHARE)
        return 0, shares, total / max(shares, 1) * _crowding(shares, num_sms, grid)
    # Equal units in several waves: only the last, incomplete wave is shared.
    shares = min(grid, max_parts - rest + 1)
    if rest == 0 or shares <= rest:
        return 0, 0, 0.0
    return num_units - rest, shares, num_units // grid * longest + rest * longest / shares * _crowding(shares, num_sms, grid)


def _longest_share(iterations: npt.NDArray[np.int64], num_kv_heads: int, grid: int) -> int:
    """Iterations of the busiest CTA when units, longest first, are dealt out in waves that turn round."""
    units = np.repeat(iterations, num_kv_heads)
    waves = np.zeros((-(-len(units) // grid), grid), np.int64)
    waves.reshape(-1)[: len(units)] = units
    waves[1::2] = waves[1::2, ::-1]
    return int(waves.sum(axis=0).max())


def _fixed_split(
    tiles: npt.NDArray[np.int32], kv_tile: int, num_kv_heads: int, fixed_kv: int, grid: int
) -> tuple[npt.NDArray[np.int32], Partition]:
    keys = tiles[:, 5].astype(np.int64) - tiles[:, 4]
    chunks = np.maximum(-(-keys // fixed_kv), 1)
    first_chunk = np.cumsum(chunks) - chunks
    of_tile = np.repeat(np.arange(len(tiles)), chunks)
    part = np.arange(len(of_tile)) - first_chunk[of_tile]
    split = chunks > 1
    # One merge group per KV head of every divided tile.
    group_begin = (np.cumsum(split) - split) * num_kv_heads
    pieces = tiles[of_tile]
    pieces[:, 4] += (part * fixed_kv).astype(np.int32)
    pieces[:, 5] = np.minimum(pieces[:, 5], pieces[:, 4].astype(np.int64) + fixed_kv)
    pieces[:, 9] = np.where(split, group_begin, -1)[of_tile]
    pieces[:, 10] = part
    num_parts = np.repeat(chunks[split], num_kv_heads)
    rows = num_parts * np.repeat(tiles[split, 3], num_kv_heads)
    merge_groups = np.zeros((len(rows), no_groups().shape[1]), np.int32)
    merge_groups[:, 0] = np.cumsum(rows) - rows
    merge_groups[:, 1] = num_parts
    order = np.argsort(-tile_iterations(pieces, kv_tile), kind="stable")
    return pieces[order], Partition(whole_units_only(grid, len(pieces) * num_kv_heads), merge_groups, int(rows.sum()))
