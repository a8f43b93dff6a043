# SPDX-License-Identifier: Apache-2.0
"""A sampled float64 check of one variant's output: a few rows of a few heads, so that it costs little next to the timing."""

from __future__ import annotations

from typing import Any

import cupy
import ml_dtypes
import numpy as np

from benchmarks.data import CaseData

_SAMPLES = 3
_ROWS = 4


def relative_error(data: CaseData, out: Any, seed: int = 0) -> float:
    """Largest ``|out - ref| / |ref|`` (Frobenius) over sampled (request, KV head) pairs; inf if any value is not finite.

    Args:
        data: the batch that was computed.
        out: [tokens, num_qo_heads, head_dim] bfloat16 CuPy array.
        seed: of the sampling.
    """
    case = data.case
    rng = np.random.default_rng(seed)
    group = case.num_qo_heads // case.num_kv_heads
    worst = 0.0
    for request in sorted({0, case.batch_size - 1, *rng.integers(case.batch_size, size=_SAMPLES).tolist()}):
        kv_head = int(rng.integers(case.num_kv_heads))
        heads = slice(kv_head * group, (kv_head + 1) * group)
        qo_len, kv_len = case.qo_lens[request], case.kv_lens[request]
        tokens = sorted({0, qo_len - 1, *rng.integers(qo_len, size=_ROWS - 2).tolist()})
        rows = int(data.qo_indptr[request]) + np.array(tokens)
        pool_rows = cupy.asarray(data.request_rows(request))
        k, v = (_head(cache, pool_rows, kv_head, case.kv_dtype) for cache in data.paged_kv)
        q, got = _rows(data.q, rows, heads, case.q_dtype), _rows(out, rows, heads, "bfloat16")
        for i, token in enumerate(tokens):
            visible = kv_len - qo_len + token + 1 if case.causal else kv_len
            logits = q[i] @ k[:visible].T / np.sqrt(case.head_dim)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            expected = (weights / weights.sum(axis=1, keepdims=True)) @ v[:visible]
            error = float(np.linalg.norm(got[i] - expected) / np.linalg.norm(expected))
            worst = max(worst, error) if np.isfinite(error) else float("inf")
    return worst


def _head(cache: Any, pool_rows: Any, kv_head: int, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Keys or values of one request and KV head as float64 on the host."""
    bits, kind = _storage(dtype)
    flat = cache.view(bits).reshape(-1, *cache.shape[2:])[:, kv_head]
    host: np.ndarray[Any, Any] = cupy.asnumpy(cupy.take(flat, pool_rows, axis=0))
    values: np.ndarray[Any, np.dtype[np.float64]] = host.view(kind).astype(np.float64)
    return values


def _rows(array: Any, rows: np.ndarray[Any, Any], heads: slice, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Some rows of some heads of an array as float64 on the host."""
    storage, kind = _storage(dtype)
    bits: np.ndarray[Any, Any] = cupy.asnumpy(cupy.take(array.view(storage), cupy.asarray(rows), axis=0)[:, heads])
    values: np.ndarray[Any, np.dtype[np.float64]] = np.ascontiguousarray(bits).view(kind).astype(np.float64)
    return values


def _storage(dtype: str) -> tuple[Any, Any]:
    """The integers CuPy holds elements as, and their type on the host."""
    return (cupy.uint16, ml_dtypes.bfloat16) if dtype == "bfloat16" else (cupy.uint8, ml_dtypes.float8_e4m3fn)
