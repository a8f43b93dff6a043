# SPDX-License-Identifier: Apache-2.0
"""Adapters of cupyinfer itself, through its public wrappers and with workspaces of exactly the size it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cupy
import ml_dtypes

import cupyinfer
from benchmarks.cases import Case
from benchmarks.data import CaseData
from benchmarks.variant import Adapter, Prepared


def exact_workspace(wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Give the wrapper buffers of exactly the bytes it asks for this batch; returns them as (float, int)."""
    size = wrapper.workspace_size(*args, **kwargs)
    buffers = (cupy.empty(max(16, n), dtype=cupy.uint8) for n in (size.float_bytes, size.int_bytes))
    wrapper.reset_workspace_buffer(*buffers)
    return size.float_bytes, size.int_bytes


def _empty_wrapper(kind: Any, backend: str) -> Any:
    return kind(cupy.empty(16, dtype=cupy.uint8), cupy.empty(16, dtype=cupy.uint8), kv_layout="NHD", backend=backend)


def _poisoned(data: CaseData) -> Any:
    """An output full of NaN: a row no kernel writes then fails the check."""
    return cupy.full(data.q.shape, 0x7FC0, dtype=cupy.uint16).view(ml_dtypes.bfloat16)


def _prepare(name: str, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run_args: tuple[Any, ...], out: Any) -> Prepared:
    float_bytes, int_bytes = exact_workspace(wrapper, args, kwargs)

    def plan() -> None:
        wrapper.plan(*args, **kwargs)

    def launch() -> None:
        wrapper.run(*run_args, out=out)

    plan()
    return Prepared(name, launch, lambda: out, plan, float_bytes, int_bytes)


@dataclass(frozen=True)
class Decode:
    """Batch decode on a paged cache; fp8 pages are uint8 arrays whose type is named at plan."""

    name: str = "cupyinfer"
    backend: str = "auto"

    @property
    def missing(self) -> str | None:
        return None

    def supports(self, case: Case) -> bool:
        return case.kind == "decode"

    def prepare(self, data: CaseData) -> Prepared:
        case = data.case
        wrapper = _empty_wrapper(cupyinfer.BatchDecodeWithPagedKVCacheWrapper, self.backend)
        heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
        args = (data.page_indptr, data.page_indices, data.last_page_len, *heads)
        kwargs = {"q_data_type": "bfloat16", "kv_data_type": case.kv_dtype}
        out = _poisoned(data)
        return _prepare(self.name, wrapper, args, kwargs, (data.q, data.paged_kv), out)


@dataclass(frozen=True)
class Prefill:
    """Batch prefill on a paged cache or on ragged keys."""

    name: str
    paged: bool
    backend: str = "auto"

    @property
    def missing(self) -> str | None:
        return None

    def supports(self, case: Case) -> bool:
        # fp8 queries have kernels in fa3 alone.
        return case.kind == "prefill" and (case.q_dtype == "bfloat16" or self.backend in ("auto", "fa3"))

    def prepare(self, data: CaseData) -> Prepared:
        case = data.case
        heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim)
        kwargs = {"causal": case.causal, "q_data_type": case.q_dtype, "kv_data_type": case.kv_dtype, "o_data_type": "bfloat16"}
        out = _poisoned(data)
        if self.paged:
            wrapper = _empty_wrapper(cupyinfer.BatchPrefillWithPagedKVCacheWrapper, self.backend)
            args: tuple[Any, ...] = (data.qo_indptr, data.page_indptr, data.page_indices, data.last_page_len, *heads, case.page_size)
            return _prepare(self.name, wrapper, args, kwargs, (data.q, data.paged_kv), out)
        wrapper = _empty_wrapper(cupyinfer.BatchPrefillWithRaggedKVCacheWrapper, self.backend)
        return _prepare(self.name, wrapper, (data.qo_indptr, data.kv_indptr, *heads), kwargs, (data.q, *data.ragged_kv), out)


def adapters(backend: str = "auto") -> tuple[Adapter, ...]:
    """Every variant of ours, on one backend."""
    return Decode(backend=backend), Prefill("cupyinfer paged", True, backend), Prefill("cupyinfer ragged", False, backend)
