# SPDX-License-Identifier: Apache-2.0
"""A plan as a value: the counts, offsets and sizes of a schedule, and its fixed int64 vector form."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from cupyinfer.errors import ArgumentError

#: Changes whenever a field is added, removed or moved.
VECTOR_VERSION = 2


@dataclass(frozen=True)
class PlanInfo:
    """What `plan` decided, as integers. Which kernels serve it, and the options they get, are not part of it.

    The vector form of a plan is ``[VECTOR_VERSION, KIND, field, field, ...]`` in the order of the fields below.

    Attributes:
        num_requests: requests of the batch.
        num_qo_tokens: query tokens of the batch; `run` checks ``q`` against it.
        num_kv_entries: page-table entries (paged) or rows of ``k`` and ``v`` (ragged) the batch refers to.
        num_ctas: CTAs of the launch; 0 launches nothing.
        cta_tile_q: packed query rows per tile.
        kv_tile: keys per iteration.
        num_tiles: tile records in use.
        num_merge_groups: merge groups in use.
        num_partial_rows: rows of partial results in use.
        unit_step: from one unit of a CTA's share to the next.
        cuda_graph: 1 when grid and offsets stay the same for every batch within the object's capacity.
        tiles_offset: first byte of the tile records in the int workspace.
        cta_work_offset: first byte of the CTA records.
        merge_groups_offset: first byte of the merge groups.
        page_indices_offset: first byte of the page table, or -1 when the caller's device array is read.
        values_offset: first byte of per-head values and packed masks given on the host, or -1.
        partial_o_offset: first byte of partial outputs in the float workspace.
        partial_lse_offset: first byte of their log-sum-exps.
        float_bytes: size of the float workspace.
        int_bytes: size of the int workspace.
    """

    KIND: ClassVar[int] = 0

    num_requests: int
    num_qo_tokens: int
    num_kv_entries: int
    num_ctas: int
    cta_tile_q: int
    kv_tile: int
    num_tiles: int
    num_merge_groups: int
    num_partial_rows: int
    unit_step: int
    cuda_graph: int
    tiles_offset: int
    cta_work_offset: int
    merge_groups_offset: int
    page_indices_offset: int
    values_offset: int
    partial_o_offset: int
    partial_lse_offset: int
    float_bytes: int
    int_bytes: int

    @classmethod
    def of_fields(cls, fields: dict[str, int]) -> Self:
        """The plan of all its fields, whose dict becomes its own; a frozen dataclass's constructor takes several times as long."""
        info = object.__new__(cls)
        object.__setattr__(info, "__dict__", fields)
        return info

    def to_vector(self) -> npt.NDArray[np.int64]:
        """The plan as int64 [2 + number of fields]."""
        return np.array((VECTOR_VERSION, self.KIND, *astuple(self)), np.int64)

    @staticmethod
    def from_vector(vector: Any) -> PlanInfo:
        """The plan of a vector made by `to_vector`.

        Raises:
            ArgumentError: another length, version or kind.
        """
        values = np.asarray(vector)
        length = 2 + len(fields(PlanInfo))
        if values.shape != (length,) or values.dtype != np.int64:
            raise ArgumentError(f"plan_info: got {values.dtype} of shape {values.shape}, expected int64 of shape ({length},)")
        if values[0] != VECTOR_VERSION:
            raise ArgumentError(f"plan_info: has version {values[0]}, this library reads version {VECTOR_VERSION}")
        kinds = {kind.KIND: kind for kind in (DecodePlanInfo, PrefillPlanInfo)}
        if int(values[1]) not in kinds:
            raise ArgumentError(f"plan_info: kind {values[1]} is none of {sorted(kinds)}")
        return kinds[int(values[1])](*values[2:].tolist())


@dataclass(frozen=True)
class DecodePlanInfo(PlanInfo):
    """Plan of one query token per request. KIND is 1."""

    KIND: ClassVar[int] = 1


@dataclass(frozen=True)
class PrefillPlanInfo(PlanInfo):
    """Plan of any number of query tokens per request. KIND is 2."""

    KIND: ClassVar[int] = 2
