# SPDX-License-Identifier: Apache-2.0
"""Sizes without arrays: a batch given by its lengths alone, drafted for a named GPU, beside the bound for its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyinfer.attention.metadata import PageTable
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.cli.arguments import ModelShape
from cupyinfer.errors import ArgumentError
from cupyinfer.schedule.bounds import WorkspaceLimits
from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.geometry import BatchGeometry, decode_geometry, paged_prefill_geometry, ragged_prefill_geometry
from cupyinfer.schedule.layout import memory_map
from cupyinfer.schedule.planner import PlanDraft
from cupyinfer.schedule.profile import DeviceProfile

Lengths = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class SizingOptions:
    """What a size depends on besides the batch and its limits.

    Attributes:
        shape: heads, width, type, page size.
        decode: one query token per request.
        ragged: keys in one array, not in pages.
        causal: prefill queries see no later key.
        kv_dtype: element type of the cache, or None for that of the queries.
        fixed_split_size: pages (ragged: keys) per part.
        disable_split_kv: never divide a request's keys.
        cuda_graph: plan for every batch within the limits.
        host_pages: the page table is given on the host, so the int workspace holds it.
    """

    shape: ModelShape
    decode: bool
    ragged: bool = False
    causal: bool = True
    kv_dtype: str | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    cuda_graph: bool = False
    host_pages: bool = False

    @property
    def pages_in_workspace(self) -> bool:
        """Whether the int workspace holds the page table: from the host, or copied so that a CUDA graph finds it."""
        return not self.ragged and (self.host_pages or self.cuda_graph)


def batch_limits(options: SizingOptions, kv_lens: Lengths, qo_lens: Lengths | None) -> WorkspaceLimits:
    """The tightest limits that hold one batch."""
    shape = options.shape
    page_size = 1 if options.ragged else shape.page_size
    return WorkspaceLimits(
        "decode" if options.decode else "prefill",
        len(kv_lens),
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.head_dim_vo,
        max_num_qo_tokens=None if qo_lens is None else int(sum(qo_lens)),
        max_num_pages=int(sum(-(-length // page_size) for length in kv_lens)) if options.pages_in_workspace else None,
        page_size=page_size,
        kv_data_type=options.kv_dtype or shape.dtype,
        fixed_split_size=options.fixed_split_size,
        disable_split_kv=options.disable_split_kv,
        max_kv_len=max(kv_lens, default=0),
    )


def draft(
    options: SizingOptions,
    kv_lens: Lengths,
    qo_lens: Lengths | None,
    limits: WorkspaceLimits,
    profile: DeviceProfile,
    within_limits: bool = False,
) -> PlanDraft:
    """Schedule a batch given by its lengths; `within_limits` reserves for every batch within them, as a CUDA graph does.

    Raises:
        ArgumentError: lengths that do not fit each other or, for a CUDA graph, the limits.
    """
    shape = replace(options.shape, page_size=1) if options.ragged else options.shape
    checked = shape.options(
        options.decode,
        paged=not options.ragged,
        causal=options.causal and not options.decode,
        kv_data_type=options.kv_dtype,
        fixed_split_size=options.fixed_split_size,
        disable_split_kv=options.disable_split_kv,
    )
    geometry = _geometry(options, kv_lens, qo_lens)
    request = AttentionRequest(checked, geometry, _pages(options, geometry))
    if within_limits:
        tokens = limits.max_batch_size if limits.max_num_qo_tokens is None else limits.max_num_qo_tokens
        longest = limits.max_kv_len if options.fixed_split_size is not None else None
        request.graph_limits, request.graph_pages = BatchLimits(limits.max_batch_size, tokens, longest), limits.max_num_pages
    return request.draft(profile)


def _geometry(options: SizingOptions, kv_lens: Lengths, qo_lens: Lengths | None) -> BatchGeometry:
    keys = np.asarray(kv_lens, np.int64)
    queries = None if qo_lens is None else np.asarray(qo_lens, np.int64)
    if queries is not None and len(queries) != len(keys):
        raise ArgumentError(f"--qo-lens: has {len(queries)} requests, --kv-lens has {len(keys)}")
    if queries is not None and options.ragged:
        return ragged_prefill_geometry(_indptr(queries), _indptr(keys))
    page_size = options.shape.page_size
    num_pages = -(-keys // page_size)
    last_page_len = np.where(num_pages > 0, keys - (num_pages - 1) * page_size, 0)
    if queries is None:
        return decode_geometry(_indptr(num_pages), last_page_len, page_size)
    return paged_prefill_geometry(_indptr(queries), _indptr(num_pages), last_page_len, page_size)


def _indptr(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _pages(options: SizingOptions, geometry: BatchGeometry) -> PageTable:
    """A page table of the right length; sizes do not depend on what it holds."""
    if options.ragged:
        return PageTable()
    return PageTable(geometry.num_kv_entries, copied=options.pages_in_workspace)


def regions(drafted: PlanDraft) -> list[dict[str, Any]]:
    """The memory map of a draft, for JSON."""
    return [{"workspace": r.workspace, "name": r.name, "offset": r.offset, "bytes": r.num_bytes} for r in memory_map(drafted.counts)]
