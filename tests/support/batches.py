# SPDX-License-Identifier: Apache-2.0
"""One attention call as a value: what is asked for, its random inputs, and what the oracle says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from cupyinfer.dtypes import FP8_QUERY_TYPE, numpy_dtype
from tests.support.oracle import AttentionOptions, attention_oracle, e4m3_weights_bound, low_precision_reference

Array = npt.NDArray[Any]

_SHORT = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


@dataclass(frozen=True)
class Case:
    """One call. Defaults are the plainest one; `str` names what differs.

    Attributes:
        kv_lens: keys of each request.
        qo_lens: query tokens of each request; None for one each.
        op: "decode", "paged" (prefill) or "ragged" (prefill).
        heads: query and KV heads.
        head_dims: width of q and k, and of v and o.
        page_size: keys per page.
        layout: "NHD" or "HND".
        dtype: of q and o; fp8 queries have an o_dtype.
        o_dtype: of o, None for dtype.
        kv_dtype: of the cache, None for dtype.
        causal, window_left, soft_cap, sm_scale, pos_encoding, rope_scale, rope_theta: as the library's plan takes them.
        slopes: ALiBi slopes are given, not the published ones.
        sinks: one attention sink per query head.
        mask: "", "bool" or "packed".
        scales: "", "tensor" or "head" factors of k and v, and of fp8 queries.
        fixed_split_size, disable_split_kv, graph: as the library takes them.
        indices_on: where the page table lies: "device" or "host".
        seed: of the inputs.
    """

    kv_lens: tuple[int, ...]
    qo_lens: tuple[int, ...] | None = None
    op: str = "decode"
    heads: tuple[int, int] = (8, 2)
    head_dims: tuple[int, int] = (128, 128)
    page_size: int = 16
    layout: str = "NHD"
    dtype: str = "float16"
    kv_dtype: str | None = None
    o_dtype: str | None = None
    causal: bool = False
    window_left: int = -1
    soft_cap: float = 0.0
    sm_scale: float | None = None
    pos_encoding: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    slopes: bool = False
    sinks: bool = False
    mask: str = ""
    scales: str = ""
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    graph: bool = False
    indices_on: str = "device"
    seed: int = 0

    @property
    def queries(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        return (1,) * len(self.kv_lens) if self.qo_lens is None else self.qo_lens

    @property
    def cache_dtype(self) -> str:
        """Element type of the cache."""
        return self.kv_dtype or self.dtype

    @property
    def out_dtype(self) -> str:
        """Element type of the output."""
        return self.o_dtype or self.dtype

    @property
    def paged(self) -> bool:
        """Whether K and V are reached through a page table."""
        return self.op != "ragged"

    def __str__(self) -> str:
        group, dims = self.heads[0] // self.heads[1], self.head_dims
        words = [self.op, f"{len(self.kv_lens)}req", f"gqa{group}", f"h{self.heads[1]}", f"d{dims[0]}"]
        words[-1] += "" if dims[0] == dims[1] else f"x{dims[1]}"
        words += [f"page{self.page_size}"] if self.paged else []
        words += [self.layout.lower(), _SHORT[self.dtype]]
        words += [f"kv-{_SHORT[self.kv_dtype]}"] if self.kv_dtype else []
        words += [f"o-{_SHORT[self.o_dtype]}"] if self.o_dtype else []
        words += [f"window{self.window_left}"] if self.window_left >= 0 else []
        words += [f"cap{self.soft_cap:g}"] if self.soft_cap else []
        words += [self.pos_encoding.split("_")[0].lower()] if self.pos_encoding != "NONE" else []
        words += [f"split{self.fixed_split_size}"] if self.fixed_split_size else []
        words += [name for name in ("causal", "slopes", "sinks", "disable_split_kv", "graph") if getattr(self, name)]
        words += [f"{name}-{getattr(self, name)}" for name in ("mask", "scales") if getattr(self, name)]
        return "-".join(words)


def tiny_case(case: Case) -> Case:
    """The same call for a batch of one query token and one key."""
    return replace(case, kv_lens=(1,), qo_lens=None if case.op == "decode" else (1,), fixed_split_size=None)


class Data:
    """Random inputs of a case on the host.

    Every slot of the cache that belongs to no request holds NaN; pages lie in random order. Queries are scaled so that logits have a
    standard deviation of about 2: weights are neither equal nor concentrated on one key.
    """

    def __init__(self, case: Case, unused: float = np.nan) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        num_qo_heads, num_kv_heads = case.heads
        q_type, kv_type = numpy_dtype(case.dtype), numpy_dtype(case.cache_dtype)
        self.q = (2 * rng.standard_normal((sum(case.queries), num_qo_heads, case.head_dims[0]))).astype(q_type)
        self.keys, self.values = (
            [rng.standard_normal((n, num_kv_heads, dim)).astype(kv_type) for n in case.kv_lens] for dim in case.head_dims
        )
        self.sinks = rng.normal(1, 2, num_qo_heads).astype(np.float32) if case.sinks else None
        self.slopes = rng.uniform(0.01, 0.5, num_qo_heads).astype(np.float32) if case.slopes else None
        self.k_scale, self.v_scale = _scales(case, rng)
        self.q_scale = _q_scale(case, rng)
        self.masks = [_mask(rng, shape) for shape in zip(case.queries, case.kv_lens, strict=True)] if case.mask else None
        self.qo_indptr = _offsets(case.queries)
        if case.paged:
            self._fill_pages(rng, unused)
        else:
            self._fill_rows(unused)

    def _fill_pages(self, rng: np.random.Generator, unused: float) -> None:
        case = self.case
        page_counts = [-(-n // case.page_size) for n in case.kv_lens]
        self.kv_indptr = _offsets(page_counts)
        self.last_page_len = np.asarray([(n - 1) % case.page_size + 1 if n else 0 for n in case.kv_lens], np.int32)
        num_pages = sum(page_counts) + 3
        self.indices = rng.permutation(num_pages)[: sum(page_counts)].astype(np.int32)
        self.caches = [self._cache(num_pages, dim, unused) for dim in case.head_dims]
        for base, keys, values in zip(self.kv_indptr, self.keys, self.values, strict=False):
            position = np.arange(len(keys))
            pages, slots = self.indices[base + position // case.page_size], position % case.page_size
            for cache, rows in zip(self.caches, (keys, values), strict=True):
                if case.layout == "NHD":
                    cache[pages, slots] = rows
                else:
                    cache[pages, :, slots] = rows

    def _cache(self, num_pages: int, dim: int, unused: float) -> Array:
        case = self.case
        per_page = (case.page_size, case.heads[1])
        shape = (num_pages, *(per_page if case.layout == "NHD" else per_page[::-1]), dim)
        return np.full(shape, unused, numpy_dtype(case.cache_dtype))

    def _fill_rows(self, unused: float) -> None:
        case = self.case
        self.kv_indptr = _offsets(case.kv_lens)
        tail = 37  # rows past the last request, as of a buffer allocated for more
        self.caches = []
        for rows, dim in ((self.keys, case.head_dims[0]), (self.values, case.head_dims[1])):
            padding = np.full((tail, case.heads[1], dim), unused, numpy_dtype(case.cache_dtype))
            all_rows = np.concatenate([*rows, padding])
            self.caches.append(np.ascontiguousarray(all_rows.swapaxes(0, 1)) if case.layout == "HND" else all_rows)

    def mask_arguments(self) -> dict[str, Array]:
        """The mask as the case passes it."""
        if self.masks is None:
            return {}
        if self.case.mask == "packed":
            packed = [np.packbits(mask.reshape(-1), bitorder="little") for mask in self.masks]
            return {"packed_custom_mask": np.concatenate([np.zeros(0, np.uint8), *packed])}
        return {"custom_mask": np.concatenate([np.zeros(0, np.bool_), *(mask.reshape(-1) for mask in self.masks)])}

    @property
    def oracle_options(self) -> AttentionOptions:
        """The case in the oracle's terms."""
        case = self.case
        return AttentionOptions(
            causal=case.causal and not case.mask,  # a custom mask takes the place of the causal one
            window_left=case.window_left,
            sm_scale=case.sm_scale,
            logits_soft_cap=case.soft_cap,
            pos_encoding=case.pos_encoding,
            alibi_slopes=published_slopes(case.heads[0]) if self.slopes is None else self.slopes,
            rope_scale=case.rope_scale,
            rope_theta=case.rope_theta,
            sinks=self.sinks,
            q_scale=self.q_scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    @cached_property
    def expected(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """The float64 oracle's output and log-sum-exp, and those of the low-precision reference."""
        call = (self.q, self.case.queries, self.keys, self.values, self.oracle_options, self.masks)
        empty = self.q.shape[:2]
        if not self.q.shape[0]:
            nothing = np.zeros((*empty, self.case.head_dims[1])), np.zeros(empty)
            return nothing, (nothing[0].astype(np.float32), nothing[1].astype(np.float32))
        return attention_oracle(*call), low_precision_reference(*call)

    @cached_property
    def weights_bound(self) -> Array | None:
        """What rounding softmax weights to 8 bits may cost each output element; None where they have 16."""
        if self.case.dtype != FP8_QUERY_TYPE or not self.q.shape[0]:
            return None
        return e4m3_weights_bound(self.q, self.case.queries, self.keys, self.values, self.oracle_options, self.masks)


def published_slopes(num_heads: int) -> Array:
    """The slopes of the ALiBi paper, head by head: 2^(-8 h / n) for a power of two n, then odd steps of the next power."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-8 * (2 * head + 1) / (2 * power)) for head in range(num_heads - power)]
    return np.asarray(slopes)


def _offsets(lengths: Any) -> Array:
    return np.cumsum([0, *lengths]).astype(np.int32)


def _mask(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Six of ten keys seen at random, and one row that sees none."""
    mask = rng.random(shape) < 0.6
    mask[shape[0] // 2 :: max(1, shape[0])] = False
    return mask


def _scales(case: Case, rng: np.random.Generator) -> tuple[Any, Any]:
    if not case.scales:
        return 1.0, 1.0
    if case.scales == "tensor":
        return 0.25, 0.5
    k_scale, v_scale = rng.uniform(0.25, 2.0, (2, case.heads[1])).astype(np.float32)
    return k_scale, v_scale


def _q_scale(case: Case, rng: np.random.Generator) -> Any:
    if not case.scales or case.dtype != FP8_QUERY_TYPE:
        return 1.0
    return 0.75 if case.scales == "tensor" else rng.uniform(0.25, 1.5, case.heads[0]).astype(np.float32)
