# SPDX-License-Identifier: Apache-2.0
"""Batches and hand-cut plans for backend tests: the records of docs/ARCHITECTURE.md, written without the library's planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyinfer.schedule.partition import GROUP_INTS
from tests.support.oracle import AttentionOptions

Array = npt.NDArray[Any]

#: Byte pattern of workspaces before a run: NaN as float32, far out of range as int32.
DIRT = 0xFF


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs of one batch, as the oracle wants them (per request) and as a backend wants them (one cache).

    Every slot of the cache that belongs to no request holds NaN.
    """

    q: Array
    qo_lens: tuple[int, ...]
    keys: list[Array]
    values: list[Array]
    k: Array
    v: Array
    page_indices: Array | None
    kv_bases: tuple[int, ...]

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(len(keys) for keys in self.keys)

    @property
    def num_kv_heads(self) -> int:
        return int(self.k.shape[-2])

    @property
    def group_size(self) -> int:
        return int(self.q.shape[1]) // self.num_kv_heads


def make_batch(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dims: tuple[int, int] = (64, 64),
    page_size: int = 16,
    layout: str = "NHD",
    q_dtype: str = "float16",
    kv_dtype: str | None = None,
    q_factor: float = 1.0,
    seed: int = 0,
) -> Batch:
    """Random normal inputs. `layout` is "NHD" or "HND" for a paged cache, "RAGGED" for none."""
    rng = np.random.default_rng(seed)
    q_type, kv_type = _dtype(q_dtype), _dtype(kv_dtype or q_dtype)
    q = (q_factor * rng.standard_normal((sum(qo_lens), num_qo_heads, head_dims[0]))).astype(q_type)
    keys = [rng.standard_normal((n, num_kv_heads, head_dims[0])).astype(kv_type) for n in kv_lens]
    values = [rng.standard_normal((n, num_kv_heads, head_dims[1])).astype(kv_type) for n in kv_lens]
    if layout == "RAGGED":
        bases = (3 + np.cumsum([0, *kv_lens])).tolist()  # the first rows belong to nobody
        k, v = (np.full((bases[-1] + 5, num_kv_heads, dim), np.nan, kv_type) for dim in head_dims)
        for base, request_keys, request_values in zip(bases, keys, values, strict=False):
            k[base : base + len(request_keys)] = request_keys
            v[base : base + len(request_values)] = request_values
        return Batch(q, tuple(qo_lens), keys, values, k, v, None, tuple(bases[:-1]))
    page_counts = [-(-n // page_size) for n in kv_lens]
    bases = np.cumsum([0, *page_counts]).tolist()
    num_pages = bases[-1] + 3
    page_indices = rng.permutation(num_pages)[: bases[-1]].astype(np.int32)
    k, v = (_empty_cache(num_pages, page_size, num_kv_heads, dim, kv_type, layout) for dim in head_dims)
    for base, request_keys, request_values in zip(bases, keys, values, strict=False):
        for j in range(len(request_keys)):
            k[page_indices[base + j // page_size], j % page_size] = request_keys[j]
            v[page_indices[base + j // page_size], j % page_size] = request_values[j]
    return Batch(q, tuple(qo_lens), keys, values, k, v, page_indices, tuple(bases[:-1]))


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.float16) if name == "float16" else np.dtype(getattr(ml_dtypes, name))


def _empty_cache(num_pages: int, page_size: int, num_kv_heads: int, dim: int, kv_type: np.dtype[Any], layout: str) -> Array:
    """A cache of NaN, seen as [page, slot, head, dim] whatever its layout in memory."""
    if layout == "NHD":
        return np.full((num_pages, page_size, num_kv_heads, dim), np.nan, kv_type)
    return np.full((num_pages, num_kv_heads, page_size, dim), np.nan, kv_type).transpose(0, 2, 1, 3)


@dataclass(eq=False)
class Plan:
    """The records of one plan as lists; `build` puts them in dirty workspaces."""

    cta_tile_q: int
    kv_tile: int
    tiles: list[list[int]]
    cta_work: list[list[int]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    num_partial_rows: int = 0


def make_tiles(
    batch: Batch,
    options: AttentionOptions,
    cta_tile_q: int = 16,
    kv_tile: int = 64,
    split_size: int | None = None,
    mask_begins: Sequence[int] | None = None,
) -> Plan:
    """Tiles of a batch, with their key spans; spans longer than `split_size` keys become chunks of a merge group per KV head."""
    plan = Plan(cta_tile_q, kv_tile, [])
    q_begin = 0
    for request, (qo_len, kv_len) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
        mask_begin = 0 if mask_begins is None else mask_begins[request]
        for row_begin in range(0, qo_len * batch.group_size, cta_tile_q):
            num_rows = min(cta_tile_q, qo_len * batch.group_size - row_begin)
            first, last = (kv_len - qo_len + row // batch.group_size for row in (row_begin, row_begin + num_rows - 1))
            kv_end = max(0, min(kv_len, last + 1)) if options.causal else kv_len
            kv_begin = max(0, first - options.window_left) // kv_tile * kv_tile if options.window_left >= 0 else 0
            step = split_size or max(1, kv_end - kv_begin)
            chunks = [(begin, min(kv_end, begin + step)) for begin in range(kv_begin, kv_end, step)] or [(kv_begin, kv_end)]
            group = len(plan.groups) if len(chunks) > 1 else -1
            for part, (begin, end) in enumerate(chunks):
                plan.tiles.append([request, q_begin, row_begin, num_rows, begin, end, kv_len, batch.kv_bases[request], qo_len])
                plan.tiles[-1] += [group, part if group >= 0 else 0, mask_begin]
            for _ in range(batch.num_kv_heads if group >= 0 else 0):
                _add_group(plan, len(chunks), num_rows)
        q_begin += qo_len
    return plan


def unit_iters(plan: Plan, unit: int, num_kv_heads: int) -> int:
    """Iterations of a unit."""
    tile = plan.tiles[unit // num_kv_heads]
    return max(1, -(-(tile[5] - tile[4]) // plan.kv_tile))


def cut(plan: Plan, num_kv_heads: int, num_ctas: int, num_whole_units: int, cuts: Sequence[int] | None = None) -> Plan:
    """Fill in `cta_work`: whole units first, then the line of iterations of the rest, cut at `cuts` (num_ctas - 1 of them) or evenly."""
    num_units = len(plan.tiles) * num_kv_heads
    line = [(unit, i) for unit in range(num_whole_units, num_units) for i in range(unit_iters(plan, unit, num_kv_heads))]
    bounds = [c * len(line) // num_ctas for c in range(num_ctas + 1)] if cuts is None else [0, *cuts, len(line)]
    shares = [line[bounds[c] : bounds[c + 1]] for c in range(num_ctas)]
    workers: dict[int, list[int]] = {}
    for cta, share in enumerate(shares):
        for unit in dict.fromkeys(unit for unit, _ in share):
            workers.setdefault(unit, []).append(cta)
    group_of = {}
    for unit, ctas in workers.items():
        if len(ctas) > 1:
            group_of[unit] = _add_group(plan, len(ctas), plan.tiles[unit // num_kv_heads][3])
    for cta, share in enumerate(shares):
        if not share:
            plan.cta_work.append([num_whole_units, 0, 0, 0, -1, 0, -1, 0])
            continue
        ends = [share[0][0], share[-1][0]]
        membership = [[group_of[u], workers[u].index(cta)] if u in group_of else [-1, 0] for u in ends]
        tail = membership[1] if ends[0] != ends[1] else [-1, 0]
        plan.cta_work.append([num_whole_units, *share[0], len(share), *membership[0], *tail])
    return plan


def _add_group(plan: Plan, num_parts: int, num_rows: int) -> int:
    plan.groups.append([plan.num_partial_rows, num_parts, *[0] * (GROUP_INTS - 2)])
    plan.num_partial_rows += num_parts * num_rows
    return len(plan.groups) - 1


class Workspaces:
    """Dirty byte buffers with the records of a plan in them and guard bytes around every region."""

    GUARD = 64

    def __init__(self, plan: Plan, head_dim_vo: int, dirt: int = DIRT) -> None:
        self._dirt = dirt
        tables = [np.asarray(t, np.int32).reshape(-1, n) for t, n in ((plan.tiles, 12), (plan.cta_work, 8), (plan.groups, GROUP_INTS))]
        rows = plan.num_partial_rows
        self.int_bytes, ints = self._regions([t.nbytes for t in tables])
        self.float_bytes, floats = self._regions([rows * head_dim_vo * 4, rows * 4])
        self.tiles, self.cta_work, self.merge_groups = (r.view(np.int32).reshape(t.shape) for r, t in zip(ints, tables, strict=True))
        for view, table in zip((self.tiles, self.cta_work, self.merge_groups), tables, strict=True):
            view[:] = table
        self.partial_o = floats[0].view(np.float32).reshape(rows, head_dim_vo)
        self.partial_lse = floats[1].view(np.float32)

    def _regions(self, sizes: Sequence[int]) -> tuple[Array, list[Array]]:
        buffer = np.full(sum(sizes) + self.GUARD * (len(sizes) + 1), self._dirt, np.uint8)
        begins = [self.GUARD * (i + 1) + sum(sizes[:i]) for i in range(len(sizes))]
        return buffer, [buffer[b : b + n] for b, n in zip(begins, sizes, strict=True)]

    def guards_intact(self) -> bool:
        """Whether nothing was written between the regions."""
        ints, floats = self.int_bytes.copy(), self.float_bytes.copy()
        for views, copy in (((self.tiles, self.cta_work, self.merge_groups), ints), ((self.partial_o, self.partial_lse), floats)):
            begin = self.GUARD
            for view in views:
                copy[begin : begin + view.nbytes] = self._dirt
                begin += view.nbytes + self.GUARD
        return bool((ints == self._dirt).all() and (floats == self._dirt).all())


def pack_masks(masks: Sequence[Array]) -> tuple[Array, list[int]]:
    """Packed bits of each request's [qo_len, kv_len] mask, each starting at a byte of its own, and those first bytes."""
    packed = [np.packbits(mask.reshape(-1), bitorder="little") for mask in masks]
    begins = np.cumsum([0, *(len(p) for p in packed)])[:-1].tolist()
    return np.concatenate(packed) if packed else np.zeros(0, np.uint8), begins
