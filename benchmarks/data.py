# SPDX-License-Identifier: Apache-2.0
"""The arrays of one case, made once and shared by every variant so that all read the same bytes."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

from benchmarks import kernels
from benchmarks.cases import Case


class CaseData:
    """Random q, k, v of one case on the current GPU, and its index arrays on the host.

    Attributes:
        case: the case.
        qo_indptr: [batch + 1] int32 NumPy, first query row of each request.
        kv_indptr: [batch + 1] int32 NumPy, first row of each request in the ragged k and v.
        page_indptr: [batch + 1] int32 NumPy, first entry of each request in `page_indices`.
        page_indices: [pages] int32 NumPy, a random permutation.
        last_page_len: [batch] int32 NumPy, tokens in the last page of each request.
        q: [tokens, num_qo_heads, head_dim] CuPy; fp8 travels as uint8.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        pages = np.array(case.pages_per_request, dtype=np.int64)
        kv_lens = np.array(case.kv_lens, dtype=np.int64)
        self.qo_indptr = _indptr(case.qo_lens)
        self.kv_indptr = _indptr(case.kv_lens)
        self.page_indptr = _indptr(pages)
        self.last_page_len = (kv_lens - (pages - 1) * case.page_size).astype(np.int32)
        self.page_indices = np.random.default_rng(seed).permutation(int(pages.sum())).astype(np.int32)
        self.q = kernels.random_array((int(self.qo_indptr[-1]), case.num_qo_heads, case.head_dim), case.q_dtype, seed + 11)
        self._seed = seed

    @functools.cached_property
    def paged_kv(self) -> tuple[Any, Any]:
        """K and V pages, each [pages, page_size, num_kv_heads, head_dim] (NHD); fp8 travels as uint8."""
        case = self.case
        shape = (len(self.page_indices), case.page_size, case.num_kv_heads, case.head_dim)
        k, v = (kernels.random_array(shape, case.kv_dtype, self._seed + part) for part in (12, 13))
        return k, v

    @functools.cached_property
    def ragged_kv(self) -> tuple[Any, Any]:
        """The same keys and values as `paged_kv` in request order, each [tokens, num_kv_heads, head_dim]."""
        case = self.case
        rows = cupy.asarray(np.concatenate([self.request_rows(request) for request in range(case.batch_size)]))
        storage = cupy.uint16 if case.kv_dtype == "bfloat16" else cupy.uint8
        k, v = (
            cupy.take(cache.view(storage).reshape(-1, case.num_kv_heads, case.head_dim), rows, axis=0).view(cache.dtype)
            for cache in self.paged_kv
        )
        return k, v

    def request_rows(self, request: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows of one request's tokens in the page pool seen as [pages * page_size] rows."""
        page_size = self.case.page_size
        pages = self.page_indices[self.page_indptr[request] : self.page_indptr[request + 1]].astype(np.int64)
        return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[: self.case.kv_lens[request]]


def _indptr(lengths: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.int64)))).astype(np.int32)
