# SPDX-License-Identifier: Apache-2.0
"""The schedule of one batch: tiles, every CTA's share, and merge groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.schedule.counting import scalar, tuple_new
from cupyinfer.schedule.geometry import MAX_KV_LEN
from cupyinfer.schedule.order import busiest_time, least_line_time, least_time, line_time, order_tiles
from cupyinfer.schedule.partition import Partition, cut_line, cut_line_of_each_head, no_groups, whole_units_only
from cupyinfer.schedule.pieces import split_tiles
from cupyinfer.schedule.tiles import TileConfig
from cupyinfer.schedule.tiling import Tiles, key_iterations

#: An even cut must beat whole units by this factor before anything is shared: merging is not free.
_SHARING_GAIN = 1.02
#: CTAs that begin units of neighbouring tiles together walk the same keys together and find them in L2. An even cut sets them out of
#: step: on an H200 chunked prefill lost 7 to 15% by that, so shared prefill iterations are taken to last this much longer.
_OUT_OF_STEP = 1.12
#: Iterations that pass while a CTA merges the parts of a prefill unit: an estimate, not measured. Two rows at a time it took twenty.
_MERGE_TIME = 4.0
#: Units are dealt out to the fewest CTAs that need as many waves, which keeps the heads of a tile together, unless that takes longer
#: by this factor.
_FEWER_CTAS = 1.005
#: A 16-row kernel waits for memory, which a few idle SMs do not slow down: its whole units, equal pieces of them, or a cut line of
#: every head may take this much longer than an even cut would on the busiest SM.
_IDLE_SMS = 1.04
#: Iterations a share has at least: in fewer than 128 keys the eight warps of a 16-row tile would not all find a block of 16.
_MIN_SHARE = 2
#: One CTA alone on its SM takes this share of the time per iteration that it takes beside a second one: an estimate, not measured.
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


_DIVIDED, _KEPT_WHOLE = SplitPolicy(), SplitPolicy(allowed=False)


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
        return _KEPT_WHOLE if disable_split_kv else _DIVIDED
    if isinstance(fixed_split_size, bool) or not isinstance(fixed_split_size, (int, np.integer)):
        raise ArgumentTypeError(f"fixed_split_size: got {type(fixed_split_size).__name__}, expected an int or None")
    if disable_split_kv:
        raise ArgumentError(f"fixed_split_size: got {fixed_split_size} together with disable_split_kv=True, which rule each other out")
    if fixed_split_size < 1:
        raise ArgumentError(f"fixed_split_size: got {fixed_split_size}, a part has at least one page (ragged: one key)")
    # A part longer than any request is as good as the longest request, and stays within 64 bits.
    num_keys = min(int(fixed_split_size) * page_size, MAX_KV_LEN)
    return SplitPolicy(fixed_kv=-(-num_keys // kv_tile) * kv_tile)


class Schedule(NamedTuple):
    """Everything a launch reads besides arrays, as host integers.

    Attributes:
        config: the kernel's tile shape.
        tiles: int32 [num_tiles, 12].
        partition: the CTAs' shares and the merge groups.
        unit_step: from one unit of a share to the next.
    """

    config: TileConfig
    tiles: npt.NDArray[np.int32]
    partition: Partition
    unit_step: int = 1

    @property
    def num_ctas(self) -> int:
        """CTAs of the launch; 0 when there is nothing to do."""
        return len(self.partition.cta_work)


def partial_row_budget(num_sms: int, config: TileConfig) -> int:
    """Rows of partial results that no automatic schedule exceeds: two tiles per SM."""
    return 2 * num_sms * config.cta_tile_q


def shares_of_a_head(config: TileConfig, num_sms: int, num_kv_heads: int) -> int:
    """CTAs that share one KV head where every head has a line of its own; 0 where all units form one.

    All heads of 16-row tiles are cut alike if that leaves few SMs idle: neighbouring CTAs then read the heads of the same tokens at the
    same time, which lie side by side in memory. On an H200, uneven decode batches of 256 requests went from 92 to 95% of its rate.
    It does not depend on the batch, since a CUDA graph keeps the step from unit to unit.
    """
    shares = num_sms // num_kv_heads if config.cta_tile_q == 16 and num_kv_heads > 1 else 0
    return shares if shares * num_kv_heads * _IDLE_SMS >= num_sms else 0


def make_schedule(
    tiles: Tiles,
    config: TileConfig,
    num_sms: int,
    num_kv_heads: int,
    policy: SplitPolicy,
    full_grid: bool = False,
    keys_in_l2: int = MAX_KV_LEN,
) -> Schedule:
    """Divide the work of `tiles` over a GPU.

    Args:
        tiles: what `make_tiles` returned.
        config: the kernel's tile shape.
        num_sms: streaming multiprocessors.
        num_kv_heads: units per tile.
        policy: what may be divided.
        full_grid: launch as many CTAs as the GPU holds at once (CUDA graphs), not just as many as find work.
        keys_in_l2: keys, with all their heads, that stay in L2 while other data passes through it.
    """
    grid = num_sms * config.ctas_per_sm
    unit_step = num_kv_heads if shares_of_a_head(config, num_sms, num_kv_heads) else 1
    records, merge_groups, num_partial_rows = tiles.records, no_groups(), 0
    shortest, longest = -(-tiles.shortest // config.kv_tile) or 1, -(-tiles.longest // config.kv_tile) or 1
    equal = policy.fixed_kv is None and shortest == longest
    piece_kv = policy.fixed_kv
    if equal and policy.allowed and config.cta_tile_q == 16 and len(records):
        piece_kv = _equal_piece_kv(tiles, longest, config, num_sms, num_kv_heads)
    if piece_kv is not None:
        records, merge_groups, num_partial_rows = split_tiles(tiles, config.kv_tile, num_kv_heads, piece_kv)
    elif len(records) and (policy.allowed or not equal):
        iterations = key_iterations(tiles.keys, config.kv_tile, tiles.shortest)
        line = tuple_new(_Line, (tiles.records, iterations, shortest, longest, tiles.uniform_rows))
        if config.cta_tile_q == 16:
            records, partition = _automatic(line, config, num_sms, num_kv_heads, policy.allowed, full_grid)
        else:
            records, partition = _automatic_prefill(tiles, line, config, num_sms, num_kv_heads, policy.allowed, full_grid, keys_in_l2)
        if partition is not None:
            return tuple_new(Schedule, (config, records, partition, unit_step))
    num_units = len(records) * num_kv_heads
    num_ctas = min(num_units, grid)
    if config.cta_tile_q == 16 and equal and num_units:
        # As many CTAs as there are units in every wave, which takes no longer when units are equal and alone on their SMs:
        # neighbours then read the heads of one page at the same time.
        num_ctas = -(-num_units // -(-num_units // grid))
    cta_work = whole_units_only(grid if full_grid else num_ctas, num_units)
    partition = tuple_new(Partition, (cta_work, merge_groups, num_partial_rows))
    return tuple_new(Schedule, (config, records, partition, unit_step))


class _Line(NamedTuple):
    """Tiles whose units may form a line of iterations.

    Attributes:
        records: int32 [num_tiles, 12].
        iterations: [num_tiles] iterations of each tile's units.
        shortest, longest: least and most iterations.
        uniform_rows: valid rows of every tile, or None where they differ.
    """

    records: npt.NDArray[np.int32]
    iterations: npt.NDArray[np.int64]
    shortest: int
    longest: int
    uniform_rows: int | None

    @property
    def num_rows(self) -> npt.NDArray[np.int32] | int:
        """Valid rows of each tile, or those of every tile."""
        return self.records[:, 3] if self.uniform_rows is None else self.uniform_rows

    def cut(
        self, tile_begin: npt.NDArray[np.int64] | None, num_kv_heads: int, num_ctas: int, num_whole_units: int, shares: int
    ) -> Partition:
        """As cut_line."""
        return cut_line(self.iterations, tile_begin, self.longest, self.num_rows, num_kv_heads, num_ctas, num_whole_units, shares)


def _equal_piece_kv(tiles: Tiles, iterations: int, config: TileConfig, num_sms: int, num_kv_heads: int) -> int | None:
    """Keys per piece when equal pieces of all units fill the GPU almost evenly; None when units differ or no number of pieces does."""
    if tiles.shortest != tiles.longest:
        return None
    grid, num_units = num_sms * config.ctas_per_sm, len(tiles.records) * num_kv_heads
    pieces = max(1, min(grid // num_units, -(-iterations // _MIN_SHARE)))  # the last one may be shorter
    per_piece = -(-iterations // pieces)
    busiest = -(-num_units * pieces // grid) * per_piece
    if busiest * grid <= _IDLE_SMS * num_units * iterations or per_piece <= _MIN_SHARE:
        return per_piece * config.kv_tile
    return None


def _automatic(
    line: _Line, config: TileConfig, num_sms: int, num_kv_heads: int, may_split: bool, full_grid: bool
) -> tuple[npt.NDArray[np.int32], Partition | None]:
    """16-row tiles in the order to work on them, and how CTAs share them; None when every unit is best left to one CTA."""
    if not may_split:
        # Longest first: the short ones at the end even out what the long ones left.
        if line.shortest == line.longest:
            return line.records, None
        return line.records.take((-line.iterations).argsort(kind="stable"), axis=0), None
    most = shares_of_a_head(config, num_sms, num_kv_heads)
    if most:
        return line.records, _shared_by_head(line, num_sms * config.ctas_per_sm, num_kv_heads, most, full_grid)
    return line.records, _shared(line, config, num_sms, num_kv_heads, full_grid)


def _shared_by_head(line: _Line, grid: int, num_kv_heads: int, most: int, full_grid: bool) -> Partition | None:
    """As _shared, with a line for every head that at most so many CTAs share."""
    equal = line.shortest == line.longest
    tile_begin = None if equal else _tile_begin(line.iterations, 1)
    total = len(line.iterations) * line.longest if tile_begin is None else tile_begin.item(-1)
    shares = min(most, total // _MIN_SHARE)
    if shares < min(2, most):
        return None
    if equal:
        whole_time = -(-len(line.records) * num_kv_heads // grid) * line.longest
        if whole_time * shares <= _SHARING_GAIN * total:
            return None
    num_ctas = grid if full_grid else shares * num_kv_heads
    return cut_line_of_each_head(line.iterations, tile_begin, line.longest, line.num_rows, num_kv_heads, num_ctas, shares)


def _shared(line: _Line, config: TileConfig, num_sms: int, num_kv_heads: int, full_grid: bool) -> Partition | None:
    """How CTAs share the tiles in the order they have; None when that does not pay."""
    tile_begin = None if line.shortest == line.longest else _tile_begin(line.iterations, num_kv_heads)
    total = len(line.iterations) * num_kv_heads * line.longest if tile_begin is None else tile_begin.item(-1)
    num_whole_units, shares = _sharing(line, config, num_sms, num_kv_heads, total)
    if not shares:
        return None
    grid = num_sms * config.ctas_per_sm
    num_ctas = grid if full_grid else max(min(num_whole_units, grid), shares)
    return line.cut(tile_begin, num_kv_heads, num_ctas, num_whole_units, shares)


def _automatic_prefill(
    tiles: Tiles,
    line: _Line,
    config: TileConfig,
    num_sms: int,
    num_kv_heads: int,
    may_split: bool,
    full_grid: bool,
    keys_in_l2: int,
) -> tuple[npt.NDArray[np.int32], Partition | None]:
    """As _automatic, for tiles of 64 rows and more."""
    if line.shortest == line.longest:
        return line.records, _shared(line, config, num_sms, num_kv_heads, full_grid) if may_split else None
    num_units = len(line.records) * num_kv_heads
    grid = num_sms * config.ctas_per_sm
    total = int(np.add.reduce(line.iterations))
    order, iterations, time = order_tiles(tiles, line.iterations, line.longest, total, num_kv_heads, grid, keys_in_l2)
    line = tuple_new(_Line, (line.records.take(order, axis=0), iterations, *line[2:]))
    shares = min(num_sms, total * num_kv_heads // _MIN_SHARE) if may_split else 0
    if shares > 1:
        # Cutting the line is only tried where it would pay if it gave every share as few units as the average.
        crowding = _crowding(shares, num_sms, grid)
        whole_time = time * _crowding(num_units, num_sms, grid)
        if whole_time > _SHARING_GAIN * _shared_time(least_line_time(total * num_kv_heads, num_units, shares) * crowding):
            tile_begin = _tile_begin(line.iterations, num_kv_heads)
            if whole_time > _SHARING_GAIN * _shared_time(line_time(line.iterations, tile_begin, num_kv_heads, shares) * crowding):
                return line.records, line.cut(tile_begin, num_kv_heads, grid if full_grid else shares, 0, shares)
    num_ctas = grid
    if not full_grid:
        num_ctas = fewer = -(-num_units // -(-num_units // grid))
        most_time = _FEWER_CTAS * time
        if num_units > grid > fewer:
            too_long = least_time(total, len(line.records), num_kv_heads, fewer) > most_time
            if too_long or busiest_time(line.iterations, num_kv_heads, fewer) > most_time:
                num_ctas = grid
    return line.records, tuple_new(Partition, (whole_units_only(num_ctas, num_units), no_groups(), 0))


def _tile_begin(iterations: npt.NDArray[np.int64], num_kv_heads: int) -> npt.NDArray[np.int64]:
    """Iterations of all units before each tile, and of all units at the end."""
    tile_begin = np.empty(len(iterations) + 1, np.int64)
    tile_begin[0] = 0
    np.add.accumulate(iterations, out=tile_begin[1:])
    if num_kv_heads > 1:
        tile_begin *= scalar(num_kv_heads)
    return tile_begin


def _sharing(line: _Line, config: TileConfig, num_sms: int, num_kv_heads: int, total: int) -> tuple[int, int]:
    """How to share: leading whole units, and CTAs that share the rest; no CTAs when sharing does not pay.

    Args:
        line: the tiles.
        config: the kernel's tile shape.
        num_sms: streaming multiprocessors.
        num_kv_heads: units per tile.
        total: iterations of all units.
    """
    equal, longest = line.shortest == line.longest, line.longest
    if config.cta_tile_q == 16 and not equal:
        shares = min(num_sms, total // _MIN_SHARE)
        return 0, shares if shares > 1 else 0  # the parts of 16-row tiles are a few rows, and an even cut cannot lose
    grid = num_sms * config.ctas_per_sm
    num_units = len(line.records) * num_kv_heads
    if config.cta_tile_q == 16 or not equal or num_units < grid:
        num_whole_units = 0
        shares, time = _shares_of_all(config, num_sms, num_units if equal else 0, total)
    else:
        # Equal units in several waves: only the last, incomplete wave is shared. Its cuts make a part each, and so do its units.
        rest = num_units % grid
        num_whole_units = num_units - rest
        shares = min(grid, partial_row_budget(num_sms, config) // config.cta_tile_q - rest + 1, rest * longest // _MIN_SHARE)
        if rest == 0 or shares <= rest:
            return 0, 0
        time = rest * longest / shares * _crowding(shares, num_sms, grid)
    if shares < 2:
        return 0, 0
    if config.cta_tile_q != 16:
        time = _shared_time(time)
    waves_before = num_whole_units // grid * longest
    whole_time = -(-num_units // grid) * longest
    pays = whole_time * _crowding(num_units, num_sms, grid) > _SHARING_GAIN * (waves_before + time)
    return (num_whole_units, shares) if pays else (0, 0)


def _shared_time(time: float) -> float:
    """Iterations until shared prefill units are finished, when their longest share is that long."""
    return _OUT_OF_STEP * time + _MERGE_TIME


def _shares_of_all(config: TileConfig, num_sms: int, num_equal_units: int, total: int) -> tuple[int, float]:
    """CTAs that share all work, and the time that takes in iterations of a full SM. `num_equal_units` is 0 when they differ."""
    grid = num_sms * config.ctas_per_sm
    # A cut makes at most two parts, so one share per SM stays within the budget of two tiles per SM. Equal units that are cut into
    # as many pieces each make no other parts than those, so there may be as many such shares as the budget has tiles.
    choices = [num_sms]
    if num_equal_units:
        choices.append(min(grid, 2 * num_sms) // num_equal_units * num_equal_units)
    most = total // _MIN_SHARE
    times = [(total / shares * _crowding(shares, num_sms, grid), shares) for shares in (min(choice, most) for choice in choices) if shares]
    time, shares = min(times, default=(0.0, 0))
    return shares, time


def _crowding(num_ctas: int, num_sms: int, grid: int) -> float:
    """Time per iteration relative to full SMs: less while every CTA has one to itself."""
    return _ALONE if num_ctas <= num_sms < grid else 1.0
