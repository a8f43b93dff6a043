# SPDX-License-Identifier: Apache-2.0
"""From a batch to a drafted plan: the one path that sizing and planning share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cupyinfer.errors import ArgumentError, WorkspaceError
from cupyinfer.schedule.capacity import BatchLimits, capacity_counts
from cupyinfer.schedule.counting import tuple_new
from cupyinfer.schedule.geometry import MAX_PACKED_ROWS, MAX_UNITS, BatchGeometry, check_flag, check_heads, store_ints
from cupyinfer.schedule.layout import RegionCounts, lay_out, measure
from cupyinfer.schedule.partition import CTA_INTS
from cupyinfer.schedule.plan_info import DecodePlanInfo, PlanInfo, PrefillPlanInfo
from cupyinfer.schedule.profile import DeviceProfile
from cupyinfer.schedule.schedule import Schedule, SplitPolicy, make_schedule, make_split_policy
from cupyinfer.schedule.tiles import (
    FA3_ARCH,
    FA3_TILES,
    TileConfig,
    check_head_dims,
    fa3_kv_tile,
    fa3_kv_tiles,
    fa3_tile_config,
    fa3_tile_q,
    fa3_tile_qs,
    max_tile_q,
    tile_config,
)
from cupyinfer.schedule.tiling import KeySpan, Tiles, choose_tile_q, count_tiles, make_tiles, most_tiles, tile_q_for_rows
from cupyinfer.workspace import AlignedAllocator, WorkspaceSize

_INT32 = np.dtype(np.int32)


class PlannedKernel(NamedTuple):
    """What a schedule takes of a kernel and the GPU, whatever the batch.

    Attributes:
        config: its tile shape.
        policy: what may be divided between CTAs.
        kv_tiles: keys per tile among which a batch chooses.
        keys_in_l2: keys, of all heads, that stay in L2.
    """

    config: TileConfig
    policy: SplitPolicy
    kv_tiles: tuple[int, ...]
    keys_in_l2: int


@dataclass(frozen=True)
class PlanShape:
    """What a schedule depends on besides the batch and the GPU.

    Attributes:
        decode: one query token per request.
        num_qo_heads: query heads.
        num_kv_heads: KV heads.
        head_dim_qk: width of queries and keys.
        head_dim_vo: width of values and outputs.
        kv_itemsize: bytes per element of the KV cache.
        page_size: keys per page, 1 for ragged caches.
        span: which keys a query may see.
        fixed_split_size: pages (ragged: keys) per part, or None.
        disable_split_kv: keep every unit in one CTA.
        backend: the kernels planned for, "fa2" or "fa3".
        transforms_logits: the kernel has a soft cap, ALiBi, RoPE or a user's code.
    """

    decode: bool
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    kv_itemsize: int = 2
    page_size: int = 1
    span: KeySpan = KeySpan()  # noqa: RUF009 - a frozen value
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    backend: str = "fa2"
    transforms_logits: bool = False

    def __post_init__(self) -> None:
        least = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim_qk": 1, "head_dim_vo": 1, "page_size": 1}
        store_ints(self, least)
        object.__setattr__(self, "disable_split_kv", check_flag(self.disable_split_kv, "disable_split_kv"))
        check_heads(self.num_qo_heads, self.num_kv_heads)
        check_head_dims(self.head_dim_qk, self.head_dim_vo)
        self.policy(1)

    @cached_property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @cached_property
    def _decode_tile_q(self) -> int:
        """Rows per tile of every decode batch."""
        return 16 if self.group_size <= 16 else 64

    @cached_property
    def invariant(self) -> bool:
        """True when a request's result must not depend on the rest of the batch."""
        return self.disable_split_kv or self.fixed_split_size is not None

    def kv_tiles(self, cta_tile_q: int) -> tuple[int, ...]:
        """Keys per tile of that many rows among which fa3 chooses by the batch. A choice that must not depend on it is the first."""
        return fa3_kv_tiles(cta_tile_q, self.head_dim_qk, self.head_dim_vo, self.page_size, self.transforms_logits, self.kv_itemsize)

    @cached_property
    def _kernels(self) -> dict[tuple[int, int | None, str, int, int], PlannedKernel]:
        return {}

    def kernel(self, cta_tile_q: int, profile: DeviceProfile, kv_tile: int | None = None) -> PlannedKernel:
        """The kernel with that many rows per tile on a GPU; for fa3 also with that many keys, by default the first choice. Kept."""
        key = cta_tile_q, kv_tile, profile.arch, profile.smem_per_sm, profile.smem_per_cta
        kept = self._kernels.get(key)
        if kept is None:
            config = self.config(cta_tile_q, profile, kv_tile)
            kv_tiles = self.kv_tiles(cta_tile_q) if self.backend == "fa3" and not self.invariant else (config.kv_tile,)
            kept = self._kernels[key] = PlannedKernel(config, self.policy(config.kv_tile), kv_tiles, self.keys_in_l2(profile))
        return kept

    def config(self, cta_tile_q: int, profile: DeviceProfile, kv_tile: int | None = None) -> TileConfig:
        """Tile shape of the kernel with that many rows per tile on a GPU; for fa3 also with that many keys, by default the first choice."""
        if self.backend == "fa3":
            kv_tile = self.kv_tiles(cta_tile_q)[0] if kv_tile is None else kv_tile
            return fa3_tile_config(cta_tile_q, self.head_dim_qk, self.head_dim_vo, kv_tile, self.kv_itemsize)
        widths = (self.head_dim_qk, self.head_dim_vo, self.kv_itemsize)
        smem = (profile.smem_per_sm, profile.smem_per_cta)
        return tile_config(cta_tile_q, *widths, *smem, transforms_logits=self.transforms_logits)

    def policy(self, kv_tile: int) -> SplitPolicy:
        """What may be divided, for a kernel with that many keys per iteration."""
        return make_split_policy(self.fixed_split_size, self.disable_split_kv, self.page_size, kv_tile)

    def keys_in_l2(self, profile: DeviceProfile) -> int:
        """Keys, of all heads, that stay in L2: half of it is theirs, queries and outputs stream through the rest."""
        return profile.l2_bytes // 2 // (self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * self.kv_itemsize)

    def capacity(
        self, config: TileConfig, profile: DeviceProfile, limits: BatchLimits, pages: int | None, values: int | None
    ) -> RegionCounts:
        """Region counts for every batch within `limits` on one kernel."""
        return capacity_counts(
            limits,
            decode=self.decode,
            config=config,
            num_sms=profile.num_sms,
            group_size=self.group_size,
            num_kv_heads=self.num_kv_heads,
            head_dim_vo=self.head_dim_vo,
            policy=self.policy(config.kv_tile),
            num_page_indices=pages,
            value_bytes=values,
        )

    def tile_q(self, geometry: BatchGeometry, num_sms: int, limits: BatchLimits | None = None) -> int:
        """Rows per tile for a batch on a GPU of `num_sms`, or for every batch within `limits`."""
        if self.decode:
            return self._decode_tile_q
        if limits is not None:
            return self.tile_q_of_limits(limits, num_sms)
        if self.backend == "fa3":
            return fa3_tile_q(
                self.possible_tile_qs, lambda tile_q: count_tiles(geometry, self.group_size, tile_q) * self.num_kv_heads, num_sms
            )
        return choose_tile_q(geometry, self.group_size, self.head_dim_vo, self.invariant)

    def tile_q_of_limits(self, limits: BatchLimits, num_sms: int) -> int:
        """Rows per tile that a CUDA-graph plan uses for every batch within `limits`."""
        if self.backend == "fa3":
            tokens, batch = limits.max_num_qo_tokens, limits.max_batch_size
            return fa3_tile_q(
                self.possible_tile_qs, lambda tile_q: most_tiles(tokens, self.group_size, batch, tile_q) * self.num_kv_heads, num_sms
            )
        if self.decode:
            return self._decode_tile_q
        if self.invariant:
            return max_tile_q(self.head_dim_vo)
        rows = limits.max_num_qo_tokens * self.group_size
        return tile_q_for_rows(rows, rows, limits.max_batch_size, self.head_dim_vo)

    @cached_property
    def possible_tile_qs(self) -> tuple[int, ...]:
        """Rows per tile that some batch may get outside of CUDA graphs."""
        if self.backend == "fa3":
            tile_qs = fa3_tile_qs(self.head_dim_qk, self.head_dim_vo, self.page_size, self.transforms_logits, self.kv_itemsize)
            return tile_qs[-1:] if self.invariant else tile_qs
        if self.decode:
            return (self._decode_tile_q,)
        if self.invariant:
            return (max_tile_q(self.head_dim_vo),)
        return tuple(sorted({16, 64, max_tile_q(self.head_dim_vo)}))


class PlanDraft(NamedTuple):
    """A schedule and the regions it needs, before any memory is involved.

    Attributes:
        shape: what was planned.
        geometry: the batch.
        schedule: who computes what.
        counts: what the workspaces must hold; under CUDA graphs, of the largest batch.
        cuda_graph: offsets and grid do not depend on the batch.
    """

    shape: PlanShape
    geometry: BatchGeometry
    schedule: Schedule
    counts: RegionCounts
    cuda_graph: bool

    @property
    def size(self) -> WorkspaceSize:
        """Bytes of both workspaces."""
        return measure(self.counts)

    def place(self, float_allocator: AlignedAllocator, int_allocator: AlignedAllocator) -> PlanInfo:
        """Reserve every region and describe the plan.

        Raises:
            WorkspaceError: a buffer is too small.
        """
        tiles_at, cta_work_at, groups_at, pages_at, values_at, partial_o_at, partial_lse_at = lay_out(
            self.counts, float_allocator, int_allocator
        )
        geometry, (config, tiles, (cta_work, merge_groups, num_partial_rows), unit_step) = self.geometry, self.schedule
        kind = DecodePlanInfo if self.shape.decode else PrefillPlanInfo
        return kind.of_fields(
            {
                "num_requests": geometry.batch_size,
                "num_qo_tokens": geometry.num_qo_tokens,
                "num_kv_entries": geometry.num_kv_entries,
                "num_ctas": len(cta_work),
                "cta_tile_q": config.cta_tile_q,
                "kv_tile": config.kv_tile,
                "num_tiles": len(tiles),
                "num_merge_groups": len(merge_groups),
                "num_partial_rows": num_partial_rows,
                "unit_step": unit_step,
                "cuda_graph": int(self.cuda_graph),
                "tiles_offset": tiles_at,
                "cta_work_offset": cta_work_at,
                "merge_groups_offset": groups_at,
                "page_indices_offset": pages_at,
                "values_offset": values_at,
                "partial_o_offset": partial_o_at,
                "partial_lse_offset": partial_lse_at,
                "float_bytes": float_allocator.num_allocated_bytes,
                "int_bytes": int_allocator.num_allocated_bytes,
            }
        )

    def write_records(self, info: PlanInfo, records: npt.NDArray[np.uint8]) -> None:
        """Fill the tile, CTA and merge-group regions of an int workspace, or of a staging copy of it."""
        _, tiles, (cta_work, merge_groups, _), _ = self.schedule
        np.ndarray(tiles.shape, _INT32, records, info.tiles_offset)[:] = tiles
        num_ctas = len(cta_work)
        if num_ctas:
            ctas = np.ndarray((num_ctas + 1, CTA_INTS), _INT32, records, info.cta_work_offset)
            ctas[:num_ctas] = cta_work
            ctas[num_ctas] = 0
        if len(merge_groups):
            np.ndarray(merge_groups.shape, _INT32, records, info.merge_groups_offset)[:] = merge_groups


def draft_plan(
    geometry: BatchGeometry,
    shape: PlanShape,
    profile: DeviceProfile,
    num_page_indices: int | None = None,
    value_bytes: int | None = None,
    mask_begin: npt.NDArray[np.int64] | None = None,
    graph_limits: BatchLimits | None = None,
) -> PlanDraft:
    """Schedule a batch.

    Args:
        geometry: the batch.
        shape: heads, widths and options.
        profile: the GPU.
        num_page_indices: page-table entries the int workspace must hold (under CUDA graphs: at most), or None.
        value_bytes: bytes of per-head values and masks the int workspace must hold, or None.
        mask_begin: [batch_size] first byte of each request's packed mask, or None.
        graph_limits: plan for CUDA graphs, with grid and offsets that suit every batch within these limits.

    Raises:
        ArgumentError: the batch exceeds `graph_limits`, or has more units of work or packed rows of one request than 32 bits hold.
    """
    if geometry.num_qo_tokens * shape.group_size > MAX_PACKED_ROWS:
        _check_packed_rows(geometry, shape.group_size)
    if graph_limits is not None:
        _check_limits(geometry, graph_limits)
    tile_q = shape.tile_q(geometry, profile.num_sms, graph_limits)
    config, policy, kv_tiles, keys_in_l2 = shape.kernel(tile_q, profile)
    tiles = make_tiles(geometry, shape.group_size, tile_q, config.kv_tile, shape.span, mask_begin)
    cuda_graph = graph_limits is not None
    if len(kv_tiles) > 1 and not cuda_graph:
        kv_tile = fa3_kv_tile(kv_tiles, tiles.keys, shape.kv_itemsize)
        if kv_tile != config.kv_tile:
            config, policy, _, _ = shape.kernel(tile_q, profile, kv_tile)
            if shape.span.window_left >= 0:  # otherwise every tile begins with key 0, whatever an iteration is
                tiles = make_tiles(geometry, shape.group_size, tile_q, kv_tile, shape.span, mask_begin)
    if policy.fixed_kv is not None or len(tiles.records) * shape.num_kv_heads > MAX_UNITS:
        _check_units(tiles, shape.num_kv_heads, policy.fixed_kv)
    schedule = make_schedule(tiles, config, profile.num_sms, shape.num_kv_heads, policy, cuda_graph, keys_in_l2)
    if graph_limits is not None:
        counts = shape.capacity(config, profile, graph_limits, num_page_indices, value_bytes)
        _check_capacity(schedule, counts)
    else:
        _, records, (cta_work, merge_groups, rows), _ = schedule
        num_tiles, num_ctas, num_groups = len(records), len(cta_work), len(merge_groups)
        counts = tuple_new(RegionCounts, (num_tiles, num_ctas, num_groups, rows, shape.head_dim_vo, num_page_indices, value_bytes))
    return tuple_new(PlanDraft, (shape, geometry, schedule, counts, cuda_graph))


def _check_units(tiles: Tiles, num_kv_heads: int, fixed_kv: int | None) -> None:
    """Refuse batches of more units than CTAs can count in 32 bits, where the next unit may be one grid further."""
    most_parts = 1 if fixed_kv is None else max(1, -(-tiles.longest // fixed_kv))
    if len(tiles.records) * most_parts * num_kv_heads <= MAX_UNITS:
        return
    num_tiles = len(tiles.records) if fixed_kv is None else int(np.maximum(-(-tiles.keys // fixed_kv), 1).sum())
    if num_tiles * num_kv_heads > MAX_UNITS:
        raise ArgumentError(f"batch: has {num_tiles} tiles of {num_kv_heads} KV heads, supported are up to {MAX_UNITS} units of one by one")


def _check_packed_rows(geometry: BatchGeometry, group_size: int) -> None:
    longest = int(geometry.qo_len.max())
    if longest * group_size > MAX_PACKED_ROWS:
        raise ArgumentError(
            f"qo_indptr: request {geometry.qo_len.argmax()} has {longest} query tokens of {group_size} heads per KV head, "
            f"supported are up to {MAX_PACKED_ROWS // group_size} tokens"
        )


def _check_capacity(schedule: Schedule, counts: RegionCounts) -> None:
    """Refuse a schedule that the regions of its CUDA graph would not hold, rather than write past their ends."""
    _, records, (cta_work, merge_groups, num_partial_rows), _ = schedule
    needs = len(records), len(cta_work), len(merge_groups), num_partial_rows
    holds = counts.num_tiles, counts.num_ctas, counts.num_merge_groups, counts.num_partial_rows
    if any(need > hold for need, hold in zip(needs, holds, strict=True)):
        raise WorkspaceError(f"plan: needs {needs} tiles, CTAs, merge groups and partial rows, this object's CUDA graph holds {holds}")


def _check_limits(geometry: BatchGeometry, limits: BatchLimits) -> None:
    if geometry.batch_size > limits.max_batch_size:
        raise ArgumentError(f"batch: has {geometry.batch_size} requests, this object's CUDA graph holds at most {limits.max_batch_size}")
    if geometry.num_qo_tokens > limits.max_num_qo_tokens:
        raise ArgumentError(
            f"batch: has {geometry.num_qo_tokens} query tokens, this object's CUDA graph holds at most {limits.max_num_qo_tokens}"
        )
    if limits.max_kv_len is not None and geometry.longest_kv > limits.max_kv_len:
        raise ArgumentError(
            f"batch: has a request of {geometry.longest_kv} keys, this object's CUDA graph holds at most {limits.max_kv_len}"
        )


def bound(
    shape: PlanShape, limits: BatchLimits, profile: DeviceProfile, num_page_indices: int | None = None, value_bytes: int | None = None
) -> WorkspaceSize:
    """Bytes that suffice for every batch within `limits`, with or without CUDA graphs."""
    float_bytes = int_bytes = 0
    shapes = [replace(shape, transforms_logits=transforms) for transforms in (False, True)]
    if profile.arch == FA3_ARCH and not shape.decode and (shape.head_dim_qk, shape.head_dim_vo) in FA3_TILES[shape.kv_itemsize]:
        fa3_shapes = [replace(one, backend="fa3") for one in shapes]
        shapes += [one for one in fa3_shapes if one.possible_tile_qs]
    for one in shapes:
        for tile_q in one.possible_tile_qs:
            size = measure(one.capacity(one.config(tile_q, profile), profile, limits, num_page_indices, value_bytes))
            float_bytes, int_bytes = max(float_bytes, size.float_bytes), max(int_bytes, size.int_bytes)
    return WorkspaceSize(float_bytes, int_bytes)
