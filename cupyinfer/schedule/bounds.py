# SPDX-License-Identifier: Apache-2.0
"""workspace_bound: bytes that suffice for every batch within limits, known before any batch is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from cupyinfer.dtypes import FP8_TYPES, HALF_TYPES, canonical_dtype, itemsize
from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.schedule.capacity import BatchLimits
from cupyinfer.schedule.geometry import check_flag, store_ints
from cupyinfer.schedule.planner import PlanShape, bound
from cupyinfer.schedule.profile import DeviceProfile, named_profile
from cupyinfer.workspace import WORKSPACE_ALIGNMENT, WorkspaceSize


@dataclass(frozen=True)
class WorkspaceLimits:
    """Everything a workspace bound depends on besides the GPU.

    Attributes:
        kind: "decode" or "prefill".
        max_batch_size: requests of a batch.
        num_qo_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: width of queries and keys.
        head_dim_vo: width of values and outputs, by default head_dim.
        max_num_qo_tokens: query tokens of a batch; needed for prefill.
        max_num_pages: page-table entries of a batch. Left out, nothing is kept for page tables: a contiguous int32 device table is
            read in place, except under CUDA graphs.
        page_size: keys per page; matters with fixed_split_size only.
        kv_data_type: element type of the cache.
        fixed_split_size: as for `plan`.
        disable_split_kv: as for `plan`.
        max_kv_len: keys of the longest request; needed with fixed_split_size.
        value_bytes: bytes of masks and per-head values that the int workspace holds, since they are given on the host: 4 per query head
            rounded up to a multiple of 16 for alibi_slopes (the published ones of ALIBI too), as much for sinks, and
            ``sum(ceil(qo_len * kv_len / 8))`` of a custom mask, packed by the caller or not.

    Raises:
        ArgumentError, ArgumentTypeError: a field of another kind, or out of range, by name.
    """

    kind: str
    max_batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_vo: int | None = None
    max_num_qo_tokens: int | None = None
    max_num_pages: int | None = None
    page_size: int = 1
    kv_data_type: Any = "bfloat16"
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    max_kv_len: int | None = None
    value_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in ("decode", "prefill"):
            raise ArgumentError(f"kind: got {self.kind!r}, expected 'decode' or 'prefill'")
        store_ints(self, _LEAST, tuple(field.name for field in fields(self) if field.default is None))
        object.__setattr__(self, "disable_split_kv", check_flag(self.disable_split_kv, "disable_split_kv"))


#: Least value of every integer among the limits.
_LEAST = {
    "max_batch_size": 0,
    "num_qo_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 1,
    "head_dim_vo": 1,
    "max_num_qo_tokens": 0,
    "max_num_pages": 0,
    "page_size": 1,
    "max_kv_len": 0,
    "value_bytes": 0,
}


def workspace_bound(limits: WorkspaceLimits, profile: str | DeviceProfile) -> WorkspaceSize:
    """Bytes of each workspace that suffice for every batch within `limits`, with and without CUDA graphs.

    A cut makes at most two parts of one tile each, and no automatic schedule has more parts than two per SM, whatever the batch: so
    partial results never exceed ``2 * num_sms * rows_per_tile * (head_dim_vo + 1) * 4`` bytes. With `fixed_split_size` the parts
    follow from `max_kv_len` instead; with `disable_split_kv` there are none.

    Args:
        limits: heads, widths and the largest batch.
        profile: the GPU, by name or as a DeviceProfile.

    Raises:
        ArgumentError: limits that are missing or make no sense, or a GPU that is not known by that name.
        ArgumentTypeError: `limits` or `profile` is of another type, or `kv_data_type` is no type of a cache.
        UnsupportedError: a head_dim that no kernel serves.
    """
    if not isinstance(limits, WorkspaceLimits):
        raise ArgumentTypeError(f"limits: got {type(limits).__name__}, expected WorkspaceLimits")
    decode = limits.kind == "decode"
    tokens = limits.max_batch_size if decode else limits.max_num_qo_tokens
    if tokens is None:
        raise ArgumentError("max_num_qo_tokens: a prefill bound needs it")
    shape = PlanShape(
        decode,
        limits.num_qo_heads,
        limits.num_kv_heads,
        limits.head_dim,
        limits.head_dim if limits.head_dim_vo is None else limits.head_dim_vo,
        itemsize(canonical_dtype(limits.kv_data_type, "kv_data_type", (*HALF_TYPES, *FP8_TYPES))),
        limits.page_size,
        fixed_split_size=limits.fixed_split_size,
        disable_split_kv=limits.disable_split_kv,
    )
    batch = BatchLimits(limits.max_batch_size, tokens, limits.max_kv_len)
    # Whatever lies behind a mask would begin at a multiple of 16, and a plan counts the bytes up to there.
    values = None if limits.value_bytes is None else -(-limits.value_bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return bound(shape, batch, named_profile(profile), limits.max_num_pages, values)
